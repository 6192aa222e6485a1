"""Attestations: what agents state about a running rollout.

The bytes must be the published ones, the phase must take the stage, and a node only goes forward. A node that booted again starts over: its
memory is gone and with it what it attested, so a new boot id replaces whatever the node said before.
"""

from __future__ import annotations

import msgspec

from raftmeta.core.commands import Attest
from raftmeta.core.handlers.checks import MAX_DETAIL, SHOWN, Refusal, code_fault, int_fault, name_fault
from raftmeta.core.handlers.rollouts import find_running
from raftmeta.core.rollout import RANK, ROWS, attestation_of, side_of_node, with_attestation
from raftmeta.core.state import MAX_INT
from raftmeta.core.types import Attestation, Rollout, Stage, StageCounters
from raftmeta.core.work import Work


def attest(work: Work, body: Attest) -> bytes | Refusal:
    fault = _field_fault(body)
    if fault is not None:
        return fault
    rollout = find_running(work, body.rollout_id)
    if isinstance(rollout, Refusal):
        return rollout
    deployment = work.deployments.get(rollout.deployment)
    assert deployment is not None, rollout.deployment
    side = side_of_node(deployment, body.node)
    if side is not body.side:
        found = "belongs to neither side" if side is None else f"belongs to the {side} side, not to the {body.side} side"
        return Refusal("unknown_node", f"node {body.node!a} of deployment {deployment.name!a} {found}")
    if body.stage not in ROWS[rollout.phase].accepts:
        return Refusal("wrong_phase", f"rollout {rollout.id!a} is {rollout.phase}, where no node can be {body.stage}")
    fault = _bytes_fault(rollout, body) or _order_fault(rollout, body)
    if fault is not None:
        return fault
    attestation = Attestation(
        node=body.node,
        side=body.side,
        stage=body.stage,
        checksum=body.checksum,
        vector_root=body.vector_root,
        boot_id=body.boot_id,
        counters=body.counters,
        code=body.code,
        detail=body.detail[:MAX_DETAIL],
        revision=work.revision,
        attested_ms=work.cluster_ms,
    )
    attestations = with_attestation(rollout.attestations, attestation)
    work.rollouts.put(rollout.id, msgspec.structs.replace(rollout, attestations=attestations))
    return b""


def _field_fault(body: Attest) -> Refusal | None:
    fault = name_fault("boot id", body.boot_id) or _counters_fault(body.counters)
    if fault is not None:
        return fault
    if body.stage is Stage.FAILED:
        return code_fault("code", body.code)
    if body.code or body.detail:
        return Refusal("bad_field", f"code and detail belong to a failure, the stage is {body.stage}")
    return None


def _counters_fault(counters: StageCounters) -> Refusal | None:
    for field, value in msgspec.structs.asdict(counters).items():
        fault = int_fault(field, value, -1 if field == "lag_ms" else 0, MAX_INT)
        if fault is not None:
            return fault
    return None


def _bytes_fault(rollout: Rollout, body: Attest) -> Refusal | None:
    """A failure may tell the bytes it found, since they may be the failure; anything else must be the published bytes."""
    if body.stage is Stage.FAILED:
        if len(body.checksum) > 64 or len(body.vector_root) > 64:
            return Refusal("bad_field", "checksum or vector_root has more than 64 characters")
        return None
    roots = ("", rollout.vector_root) if body.stage is Stage.PREPARED else (rollout.vector_root,)
    if body.checksum != rollout.checksum:
        return _mismatch(rollout, body, "checksum", rollout.checksum)
    if body.vector_root not in roots:
        return _mismatch(rollout, body, "vector_root", rollout.vector_root)
    return None


def _mismatch(rollout: Rollout, body: Attest, field: str, expected: str) -> Refusal:
    found = getattr(body, field)[:SHOWN]
    detail = f"node {body.node!a} attested {field} {found!a}, version {rollout.to_version!a} has {expected}"
    return Refusal("attestation_mismatch", detail)


def _order_fault(rollout: Rollout, body: Attest) -> Refusal | None:
    """A failure ends it where it can end the rollout; after the decision a node may recover, or the switch would never end."""
    before = attestation_of(rollout, body.node)
    if before is None or before.boot_id != body.boot_id or body.stage is Stage.FAILED:
        return None
    failure_is_final = ROWS[rollout.phase].abort_to is not None
    if RANK[before.stage] > RANK[body.stage] or (before.stage is Stage.FAILED and failure_is_final):
        return Refusal("stale_attestation", f"node {body.node!a} attested {before.stage} before {body.stage} in the same boot")
    return None
