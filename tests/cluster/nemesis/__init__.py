"""Three real members under faults drawn from a seed, while clients write and read; what they saw is judged afterwards.

`python -m tests.cluster.nemesis --minutes N --seed S [--faults kill,pause,...]`. It exits 0 only when no acknowledged write is missing, the
members agree, and both checkers of histories are content. What the machine cannot do is skipped with its reason.
"""
