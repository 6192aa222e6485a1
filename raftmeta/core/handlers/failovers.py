"""Fail-over: which side of a deployment takes its requests, as one decision.

The decision is a new order with the same version, so it comes to the agents of both sides through the fence: whoever obeyed it knows which
side serves. It ends no rollout and starts none; those go on with whichever side serves.
"""

from __future__ import annotations

import msgspec

from raftmeta.core import failover
from raftmeta.core.commands import FailOver
from raftmeta.core.failover import Scene, Wanted
from raftmeta.core.handlers.checks import Refusal, int_fault, result
from raftmeta.core.handlers.deployments import running_rollout
from raftmeta.core.state import evidence_key, version_key
from raftmeta.core.types import Deployment, Failover
from raftmeta.core.work import Work


def fail_over(work: Work, body: FailOver) -> bytes | Refusal:
    fault = int_fault("max_verdict_age_ms", body.max_verdict_age_ms)
    if fault is not None:
        return fault
    deployment = work.deployments.get(body.deployment)
    if deployment is None:
        return Refusal("unknown_deployment", f"no deployment {body.deployment[:128]!a}")
    scene = _scene(work, deployment)
    found = failover.reasons(scene, Wanted(body.to, body.expected_serving_side, body.max_verdict_age_ms))
    against = failover.standing_against(found, body.force)
    if against:
        lists = result(reasons=[reason.code for reason in against], details=[reason.detail for reason in against])
        return Refusal("failover_refused", failover.told(against), lists)
    overridden = tuple(reason.code for reason in found)
    decided = Failover(
        to=body.to,
        principal=work.principal,
        forced=body.force,
        overridden=overridden,
        verdict_revision=0 if scene.verdict is None else scene.verdict.revision,
        revision=work.revision,
        decided_ms=work.cluster_ms,
    )
    ordered = msgspec.structs.replace(
        deployment, serving_side=body.to, failover=decided, order_revision=work.revision, activated_revision=work.revision
    )
    work.deployments.put(deployment.name, ordered)
    return result(serving_side=body.to.value, order_revision=work.revision, overridden=list(overridden))


def _scene(work: Work, deployment: Deployment) -> Scene:
    version = work.catalog.version(version_key(deployment.model, deployment.version))
    return Scene(
        deployment=deployment,
        running=running_rollout(work, deployment),
        verdict=work.verdicts.get(deployment.name),
        decided=None if version is None else version.summary,
        evidence=lambda node: work.evidence.get(evidence_key(deployment.name, node)),
        generation=work.base.generation,
        now_ms=work.cluster_ms,
    )
