"""The cluster as this member sees it, and its feature level."""

from __future__ import annotations

import msgspec

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import FeatureLevelBody
from api.service import Service, result_of
from raftmeta.core.commands import RaiseFeatureLevel
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
)
