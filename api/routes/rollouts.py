"""Rollouts: where they stand, who attested what, and stopping one before its switch is decided."""

from __future__ import annotations

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples, records
from api.schemas.bodies import AbortBody
from api.service import Service
from raftmeta.core import queries
from raftmeta.core.commands import AbortRollout

ABORTED = "aborted_by_operator"  # failure code of the rollout


async def get_rollout(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    return replies.at(state, records.rollout(queries.find_rollout(state, call.params["rollout"])))


async def abort(service: Service, call: Call) -> Reply:
    command = AbortRollout(call.params["rollout"], ABORTED, "", call.body.detail or f"aborted by {call.caller.name}")
    outcome = await service.propose(call, command)
    return replies.done(outcome.revision, {"revision": outcome.revision}, repeated=outcome.repeated)


OPERATIONS = (
    Operation(
        id="get_rollout",
        method="GET",
        path="/v1/rollouts/{rollout}",
        kind=Kind.READ,
        action="read",
        what="Look at one rollout: its phase, its attestations, its failure",
        handler=get_rollout,
        answers=(Answer(200, records.Rollout, examples.ROLLOUT, "The rollout"),),
        errors=("unknown_rollout",),
        hot=True,
    ),
    Operation(
        id="abort_rollout",
        method="POST",
        path="/v1/rollouts/{rollout}/abort",
        kind=Kind.MUTATION,
        action="abort",
        what="Stop a rollout; refused once its switch is decided",
        handler=abort,
        answers=(Answer(200, answers.Acknowledged, {"revision": 48}, "The rollout has failed, the deployment is as before"),),
        errors=("unknown_rollout", "rollout_not_running", "wrong_phase"),
        body=Body(AbortBody),
        body_optional=True,
        example={"detail": "the canary looks wrong"},
    ),
)
