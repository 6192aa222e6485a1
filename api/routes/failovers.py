"""Fail-over: asking what speaks against it, and deciding it.

The log judges what it knows; this member adds which nodes it does not hear, before anything is proposed.
"""

from __future__ import annotations

from typing import Any

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.routes.evidence import heard
from api.schemas import answers, examples
from api.schemas.bodies import FailOverBody
from api.service import Service, result_of
from raftmeta.core.commands import FailOver
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.failover import Reason, Wanted, heard_reasons, reasons, scene_of, standing_against, told
from raftmeta.core.proof import proofs
from raftmeta.core.queries import find_deployment
from raftmeta.core.state import State
from raftmeta.core.types import SideName

MAX_VERDICT_AGE_MS = 300_000  # by default
UNKNOWN_TO_THE_LOG = frozenset({"node_silent", "node_restarted", "node_not_ready"})


async def preview(service: Service, call: Call) -> Reply:
    query = call.query
    state = await service.view(call)
    deployment = find_deployment(state, call.params["deployment"])
    to = query.to or (SideName.PRIMARY if deployment.serving_side is SideName.STANDBY else SideName.STANDBY)
    age_ms = MAX_VERDICT_AGE_MS if query.max_verdict_age_ms is None else query.max_verdict_age_ms
    found = _all_reasons(service, state, deployment.name, Wanted(to, None, age_ms))
    value = {
        "deployment": deployment.name,
        "serving_side": deployment.serving_side.value,
        "to": to.value,
        "version": deployment.version,
        "allowed": not found,
        "allowed_with_force": not standing_against(found, True),
        "reasons": [_shown(reason) for reason in found],
    }
    return replies.at(state, value)


async def fail_over(service: Service, call: Call) -> Reply:
    body: FailOverBody = call.body
    name = call.params["deployment"]
    command = FailOver(name, body.to, body.expected_serving_side, body.max_verdict_age_ms, body.force)
    await service.require_level(command)
    state = await service.view(call)
    if state.outcome(call.key) is None:  # a repetition is answered by the log, whoever is heard by now
        _refuse_unheard(service, state, name, body)
    outcome = await service.propose(call, command)
    return replies.done(outcome.revision, {**result_of(outcome), "revision": outcome.revision}, repeated=outcome.repeated)


def _refuse_unheard(service: Service, state: State, name: str, body: FailOverBody) -> None:
    """Raises RaftmetaError failover_refused with all that speaks against it, when some of that is not known to the log."""
    found = _all_reasons(service, state, name, Wanted(body.to, body.expected_serving_side, body.max_verdict_age_ms))
    against = standing_against(found, body.force)
    if any(reason.code in UNKNOWN_TO_THE_LOG for reason in against):
        codes, details = [reason.code for reason in against], [reason.detail for reason in against]
        raise RaftmetaError("failover_refused", told(against), reasons=codes, details=details)


def _all_reasons(service: Service, state: State, name: str, wanted: Wanted) -> list[Reason]:
    deployment = find_deployment(state, name)
    found = reasons(scene_of(state, deployment, service.clock_ms()), wanted)
    return found + heard_reasons(proofs(state, deployment, heard(service, deployment)), wanted.to)


def _shown(reason: Reason) -> dict[str, Any]:
    return {"code": reason.code, "detail": reason.detail, "nodes": reason.nodes, "yields": reason.yields}


OPERATIONS = (
    Operation(
        id="preview_failover",
        method="GET",
        path="/v1/deployments/{deployment}/failover",
        kind=Kind.READ,
        action="read",
        what="What speaks against a fail-over now, without deciding anything",
        handler=preview,
        answers=(Answer(200, answers.FailoverPreview, examples.FAILOVER_PREVIEW, "All preconditions that do not hold"),),
        errors=("unknown_deployment",),
        extra_query=("to", "max_verdict_age_ms"),
    ),
    Operation(
        id="fail_over",
        method="POST",
        path="/v1/deployments/{deployment}/failover",
        kind=Kind.MUTATION,
        action="failover",
        what="Decide that the other side takes requests from here on",
        handler=fail_over,
        answers=(
            Answer(
                200,
                answers.FailedOver,
                {"serving_side": "standby", "order_revision": 60, "overridden": ["verdict_missing"], "revision": 60},
                "Decided; the agents of both sides obey it as they hear of it",
            ),
        ),
        errors=("unknown_deployment", "failover_refused"),
        body=Body(FailOverBody),
        example={"to": "standby", "expected_serving_side": "primary", "max_verdict_age_ms": 300_000, "force": True},
    ),
)
