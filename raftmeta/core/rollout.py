"""The life of a rollout: one table of phases, the gates, and what the leader should propose next. Pure.

Every rule about phases is a row of TABLE: which attestations a phase takes, the gate that ends it, where it goes on and what happens then,
whether it can be aborted, and its time limit. `python -m raftmeta.core.rollout` prints the diagram of the documentation from it. Entering
`committing` is the decision: the deployment's version changes there, and nothing aborts it any more.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from raftmeta.core.commands import AbortRollout, AdvanceRollout, Body
from raftmeta.core.state import State
from raftmeta.core.types import Attestation, Deployment, Phase, Policy, Rollout, RolloutStatus, Side, SideName, Stage


class Effect(StrEnum):
    """What happens to the deployment when a phase is entered by its gate."""

    NOTHING = "nothing"
    SWITCH = "the switch order changes the deployment's version"
    FINISH = "the rollout is done"


class Row(NamedTuple):
    phase: Phase
    accepts: tuple[Stage, ...]  # attestations that may arrive in this phase
    gate: Stage | None  # every node must have attested this or a later stage, None: no gate, the phase waits for a command
    forward: Phase | None
    effect: Effect  # of going forward
    abort_to: Phase | None  # None: the decision stands
    timeout: str  # field of the policy after which the controller aborts, "" for none


TABLE = (
    Row(Phase.IDLE, (), None, Phase.PREPARING, Effect.NOTHING, None, ""),
    Row(
        Phase.PREPARING,
        (Stage.PREPARED, Stage.READY, Stage.FAILED),
        Stage.PREPARED,
        Phase.SYNCING,
        Effect.NOTHING,
        Phase.IDLE,
        "prepare_timeout_ms",
    ),
    Row(
        Phase.SYNCING,
        (Stage.PREPARED, Stage.READY, Stage.FAILED),
        Stage.READY,
        Phase.COMMITTING,
        Effect.SWITCH,
        Phase.IDLE,
        "sync_timeout_ms",
    ),
    Row(
        Phase.COMMITTING,
        (Stage.PREPARED, Stage.READY, Stage.ACTIVE, Stage.FAILED),
        Stage.ACTIVE,
        Phase.ACTIVE,
        Effect.FINISH,
        None,
        "",
    ),
    Row(Phase.ACTIVE, (), None, None, Effect.NOTHING, None, ""),
)
ROWS: dict[Phase, Row] = {row.phase: row for row in TABLE}
RANK: dict[Stage, int] = {Stage.FAILED: 0, Stage.PREPARED: 1, Stage.READY: 2, Stage.ACTIVE: 3}


def sides(deployment: Deployment) -> dict[str, SideName]:
    """Every node of a deployment with its side, in order of side and name."""
    nodes = dict.fromkeys(deployment.primary.nodes, SideName.PRIMARY)
    if deployment.standby is not None:
        nodes.update(dict.fromkeys(deployment.standby.nodes, SideName.STANDBY))
    return nodes


def side_called(deployment: Deployment, name: SideName) -> Side:
    """The side of this name, which must be there."""
    found = deployment.primary if name is SideName.PRIMARY else deployment.standby
    assert found is not None, (deployment.name, name)
    return found


def side_of_node(deployment: Deployment, node: str) -> SideName | None:
    """The side that a node belongs to; cheaper than `sides` for one of many nodes."""
    for name, side in ((SideName.PRIMARY, deployment.primary), (SideName.STANDBY, deployment.standby)):
        if side is not None:
            place = bisect_left(side.nodes, node)
            if side.nodes[place : place + 1] == (node,):
                return name
    return None


def waiting_for(rollout: Rollout, deployment: Deployment) -> list[str]:
    """Nodes that keep the gate of the rollout's phase shut, in order; empty when it holds."""
    gate = ROWS[rollout.phase].gate
    assert gate is not None, rollout.phase  # a running rollout stands in a phase with a gate
    reached = {attestation.node: RANK[attestation.stage] for attestation in rollout.attestations}
    return [node for node in sides(deployment) if reached.get(node, 0) < RANK[gate]]


def decide(state: State, now_ms: int, missing_nodes: Collection[str], since_ms: Mapping[str, int] = MappingProxyType({})) -> list[Body]:
    """What the leader's controller should propose now, at most one command for each running rollout, in order of deployment.

    `since_ms` tells, by rollout, from when on the caller counts the time of its phase; without an entry from the time stamped into the
    state. Stamped times follow wall clocks, which jump, so the controller counts on its own monotonic clock: `now_ms` and `since_ms` are
    then of that clock. Proposing the same again is harmless: a command names the phase it saw.
    """
    found: list[Body] = []
    for name in state.deployment_names:
        deployment = state.deployments[name]
        rollout = state.rollouts.get(deployment.rollout_id)
        if rollout is None or rollout.status is not RolloutStatus.RUNNING:
            continue
        waiting = waiting_for(rollout, deployment)
        abort = None if ROWS[rollout.phase].abort_to is None else _reason_to_abort(rollout, deployment, missing_nodes)
        if abort is not None:
            found.append(abort)
        elif not waiting:
            found.append(AdvanceRollout(rollout.id, rollout.phase))
        elif ROWS[rollout.phase].timeout:
            spent_ms = now_ms - since_ms.get(rollout.id, rollout.phase_ms)
            if spent_ms > _timeout_ms(rollout.phase, deployment.policy):
                found.append(_timed_out(rollout, spent_ms, waiting))
    return found


def _reason_to_abort(rollout: Rollout, deployment: Deployment, missing_nodes: Collection[str]) -> AbortRollout | None:
    for attestation in rollout.attestations:
        if attestation.stage is Stage.FAILED:
            return AbortRollout(rollout.id, attestation.code, attestation.node, attestation.detail)
    for node in sides(deployment):
        if node in missing_nodes:
            return AbortRollout(rollout.id, "node_missing", node, f"node {node!r} sent no heartbeat during {rollout.phase}")
    return None


def _timed_out(rollout: Rollout, spent_ms: int, waiting: list[str]) -> AbortRollout:
    nodes = f"{', '.join(waiting[:3])}{' and others' if len(waiting) > 3 else ''}"
    return AbortRollout(rollout.id, f"{rollout.phase}_timeout", "", f"{rollout.phase} took {spent_ms} ms, still waiting for {nodes}")


def _timeout_ms(phase: Phase, policy: Policy) -> int:
    limit = getattr(policy, ROWS[phase].timeout)
    assert isinstance(limit, int)
    return limit


def attestation_of(rollout: Rollout, node: str) -> Attestation | None:
    """What the node attested last."""
    place = bisect_left(rollout.attestations, node, key=lambda attestation: attestation.node)
    found = rollout.attestations[place : place + 1]
    return found[0] if found and found[0].node == node else None


def with_attestation(attestations: tuple[Attestation, ...], new: Attestation) -> tuple[Attestation, ...]:
    """Sorted by node, one per node: the new one replaces its node's."""
    place = bisect_left(attestations, new.node, key=lambda attestation: attestation.node)
    replaced = attestations[place : place + 1]
    after = place + 1 if replaced and replaced[0].node == new.node else place
    return (*attestations[:place], new, *attestations[after:])


def diagram() -> str:
    """The table as a mermaid state diagram."""
    return "\n".join(_diagram_lines()) + "\n"


def _diagram_lines() -> Iterator[str]:
    yield "stateDiagram-v2"
    yield f"    [*] --> {Phase.IDLE}"
    for row in TABLE:
        if row.forward is not None:
            gate = "activate or roll back" if row.gate is None else f"every node attested {row.gate}"
            effect = "" if row.effect is Effect.NOTHING else f" / {row.effect}"
            yield f"    {row.phase} --> {row.forward}: {gate}{effect}"
    for row in TABLE:
        if row.abort_to is not None:
            yield f"    {row.phase} --> {row.abort_to}: abort (a node failed or is missing, or the time is up)"
    yield f"    {Phase.ACTIVE} --> [*]"


if __name__ == "__main__":
    sys.stdout.write(diagram())
