"""Whether the other side of a deployment may take its requests: every precondition, judged alike where it is decided and where it is asked.

What the log knows is judged here. Whether a node is heard now is known to members alone and not replicated; they add it before they
propose. Force stands in for a verdict that cannot be had, for instance because the side that would have to be looked at is gone. It stands
in for nothing else: not for a rollout that is running, for a side that is not there, or for a node that is not known to hold the decided
bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from raftmeta.core.naming import named
from raftmeta.core.proof import Proof, Standing, decided, serves
from raftmeta.core.rollout import side_called
from raftmeta.core.state import State, evidence_key
from raftmeta.core.types import Deployment, Evidence, Rollout, RolloutStatus, SideName, Verdict, VersionSummary

CONSISTENT = "consistent"


class Reason(NamedTuple):
    """A precondition that does not hold."""

    code: str
    detail: str
    nodes: tuple[str, ...] = ()

    @property
    def yields(self) -> bool:
        """Whether force overrides it."""
        return self.code in OF_THE_VERDICT


class Wanted(NamedTuple):
    to: SideName
    expected: SideName | None  # the side that must serve now, None: whichever
    max_verdict_age_ms: int


class Scene(NamedTuple):
    """What the log knows of the deployment."""

    deployment: Deployment
    running: Rollout | None
    verdict: Verdict | None
    decided: VersionSummary | None  # of the version that the deployment decided, None before the first activation
    evidence: Callable[[str], Evidence | None]  # by node
    generation: int
    now_ms: int  # of the clock that stamps records


OF_THE_VERDICT = ("verdict_missing", "verdict_not_consistent", "verdict_of_another_order", "verdict_of_other_nodes", "verdict_too_old")
OF_THE_NODES = ("node_unproven", "node_serves_other_bytes", "node_silent", "node_restarted", "node_not_ready")
OF_THE_DEPLOYMENT = ("rollout_running", "side_absent", "side_serves_already", "serving_side_differs", "nothing_decided")
CODES = (*OF_THE_DEPLOYMENT, *OF_THE_VERDICT, *OF_THE_NODES)


def reasons(scene: Scene, wanted: Wanted) -> list[Reason]:
    """What speaks against it, all at once; empty when nothing does."""
    found = [*_of_the_deployment(scene, wanted), *_of_the_verdict(scene, wanted)]
    if wanted.to is SideName.STANDBY and scene.deployment.standby is None:
        return found
    return found + list(_of_the_nodes(scene, wanted.to))


def heard_reasons(proofs: Sequence[Proof], to: SideName) -> list[Reason]:
    """What a member adds that knows who is heard now."""
    silent = [proof.node for proof in proofs if proof.side is to and proof.standing is Standing.SILENT]
    restarted = [proof.node for proof in proofs if proof.side is to and proof.standing is Standing.RESTARTED]
    unready = [
        proof.node
        for proof in proofs
        if proof.side is to and proof.standing is not Standing.SILENT and proof.heard is not None and not proof.heard.ready
    ]
    found = [_of_nodes("node_silent", "sent no heartbeat", silent)] if silent else []
    found += [_of_nodes("node_restarted", "started anew since it said what it serves", restarted)] if restarted else []
    return found + ([_of_nodes("node_not_ready", "says that it is not ready to answer", unready)] if unready else [])


def scene_of(state: State, deployment: Deployment, now_ms: int) -> Scene:
    """As `now_ms` has it of the clock that stamps records."""
    rollout = state.rollouts.get(deployment.rollout_id)
    return Scene(
        deployment=deployment,
        running=rollout if rollout is not None and rollout.status is RolloutStatus.RUNNING else None,
        verdict=state.verdicts.get(deployment.name),
        decided=decided(state, deployment),
        evidence=lambda node: state.evidence.get(evidence_key(deployment.name, node)),
        generation=state.generation,
        now_ms=now_ms,
    )


def standing_against(found: Iterable[Reason], force: bool) -> list[Reason]:
    """Those that force does not override."""
    return [reason for reason in found if not (force and reason.yields)]


def told(found: Iterable[Reason]) -> str:
    return "; ".join(f"{reason.code}: {reason.detail}" for reason in found)


def _of_the_deployment(scene: Scene, wanted: Wanted) -> Iterable[Reason]:
    deployment, running = scene.deployment, scene.running
    if running is not None:
        yield Reason("rollout_running", f"rollout {running.id} to {running.to_version!a} is {running.phase}")
    if wanted.to is SideName.STANDBY and deployment.standby is None:
        yield Reason("side_absent", "there is no standby side")
    if wanted.to is deployment.serving_side:
        yield Reason("side_serves_already", f"the {wanted.to} side serves")
    if wanted.expected is not None and wanted.expected is not deployment.serving_side:
        yield Reason("serving_side_differs", f"the {deployment.serving_side} side serves, expected the {wanted.expected} side")
    if not deployment.version:
        yield Reason("nothing_decided", "no version was activated yet")


def _of_the_verdict(scene: Scene, wanted: Wanted) -> Iterable[Reason]:
    """The last verdict is that both sides hold what was decided, of this order, of these nodes, and young."""
    deployment, verdict = scene.deployment, scene.verdict
    if verdict is None:
        yield Reason("verdict_missing", "the sides were never compared")
        return
    if verdict.verdict != CONSISTENT:
        yield Reason("verdict_not_consistent", f"the last verdict, of revision {verdict.revision}, is {verdict.verdict}")
    order, basis = (scene.generation, deployment.order_revision, deployment.version), verdict.basis
    if basis is None or (basis.generation, basis.order_revision, basis.version) != order:
        of = "says of no order" if basis is None else f"is of order {(basis.generation, basis.order_revision)}"
        yield Reason("verdict_of_another_order", f"the last verdict {of}, the order now is {order[:2]}")
    elif basis.started_revision < deployment.declared_revision:
        yield Reason(
            "verdict_of_other_nodes", f"the deployment was declared anew at revision {deployment.declared_revision}, after the check"
        )
    age_ms = verdict.age_ms(scene.now_ms)
    if age_ms > wanted.max_verdict_age_ms:
        yield Reason("verdict_too_old", f"the last verdict is {age_ms} ms old, at most {wanted.max_verdict_age_ms} are allowed")


def _of_the_nodes(scene: Scene, to: SideName) -> Iterable[Reason]:
    """Every node of the side says that it serves the decided bytes."""
    unproven, other = [], []
    for node in side_called(scene.deployment, to).nodes:
        evidence = scene.evidence(node)
        if evidence is None:
            unproven.append(node)
        elif not serves(evidence, scene.deployment.version, scene.decided):
            other.append(node)
    if unproven:
        yield _of_nodes("node_unproven", "said nothing of what it serves", unproven)
    if other:
        yield _of_nodes("node_serves_other_bytes", "does not serve the decided bytes by its own word", other)


def _of_nodes(code: str, what: str, nodes: list[str]) -> Reason:
    return Reason(code, f"{named(nodes)}: {what}", tuple(nodes))
