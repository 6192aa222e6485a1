"""Declaring deployments: which nodes of which zones serve a model under a name.

A deployment may be declared again at any time, also while a rollout runs: the gates always look at the sides of the moment, so taking a
dead node out is how an operator lets a decided switch end. Its model is fixed while it serves a version or a rollout runs. Which side takes
requests is decided by a fail-over, with its preconditions; once there was one, no declaration decides that by moving nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from raftmeta.core.commands import DeclareDeployment
from raftmeta.core.handlers.checks import Refusal, int_fault, name_fault
from raftmeta.core.handlers.evidence import follow_nodes
from raftmeta.core.rollout import sides
from raftmeta.core.types import Deployment, Policy, Rollout, RolloutStatus, Side, SideName
from raftmeta.core.work import Work

MAX_TIMEOUT_MS = 30 * 86_400_000


@dataclass(frozen=True)
class _Layout:
    primary: Side
    standby: Side | None


def declare_deployment(work: Work, body: DeclareDeployment) -> bytes | Refusal:
    fault = name_fault("deployment", body.name) or _policy_fault(body.policy)
    if fault is not None:
        return fault
    layout = _layout(body, work.limits.max_nodes_per_side)
    if isinstance(layout, Refusal):
        return layout
    if work.catalog.model(body.model) is None:
        return Refusal("unknown_model", f"no model {body.model[:128]!a}")
    present = work.deployments.get(body.name)
    if present is None:
        return _create(work, body, layout)
    rollout = running_rollout(work, present)
    if present.model != body.model and (present.version or rollout is not None):
        return Refusal("deployment_model_fixed", f"deployment {body.name!a} belongs to model {present.model!a}, not {body.model!a}")
    fault = _serving_fault(present, layout)
    if fault is not None:
        return fault
    changed = msgspec.structs.replace(
        present,
        model=body.model,
        primary=layout.primary,
        standby=layout.standby,
        policy=body.policy,
        declared_revision=work.revision,
    )
    if msgspec.structs.replace(changed, declared_revision=present.declared_revision) == present:
        return b""
    work.deployments.put(body.name, changed)
    follow_nodes(work, present, changed)
    if rollout is not None:
        _forget_moved_nodes(work, rollout, changed)
    return b""


def _serving_fault(present: Deployment, layout: _Layout) -> Refusal | None:
    """After a fail-over no node changes sides, and somebody who served goes on serving.

    One side answers then, and nodes hear of a change one after the other: two that change places both answer until the last one has
    heard it, and nobody asked what the new one holds. A node may still be added beside those of the side that serves: a lost zone must
    not keep the other one from growing, and the new node answers with nothing but the decided bytes.
    """
    if present.failover is None:
        return None
    serving, name = present.serving_side, present.name
    if layout.standby is None and serving is SideName.STANDBY:
        return Refusal("side_serves", f"the standby side of deployment {name!a} serves; fail over to the primary side first")
    before, kept = sides(present), 0
    for side, nodes in ((SideName.PRIMARY, layout.primary.nodes), (SideName.STANDBY, layout.standby.nodes if layout.standby else ())):
        for node in nodes:
            was = before.get(node, side)
            if was is not side:
                found = f"node {node!a} of deployment {name!a} is on the {was} side, the {serving} side serves"
                expected = "a declaration moves no node between the sides after a fail-over; fail over, or take the node out first"
                return Refusal("side_serves", f"{found}: {expected}")
            kept += side is serving and node in before
    if kept:
        return None
    found = f"the {serving} side of deployment {name!a} serves, and the declaration has none of its nodes"
    return Refusal("side_serves", f"{found}: one has to stay; add others beside it, or fail over first")


def running_rollout(work: Work, deployment: Deployment) -> Rollout | None:
    rollout = work.rollouts.get(deployment.rollout_id)
    return rollout if rollout is not None and rollout.status is RolloutStatus.RUNNING else None


def _create(work: Work, body: DeclareDeployment, layout: _Layout) -> bytes | Refusal:
    if work.deployments.count >= work.limits.max_deployments:
        return Refusal("quota_exceeded", f"there are {work.limits.max_deployments} deployments, the limit")
    deployment = Deployment(
        name=body.name,
        model=body.model,
        primary=layout.primary,
        standby=layout.standby,
        policy=body.policy,
        version="",
        previous="",
        rollout_id="",
        order_revision=0,
        declared_revision=work.revision,
        activated_revision=0,
        activated_ms=0,
    )
    work.deployments.put(body.name, deployment)
    return b""


def _forget_moved_nodes(work: Work, rollout: Rollout, deployment: Deployment) -> None:
    """What a node attested counts only for the side it attested it for."""
    now = sides(deployment)
    kept = tuple(attestation for attestation in rollout.attestations if now.get(attestation.node) is attestation.side)
    if len(kept) != len(rollout.attestations):
        work.rollouts.put(rollout.id, msgspec.structs.replace(rollout, attestations=kept))


def _policy_fault(policy: Policy) -> Refusal | None:
    for name in ("prepare_timeout_ms", "sync_timeout_ms", "drain_timeout_ms"):
        fault = int_fault(name, getattr(policy, name), 1, MAX_TIMEOUT_MS)
        if fault is not None:
            return fault
    return None


def _layout(body: DeclareDeployment, limit: int) -> _Layout | Refusal:
    """The sides with their nodes in order."""
    primary = _side("primary", body.primary, limit)
    if isinstance(primary, Refusal):
        return primary
    if body.standby is None:
        return _Layout(primary, None)
    standby = _side("standby", body.standby, limit)
    if isinstance(standby, Refusal):
        return standby
    both = sorted(set(primary.nodes) & set(standby.nodes))
    if both:
        return Refusal("bad_field", f"node {both[0]!a} stands in both sides")
    return _Layout(primary, standby)


def _side(what: str, side: Side, limit: int) -> Side | Refusal:
    if not 1 <= len(side.nodes) <= limit:
        return Refusal("bad_field", f"the {what} side has {len(side.nodes)} nodes, expected 1..{limit}")
    fault = name_fault(f"zone of the {what} side", side.zone)
    nodes = tuple(sorted(side.nodes))
    for before, node in zip(("", *nodes), nodes, strict=False):
        fault = fault or name_fault(f"node of the {what} side", node)
        if before == node:
            fault = fault or Refusal("bad_field", f"node {node!a} stands twice in the {what} side")
    return fault or Side(side.zone, nodes)
