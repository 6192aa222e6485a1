"""Serving nodes: their heartbeats, their attestations, and the fleet as this member hears it.

A heartbeat is kept in memory and told to the other members; it is not replicated and needs no quorum. An attestation is a command.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import AttestBody
from api.service import Service
from raftmeta import nodes
from raftmeta.core.commands import Attest
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import StageCounters
from raftmeta.nodes import NodeStatus, NodeView


async def heartbeat(service: Service, call: Call) -> Reply:
    status: NodeStatus = call.body
    if status.node != call.params["node"]:
        raise RaftmetaError("bad_field", f"the heartbeat is of node {status.node!r}, the path names {call.params['node']!r}")
    member = service.member
    data = nodes.encode(status)
    member.nodes.record(status)
    member.gossip(nodes.TOPIC, data)
    state = member.state
    value = {"generation": state.generation, "revision": state.revision, "interval_ms": member.nodes.limits.interval_ms}
    return replies.at(state, value)


async def attest(service: Service, call: Call) -> Reply:
    body: AttestBody = call.body
    counters = StageCounters(*msgspec.structs.astuple(body.counters))
    command = Attest(
        rollout_id=body.rollout_id,
        node=call.params["node"],
        side=body.side,
        stage=body.stage,
        checksum=body.checksum,
        vector_root=body.vector_root,
        boot_id=body.boot_id,
        counters=counters,
        code=body.code,
        detail=body.detail,
    )
    outcome = await service.propose(call, command)
    return replies.done(outcome.revision, {"revision": outcome.revision}, repeated=outcome.repeated)


async def list_nodes(service: Service, call: Call) -> Reply:
    """Not from the replicated state, so the consistency only says which revision the reply's header names."""
    state = await service.view(call)
    after, limit = call.query.after or "", call.query.limit
    found = list(islice((view for view in service.member.nodes.views() if view.status.node > after), limit + 1))
    more = found[limit - 1].status.node if len(found) > limit else None
    return replies.at(state, {"items": [_render(view) for view in found[:limit]], "next": more})


def _render(view: NodeView) -> dict[str, Any]:
    status = view.status
    return {
        "node": status.node,
        "zone": status.zone,
        "boot_id": status.boot_id,
        "url": status.url,
        "slots": status.slots,
        "deployments": status.deployments,
        "age_ms": view.age_ms,
        "missing": view.missing,
    }


_NODE = {**examples.HEARTBEAT_BODY, "age_ms": 412, "missing": False}

OPERATIONS = (
    Operation(
        id="list_nodes",
        method="GET",
        path="/v1/nodes",
        kind=Kind.LIST,
        action="read",
        what="List the serving nodes by name, as this member last heard of them",
        handler=list_nodes,
        answers=(Answer(200, answers.NodePage, {"items": [_NODE], "next": None}, "One page"),),
        errors=(),
    ),
    Operation(
        id="heartbeat",
        method="POST",
        path="/v1/nodes/{node}/heartbeat",
        kind=Kind.DIRECT,
        action="heartbeat",
        what="An agent says that its node is there and what it serves",
        handler=heartbeat,
        answers=(Answer(200, answers.HeartbeatReply, {"generation": 1, "revision": 52, "interval_ms": 2000}, "Heard"),),
        errors=("too_many_requests",),
        body=Body(NodeStatus),
        example=examples.HEARTBEAT_BODY,
        hot=True,
    ),
    Operation(
        id="attest",
        method="POST",
        path="/v1/nodes/{node}/attestations",
        kind=Kind.MUTATION,
        action="attest",
        what="An agent states how far its node has come with a rollout, and with which bytes",
        handler=attest,
        answers=(Answer(200, answers.Acknowledged, {"revision": 47}, "Recorded"),),
        errors=("unknown_rollout", "unknown_node", "rollout_not_running", "wrong_phase", "attestation_mismatch", "stale_attestation"),
        body=Body(AttestBody),
        example=examples.ATTEST_BODY,
        hot=True,
    ),
)
