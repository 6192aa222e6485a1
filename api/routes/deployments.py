"""Deployments: declaring what serves where, and starting rollouts.

A rollout's id is derived from the request's idempotency key: a retried activation is the same command to the last byte, on any member.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import ActivateBody, DeploymentBody, RollBackBody, SideBody
from api.service import Service, result_of
from raftmeta.core import queries
from raftmeta.core.commands import Activate, DeclareDeployment, RollBack
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Outcome, Policy, Side


async def list_deployments(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    return replies.page(state, queries.deployments_page(state, call.query.limit, call.query.after))


async def get_deployment(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    record = queries.find_deployment(state, call.params["deployment"])
    return replies.at(state, queries.deployment_resource(state, record))


async def list_rollouts(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    return replies.page(state, queries.rollouts_page(state, call.params["deployment"], call.query.limit, call.query.after))


async def served_at(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    at_ms = state.cluster_ms if call.query.at_ms is None else call.query.at_ms
    return replies.at(state, queries.served_at(state, call.params["deployment"], at_ms)._asdict())


async def declare(service: Service, call: Call) -> Reply:
    name, body = call.params["deployment"], call.body
    primary = _side("primary", body.primary)
    standby = _side("standby", body.standby) if body.standby is not None else None
    shared = set(primary.nodes) & set(standby.nodes) if standby is not None else set()
    if shared:
        raise RaftmetaError("bad_field", f"node {min(shared)!r} stands on both sides")
    asked = body.policy
    policy = Policy(asked.prepare_timeout_ms, asked.sync_timeout_ms, asked.drain_timeout_ms, asked.drain_overdue)
    outcome = await service.propose(call, DeclareDeployment(name, body.model, primary, standby, policy))
    state = service.state_with(outcome.revision)
    shown = queries.deployment_resource(state, state.deployments[name])  # deployments are never deleted
    return replies.done(outcome.revision, shown, repeated=outcome.repeated)


async def activate(service: Service, call: Call) -> Reply:
    body, rollout_id = call.body, _rollout_id(call)
    command = Activate(call.params["deployment"], body.version, body.expected_version, rollout_id)
    return _started(await service.propose(call, command), rollout_id)


async def roll_back(service: Service, call: Call) -> Reply:
    rollout_id = _rollout_id(call)
    command = RollBack(call.params["deployment"], call.body.expected_version, rollout_id)
    return _started(await service.propose(call, command), rollout_id)


def _side(what: str, side: SideBody) -> Side:
    nodes = tuple(sorted(side.nodes))
    for before, node in pairwise(nodes):
        if before == node:
            raise RaftmetaError("bad_field", f"node {node!r} stands twice on the {what} side")
    return Side(side.zone, nodes)


def _rollout_id(call: Call) -> str:
    return "r-" + hashlib.sha256(f"raftmeta rollout\0{call.key}".encode()).hexdigest()[:16]


def _started(outcome: Outcome, rollout_id: str) -> Reply:
    value = {"rollout_id": result_of(outcome).get("rollout_id", rollout_id), "revision": outcome.revision}
    return replies.done(outcome.revision, value, status=202, repeated=outcome.repeated)


_STARTED = Answer(
    202, answers.RolloutStarted, {"rollout_id": examples.ROLLOUT_ID, "revision": 42}, "The rollout runs; watch it or read it by its id"
)

OPERATIONS = (
    Operation(
        id="list_deployments",
        method="GET",
        path="/v1/deployments",
        kind=Kind.LIST,
        action="read",
        what="List the deployments by name",
        handler=list_deployments,
        answers=(Answer(200, answers.DeploymentPage, {"items": [examples.DEPLOYMENT], "next": None}, "One page"),),
        errors=(),
    ),
    Operation(
        id="get_deployment",
        method="GET",
        path="/v1/deployments/{deployment}",
        kind=Kind.READ,
        action="read",
        what="Look at one deployment",
        handler=get_deployment,
        answers=(Answer(200, answers.Deployment, examples.DEPLOYMENT, "The deployment"),),
        errors=("unknown_deployment",),
        hot=True,
    ),
    Operation(
        id="declare_deployment",
        method="PUT",
        path="/v1/deployments/{deployment}",
        kind=Kind.MUTATION,
        action="declare",
        what="Declare a deployment: its model, its sides and their nodes, its policy",
        handler=declare,
        answers=(Answer(200, answers.Deployment, examples.DECLARED, "The deployment as it is now"),),
        errors=("unknown_model", "rollout_in_progress", "deployment_model_fixed", "side_serves"),
        body=Body(DeploymentBody),
        example=examples.DEPLOYMENT_BODY,
    ),
    Operation(
        id="list_rollouts",
        method="GET",
        path="/v1/deployments/{deployment}/rollouts",
        kind=Kind.LIST,
        action="read",
        what="List the rollouts of a deployment that are kept, the newest first",
        handler=list_rollouts,
        answers=(Answer(200, answers.RolloutPage, {"items": [examples.ROLLOUT], "next": None}, "One page"),),
        errors=("unknown_deployment", "unknown_rollout"),
    ),
    Operation(
        id="served_at",
        method="GET",
        path="/v1/deployments/{deployment}/served",
        kind=Kind.READ,
        action="read",
        what="What a deployment served at a time, by the switches that were decided",
        handler=served_at,
        answers=(Answer(200, answers.Served, examples.SERVED, "The version, and since when until when it was the decided one"),),
        errors=("unknown_deployment", "compacted"),
        extra_query=("at_ms",),
    ),
    Operation(
        id="activate",
        method="POST",
        path="/v1/deployments/{deployment}/activate",
        kind=Kind.MUTATION,
        action="activate",
        what="Start a rollout to a version",
        handler=activate,
        answers=(_STARTED,),
        errors=("unknown_deployment", "unknown_version", "rollout_in_progress", "expected_version_mismatch", "already_active"),
        body=Body(ActivateBody),
        example={"version": "1.4.0", "expected_version": "1.3.2"},
    ),
    Operation(
        id="rollback",
        method="POST",
        path="/v1/deployments/{deployment}/rollback",
        kind=Kind.MUTATION,
        action="rollback",
        what="Start a rollout to the version that served before",
        handler=roll_back,
        answers=(_STARTED,),
        errors=("unknown_deployment", "rollout_in_progress", "expected_version_mismatch", "nothing_to_roll_back"),
        body=Body(RollBackBody),
        body_optional=True,
        example={"expected_version": "1.4.0"},
    ),
)
