"""`raftmeta demo`: one model update end to end on one machine, measured, with claims that can fail.

`story` tells it, over `fleet` (processes and configuration), `load` and `writer` (clients) and `finetune` (a process of its own).
`measure` and `claims` are pure. It drives processes and HTTP only, as a user would, and imports nothing of the members, the agents or the
checker.
"""
