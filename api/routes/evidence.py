"""Evidence: agents say which bytes their node serves with, and anybody may ask which bytes serve where now.

What was said is replicated and read linearizably; whether a node is still heard is what this member heard, as in the list of nodes.
"""

from __future__ import annotations

import msgspec

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import EvidenceBody
from api.service import Service
from raftmeta.core.commands import RecordEvidence
from raftmeta.core.proof import Heard, evidence_report
from raftmeta.core.queries import find_deployment
from raftmeta.core.rollout import sides
from raftmeta.core.types import Deployment

NODE_BYTES = 650  # of one node in the answer, about; of many it is made beside the event loop


async def get_evidence(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    deployment = find_deployment(state, call.params["deployment"])
    seen, now_ms = heard(service, deployment), service.clock_ms()
    standby = () if deployment.standby is None else deployment.standby.nodes
    size_bytes = NODE_BYTES * (len(deployment.primary.nodes) + len(standby))
    return await service.compute(size_bytes, lambda: replies.at(state, evidence_report(state, deployment, seen, now_ms)))


async def record_evidence(service: Service, call: Call) -> Reply:
    body: EvidenceBody = call.body
    command = RecordEvidence(node=call.params["node"], **msgspec.structs.asdict(body))
    outcome = await service.propose(call, command)
    return replies.done(outcome.revision, {"revision": outcome.revision}, repeated=outcome.repeated)


def heard(service: Service, deployment: Deployment) -> dict[str, Heard]:
    """Its nodes that this member heard of. One that has just started hears of all within a few heartbeats; until then they are silent."""
    views = service.member.nodes.views_of(sides(deployment))
    found = {}
    for node, view in views.items():
        serving = view.status.deployments.get(deployment.name)
        found[node] = Heard(view.status.boot_id, view.age_ms, view.missing, serving is None or serving.ready)
    return found


OPERATIONS = (
    Operation(
        id="get_evidence",
        method="GET",
        path="/v1/deployments/{deployment}/evidence",
        kind=Kind.READ,
        action="read",
        what="Which bytes serve a deployment where now, by what its nodes found in their memory",
        handler=get_evidence,
        answers=(Answer(200, answers.EvidenceReport, examples.EVIDENCE, "Every node of both sides, with what it said last"),),
        errors=("unknown_deployment",),
    ),
    Operation(
        id="record_evidence",
        method="POST",
        path="/v1/nodes/{node}/evidence",
        kind=Kind.MUTATION,
        action="evidence",
        what="An agent says which bytes its node serves with now",
        handler=record_evidence,
        answers=(Answer(200, answers.Acknowledged, {"revision": 58}, "Recorded"),),
        errors=("unknown_deployment", "unknown_node", "stale_evidence"),
        body=Body(EvidenceBody),
        example=examples.EVIDENCE_BODY,
    ),
)
