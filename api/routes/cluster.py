"""The cluster as this member sees it, and the verdicts of the consistency checks."""

from __future__ import annotations

import msgspec

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import MAX_REPORT_BYTES, VerdictBody
from api.service import Service
from raftmeta.core import queries
from raftmeta.core.commands import RecordVerdict
from raftmeta.core.errors import RaftmetaError


async def get_cluster(service: Service, call: Call) -> Reply:
    state = await service.view(call, of_itself=True)
    value = msgspec.structs.asdict(service.member.log.status())
    value["caught_up"] = not service.member.unsound
    value["generation"] = state.generation
    value["feature_level"] = state.feature_level
    value["state_hash"] = state.state_hash.hex()
    value["revision"] = state.revision
    return replies.at(state, value)


async def get_consistency(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    return replies.page(state, queries.verdicts_page(state, call.query.limit, call.query.after))


async def record_verdict(service: Service, call: Call) -> Reply:
    body: VerdictBody = call.body
    report = replies.encode(body.report)
    if len(report) > MAX_REPORT_BYTES:
        raise RaftmetaError("bad_field", f"the report has {len(report)} bytes as compact JSON, the limit is {MAX_REPORT_BYTES}")
    outcome = await service.propose(call, RecordVerdict(body.deployment, body.verdict, report))
    return replies.done(outcome.revision, {"revision": outcome.revision}, repeated=outcome.repeated)


OPERATIONS = (
    Operation(
        id="get_cluster",
        method="GET",
        path="/v1/cluster",
        kind=Kind.READ,
        action="read",
        what="The members, the log and the state's hash as this member sees them",
        handler=get_cluster,
        answers=(Answer(200, answers.Cluster, examples.CLUSTER, "The cluster"),),
        errors=(),
    ),
    Operation(
        id="get_consistency",
        method="GET",
        path="/v1/consistency",
        kind=Kind.LIST,
        action="read",
        what="The last verdict of each deployment's consistency check",
        handler=get_consistency,
        answers=(Answer(200, answers.VerdictPage, {"items": [examples.VERDICT], "next": None}, "One page"),),
        errors=(),
    ),
    Operation(
        id="record_verdict",
        method="POST",
        path="/v1/consistency",
        kind=Kind.MUTATION,
        action="verdict",
        what="A checker records what it found",
        handler=record_verdict,
        answers=(Answer(200, answers.Acknowledged, {"revision": 53}, "Recorded"),),
        errors=("unknown_deployment",),
        body=Body(VerdictBody, free_form=True),
        example=examples.VERDICT_BODY,
    ),
)
