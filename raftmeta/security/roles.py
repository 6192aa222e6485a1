"""Who may do what: one table from action to roles, and the action of every command. Pure.

An action is the name by which the API, the leader and a node's serving port ask; the leader asks again about commands that another member
forwarded. An agent speaks for its own node only, whatever the table says. What is in no row is forbidden.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from raftmeta.core import commands


class Role(StrEnum):
    READER = "reader"  # looks
    PUBLISHER = "publisher"  # also publishes and deletes versions
    OPERATOR = "operator"  # also decides what serves, and records checks
    AGENT = "agent"  # a serving node: looks, reports, attests for itself
    CHECKER = "checker"  # looks, asks nodes what their memory holds and both sides the same questions, and records checks
    INFERENCE = "inference"  # asks models on the nodes, and may do nothing else
    ADMIN = "admin"  # everything that a person may do
    SYSTEM = "system"  # the members' own controller; no token gives this role


class Principal(msgspec.Struct, frozen=True):
    name: str
    role: Role

    @property
    def node(self) -> str:
        """The node that an agent speaks for, "" for others."""
        return self.name.removeprefix(AGENT_PREFIX) if self.role is Role.AGENT else ""


AGENT_PREFIX = "agent:"
SYSTEM_PREFIX = "system:"

_LOOKERS = frozenset({Role.READER, Role.PUBLISHER, Role.OPERATOR, Role.AGENT, Role.CHECKER, Role.ADMIN})
_PUBLISHERS = frozenset({Role.PUBLISHER, Role.ADMIN})
_OPERATORS = frozenset({Role.OPERATOR, Role.ADMIN})
_AGENTS = frozenset({Role.AGENT})
_ADMINS = frozenset({Role.ADMIN})

ACTIONS: dict[str, frozenset[Role]] = {
    "read": _LOOKERS,
    "watch": _LOOKERS,
    "metrics": _LOOKERS,
    "publish": _PUBLISHERS,
    "delete": _PUBLISHERS,
    "declare": _OPERATORS,
    "activate": _OPERATORS,
    "rollback": _OPERATORS,
    "failover": _OPERATORS,
    "abort": _OPERATORS | {Role.SYSTEM},
    "verdict": _OPERATORS | {Role.CHECKER},
    "heartbeat": _AGENTS,
    "attest": _AGENTS,
    "evidence": _AGENTS,
    "advance": frozenset({Role.SYSTEM}),
    "feature_level": _ADMINS,
    "members": _ADMINS,
    # on a node
    "infer": frozenset({Role.INFERENCE, Role.CHECKER, Role.ADMIN}),  # models, what they take and what they answer
    "inspect": frozenset({Role.CHECKER, Role.OPERATOR, Role.AGENT, Role.ADMIN}),  # slots, and the vector of the memory that serves
    "health": _LOOKERS | {Role.INFERENCE},
}

OWN_NODE_ONLY = frozenset({"heartbeat", "attest", "evidence"})

COMMAND_ACTIONS: dict[type[commands.Body], str] = {
    commands.Publish: "publish",
    commands.PublishBatch: "publish",
    commands.DeleteVersion: "delete",
    commands.DeclareDeployment: "declare",
    commands.Activate: "activate",
    commands.RollBack: "rollback",
    commands.Attest: "attest",
    commands.AdvanceRollout: "advance",
    commands.AbortRollout: "abort",
    commands.RecordVerdict: "verdict",
    commands.RaiseFeatureLevel: "feature_level",
    commands.RecordEvidence: "evidence",
    commands.RecordCheck: "verdict",
    commands.FailOver: "failover",
}


def permitted(principal: Principal, action: str, node: str = "") -> bool:
    """`node`: the node that the action speaks for, where it speaks for one."""
    if principal.role not in ACTIONS.get(action, frozenset()):
        return False
    return action not in OWN_NODE_ONLY or (node != "" and node == principal.node)


def takes(action: str) -> str:
    """Who may, for people."""
    roles = sorted(ACTIONS.get(action, frozenset()) - {Role.SYSTEM})
    who = "the agent of that node" if action in OWN_NODE_ONLY else " or ".join(roles)
    return f"this takes {who or 'the members themselves'}"


def node_of_resource(resource: str) -> str:
    """The node of a path like `nodes/n1/heartbeat`, "" for others."""
    kind, _, rest = resource.partition("/")
    return rest.partition("/")[0] if kind == "nodes" else ""


def command_permitted(principal: Principal, body: commands.Body) -> bool:
    """The leader's question about a forwarded command."""
    node = body.node if isinstance(body, commands.Attest | commands.RecordEvidence) else ""
    return permitted(principal, COMMAND_ACTIONS[type(body)], node)
