"""The cluster as this member sees it, and the verdicts of the consistency checks."""

from __future__ import annotations

import msgspec

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import MAX_REPORT_BYTES, FeatureLevelBody, VerdictBody
from api.service import Service, result_of
from raftmeta.core import queries
from raftmeta.core.commands import RaiseFeatureLevel, RecordVerdict
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.levels import raise_fault


async def get_cluster(service: Service, call: Call) -> Reply:
    state = await service.view(call, of_itself=True)
    value = msgspec.structs.asdict(service.member.log.status())
    value["caught_up"] = not service.member.unsound
    value["generation"] = state.generation
    value["feature_level"] = state.feature_level
    value["state_hash"] = state.state_hash.hex()
    value["revision"] = state.revision
    return replies.at(state, value)


async def raise_feature_level(service: Service, call: Call) -> Reply:
    level = call.body.level
    if level > service.member.state.feature_level:
        fault = raise_fault(level, {member.id: member.feature_level for member in service.member.log.status().members})
        if fault:
            raise RaftmetaError("feature_level_unsupported", fault)
    outcome = await service.propose(call, RaiseFeatureLevel(level))
    value = {"feature_level": result_of(outcome).get("level", level), "revision": outcome.revision}
    return replies.done(outcome.revision, value, repeated=outcome.repeated)


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
        id="raise_feature_level",
        method="POST",
        path="/v1/cluster/feature-level",
        kind=Kind.MUTATION,
        action="feature_level",
        what="Let the members write what a newer build brought; it cannot be lowered, and every member must run such a build",
        handler=raise_feature_level,
        answers=(Answer(200, answers.FeatureLevel, {"feature_level": 2, "revision": 54}, "The level now"),),
        errors=("feature_level_unsupported",),
        body=Body(FeatureLevelBody),
        example={"level": 2},
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
