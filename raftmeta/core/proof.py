"""Which bytes serve a deployment where, by what its nodes said and by whether they are still heard. Pure.

What a node said counts as current only while it is heard under the boot under which it said it: the word of a silent node is shown with its
age and never taken for what serves now.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from raftmeta.core.rollout import side_called, sides
from raftmeta.core.state import State, evidence_key, version_key
from raftmeta.core.types import Deployment, Evidence, SideName, VersionSummary


class Heard(NamedTuple):
    """A node's last heartbeat, as the answering member knows it."""

    boot_id: str
    age_ms: int
    missing: bool
    ready: bool = True  # for this deployment, as far as the heartbeat says; a fence of a fail-over does not change it


class Standing(StrEnum):
    """What a node's evidence is worth now."""

    CURRENT = "current"
    RESTARTED = "restarted"  # said before its agent started anew
    UNPROVEN = "unproven"  # heard, and said nothing yet
    SILENT = "silent"  # not heard


class Proof(NamedTuple):
    """One node of a deployment."""

    node: str
    side: SideName
    standing: Standing
    evidence: Evidence | None
    heard: Heard | None

    @property
    def is_current(self) -> bool:
        return self.standing is Standing.CURRENT


_SAID = tuple(field for field in Evidence.__struct_fields__ if field not in ("deployment", "node", "side", "zone"))


def proofs(state: State, deployment: Deployment, heard: Mapping[str, Heard]) -> list[Proof]:
    """Of every node, in order of side and name."""
    found = []
    for node, side in sides(deployment).items():
        evidence, beat = state.evidence.get(evidence_key(deployment.name, node)), heard.get(node)
        found.append(Proof(node, side, _standing(evidence, beat), evidence, beat))
    return found


def decided(state: State, deployment: Deployment) -> VersionSummary | None:
    """The bytes that the deployment decided to serve, None before the first activation."""
    version = state.versions.get(version_key(deployment.model, deployment.version))
    return None if version is None else version.summary


def serves(evidence: Evidence, label: str, summary: VersionSummary | None) -> bool:
    """Whether these are the bytes of the version, and its last comparison found nothing."""
    if summary is None or evidence.finding:
        return False
    return (evidence.version, evidence.checksum, evidence.vector_root) == (label, summary.checksum, summary.vector_root)


def evidence_report(state: State, deployment: Deployment, heard: Mapping[str, Heard], now_ms: int) -> dict[str, Any]:
    """What REST answers, as values that JSON can have. `now_ms`: of the clock that stamps records."""
    summary = decided(state, deployment)
    order = (state.generation, deployment.order_revision)
    nodes = [_node(proof, deployment, summary, order, now_ms) for proof in proofs(state, deployment, heard)]
    return {
        "deployment": deployment.name,
        "model": deployment.model,
        "version": deployment.version,
        "checksum": "" if summary is None else summary.checksum,
        "vector_root": "" if summary is None else summary.vector_root,
        "generation": order[0],
        "order_revision": order[1],
        "all_serve_decided": all(node["serves_decided"] for node in nodes),
        "nodes": nodes,
    }


def _standing(evidence: Evidence | None, heard: Heard | None) -> Standing:
    if heard is None or heard.missing:
        return Standing.SILENT
    if evidence is None:
        return Standing.UNPROVEN
    return Standing.CURRENT if evidence.boot_id == heard.boot_id else Standing.RESTARTED


def _node(proof: Proof, deployment: Deployment, summary: VersionSummary | None, order: tuple[int, int], now_ms: int) -> dict[str, Any]:
    evidence, heard = proof.evidence, proof.heard
    shown: dict[str, Any] = {
        "node": proof.node,
        "side": proof.side,
        "zone": side_called(deployment, proof.side).zone,
        "standing": proof.standing,
        "heard_age_ms": None if heard is None else heard.age_ms,
        "serves_decided": False,
        "knows_order": False,
        "evidence": None,
    }
    if evidence is not None:
        shown["serves_decided"] = proof.is_current and serves(evidence, deployment.version, summary)
        shown["knows_order"] = proof.is_current and (evidence.generation, evidence.order_revision) == order
        shown["evidence"] = _said(evidence, now_ms)
    return shown


def _said(evidence: Evidence, now_ms: int) -> dict[str, Any]:
    """The record with the times that follow from it; where its node belongs stands beside it."""
    shown = {field: getattr(evidence, field) for field in _SAID}
    shown["age_ms"] = max(0, now_ms - evidence.recorded_ms)
    shown["verified_at_ms"] = max(0, evidence.recorded_ms - evidence.verified_age_ms)
    return shown
