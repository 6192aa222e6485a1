"""Starting, advancing and aborting rollouts. What a phase allows stands in `rollout.TABLE`; here the rows are carried out.

One rollout of a deployment runs at a time, and a refusal that says so carries the id of the running one. A roll-back is a rollout to the
previous version through the same phases. The ids are chosen by the proposer.
"""

from __future__ import annotations

import msgspec

from raftmeta.core.commands import AbortRollout, Activate, AdvanceRollout, RollBack
from raftmeta.core.handlers.checks import MAX_DETAIL, Refusal, code_fault, name_fault, result
from raftmeta.core.handlers.deployments import running_rollout
from raftmeta.core.naming import named
from raftmeta.core.rollout import ROWS, Effect, waiting_for
from raftmeta.core.state import version_key
from raftmeta.core.types import Deployment, Failure, Phase, Rollout, RolloutKind, RolloutStatus
from raftmeta.core.work import Work


def activate(work: Work, body: Activate) -> bytes | Refusal:
    deployment = _ready(work, body)
    if isinstance(deployment, Refusal):
        return deployment
    if deployment.version == body.version and body.version:
        return Refusal("already_active", f"deployment {deployment.name!a} serves version {body.version!a} already")
    return _start(work, deployment, body.rollout_id, RolloutKind.ACTIVATE, body.version)


def roll_back(work: Work, body: RollBack) -> bytes | Refusal:
    deployment = _ready(work, body)
    if isinstance(deployment, Refusal):
        return deployment
    if not deployment.previous:
        return Refusal("nothing_to_roll_back", f"deployment {deployment.name!a} has no previous version")
    return _start(work, deployment, body.rollout_id, RolloutKind.ROLL_BACK, deployment.previous)


def advance_rollout(work: Work, body: AdvanceRollout) -> bytes | Refusal:
    rollout = find_running(work, body.rollout_id)
    if isinstance(rollout, Refusal):
        return rollout
    if rollout.phase is not body.from_phase:
        return Refusal("wrong_phase", f"rollout {rollout.id!a} is {rollout.phase}, not {body.from_phase}")
    deployment = _deployment_of(work, rollout)
    waiting = waiting_for(rollout, deployment)
    if waiting:
        return Refusal("gate_not_met", f"rollout {rollout.id!a} is {rollout.phase} and waits for {named(waiting)}")
    row = ROWS[rollout.phase]
    assert row.forward is not None, row
    changes: dict[str, object] = {"phase": row.forward, "phase_revision": work.revision, "phase_ms": work.cluster_ms}
    if row.effect is Effect.SWITCH:
        changes |= {"switched_revision": work.revision, "switched_ms": work.cluster_ms}
        _switch(work, deployment, rollout)
    elif row.effect is Effect.FINISH:
        changes |= {"status": RolloutStatus.DONE, "ended_ms": work.cluster_ms}
        done = msgspec.structs.replace(deployment, activated_revision=work.revision, activated_ms=work.cluster_ms)
        work.deployments.put(deployment.name, done)
    work.rollouts.put(rollout.id, msgspec.structs.replace(rollout, **changes))
    return result(phase=row.forward.value)


def abort_rollout(work: Work, body: AbortRollout) -> bytes | Refusal:
    """The failed rollout keeps the phase it failed in; its deployment is idle again and serves what it served."""
    fault = code_fault("code", body.code) or (name_fault("node", body.node) if body.node else None)
    if fault is not None:
        return fault
    rollout = find_running(work, body.rollout_id)
    if isinstance(rollout, Refusal):
        return rollout
    if ROWS[rollout.phase].abort_to is None:
        return Refusal("wrong_phase", f"rollout {rollout.id!a} is {rollout.phase}: the switch is decided, roll back after it")
    failure = Failure(body.code, body.node, body.detail[:MAX_DETAIL])
    failed = msgspec.structs.replace(rollout, status=RolloutStatus.FAILED, failure=failure, ended_ms=work.cluster_ms)
    work.rollouts.put(rollout.id, failed)
    return b""


def find_running(work: Work, rollout_id: str) -> Rollout | Refusal:
    rollout = work.rollouts.get(rollout_id)
    if rollout is None:
        return Refusal("unknown_rollout", f"no rollout {rollout_id[:128]!a}")
    if rollout.status is not RolloutStatus.RUNNING:
        return Refusal("rollout_not_running", f"rollout {rollout.id!a} is {rollout.status}")
    return rollout


def _ready(work: Work, body: Activate | RollBack) -> Deployment | Refusal:
    """The deployment of a command that starts a rollout, if it may start one."""
    deployment = work.deployments.get(body.deployment)
    if deployment is None:
        return Refusal("unknown_deployment", f"no deployment {body.deployment[:128]!a}")
    running = running_rollout(work, deployment)
    if running is not None:
        detail = f"rollout {running.id!a} of deployment {deployment.name!a} to version {running.to_version!a} is {running.phase}"
        return Refusal("rollout_in_progress", detail, result(rollout_id=running.id))
    if body.expected_version is not None and body.expected_version != deployment.version:
        detail = f"deployment {deployment.name!a} serves {deployment.version!a}, expected {body.expected_version[:128]!a}"
        return Refusal("expected_version_mismatch", detail, result(version=deployment.version))
    if work.rollouts.get(body.rollout_id) is not None:
        return Refusal("bad_field", f"rollout id {body.rollout_id!a} is taken")
    return name_fault("rollout id", body.rollout_id) or deployment


def _start(work: Work, deployment: Deployment, rollout_id: str, kind: RolloutKind, label: str) -> bytes | Refusal:
    version = work.catalog.version(version_key(deployment.model, label))
    if version is None:
        return Refusal("unknown_version", f"model {deployment.model!a} has no version {label[:128]!a}")
    forward = ROWS[Phase.IDLE].forward
    assert forward is not None
    rollout = Rollout(
        id=rollout_id,
        deployment=deployment.name,
        kind=kind,
        model=deployment.model,
        from_version=deployment.version,
        to_version=label,
        checksum=version.summary.checksum,
        vector_root=version.summary.vector_root,
        phase=forward,
        status=RolloutStatus.RUNNING,
        attestations=(),
        failure=None,
        principal=work.principal,
        started_revision=work.revision,
        started_ms=work.cluster_ms,
        phase_revision=work.revision,
        phase_ms=work.cluster_ms,
        ended_ms=0,
    )
    work.rollouts.put(rollout_id, rollout)
    work.deployments.put(deployment.name, msgspec.structs.replace(deployment, rollout_id=rollout_id))
    kept = (*work.history.get(deployment.name), rollout_id)
    surplus = max(len(kept) - work.limits.max_rollouts_per_deployment, 0)
    for old in kept[:surplus]:
        work.rollouts.delete(old)
    work.history.put(deployment.name, kept[surplus:])
    return result(rollout_id=rollout_id)


def _switch(work: Work, deployment: Deployment, rollout: Rollout) -> None:
    """The switch order: from this revision on the agents flip, and nothing takes it back but another rollout."""
    ordered = msgspec.structs.replace(deployment, version=rollout.to_version, previous=deployment.version, order_revision=work.revision)
    work.deployments.put(deployment.name, ordered)


def _deployment_of(work: Work, rollout: Rollout) -> Deployment:
    deployment = work.deployments.get(rollout.deployment)
    assert deployment is not None, rollout.deployment  # deployments are never deleted
    return deployment
