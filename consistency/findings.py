"""The words of a check, as frozen values: what should be there, what the nodes answered, what came out. Pure.

A `Target` is the decision of the cluster, an `Answer` is what one node said or why it said nothing, a `Verdict` is the result. JSON of the
verdict is a promise: fields are added, never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

CONSISTENT, DIVERGED, INCOMPLETE = "consistent", "diverged", "incomplete"
EXIT_STATUS = {CONSISTENT: 0, DIVERGED: 1, INCOMPLETE: 2}


class Limits(msgspec.Struct, frozen=True):
    """How far the two sides may be apart. Everything else has no tolerance."""

    lag_ms: float = 200.0  # between the sides' mean version lags


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the manifest."""

    entry: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class NodePlace(msgspec.Struct, frozen=True):
    """A node of the deployment and what it should report beside the weights."""

    node: str
    side: str  # primary | standby
    zone: str
    models_least: int  # active models that the cluster has decided for the node
    models_most: int  # more than `models_least` while another deployment of the node is being switched
    attested_lag_ms: int = -1  # of the rollout that brought the version, -1 when it names none


class Target(msgspec.Struct, frozen=True):
    """What the cluster has decided for a deployment, at one revision."""

    deployment: str
    model: str
    version: str  # "" before the first activation
    places: tuple[NodePlace, ...]
    number: int = 0
    checksum: str = ""
    vector_root: str = ""
    config_digest: str = ""
    tensor_count: int = 0
    switching: str = ""  # why the sides may differ right now, "" when they may not
    revision: int = 0
    generation: int = 0
    tensors: Mapping[str, TensorSpec] = {}  # the manifest's, once a root differed and they were needed


class NodeVector(msgspec.Struct, frozen=True):
    """An agent's answer, computed from the memory that serves."""

    node: str
    boot_id: str
    deployment: str
    model: str
    version: str
    checksum: str
    slot: int | str
    epoch: int
    vector_root: str
    config_digest: str
    computed_at_ms: int
    lag_ms: float
    active_models: int
    switching: bool
    entries: dict[str, str] | None = None

    @property
    def identity(self) -> tuple[str, str, int | str, int]:
        """Two answers with the same identity speak of the same memory."""
        return self.boot_id, self.checksum, self.slot, self.epoch


class Answer(msgspec.Struct, frozen=True):
    """What one node said; without a vector, why."""

    place: NodePlace
    vector: NodeVector | None
    code: str = ""
    detail: str = ""


class Reason(msgspec.Struct, frozen=True):
    """Something that could not be looked at."""

    code: str  # switching | nothing_active | lag_unknown | one of an answer
    node: str  # "" when it concerns no single node
    detail: str


class Finding(msgspec.Struct, frozen=True):
    """One difference beyond its limit."""

    code: str  # version | config | vector_root | tensor | block | tensor_missing | tensor_extra | self_contradiction | active_models | lag
    model: str
    deployment: str
    node: str  # "" when it concerns a whole side
    expected: str
    found: str
    tensor: str = ""
    block: int = -1  # index of the 64 KiB block, -1 when it is not known or does not apply
    detail: str = ""


class NodeSummary(msgspec.Struct, frozen=True):
    node: str
    side: str
    zone: str
    answered: bool
    version: str = ""
    slot: int | str = ""
    epoch: int = -1
    boot_id: str = ""
    vector_root: str = ""
    equal_to_manifest: bool | None = None  # None when it could not be told
    tensors_different: int = 0
    active_models: int = -1
    lag_ms: float = -1.0
    code: str = ""  # why it did not answer
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True):
    verdict: str
    deployment: str
    model: str
    version: str
    number: int
    checksum: str
    vector_root: str
    revision: int
    generation: int
    models_primary: int | None  # the fewest that a node of the side has active; None when none answered
    models_standby: int | None
    lag_ms_primary: float | None  # mean over the side's nodes
    lag_ms_standby: float | None
    mismatch_ratio: float | None  # share of the manifest's tensors that differ on some node
    tensors_total: int
    tensors_different: int
    limits: Limits
    nodes: tuple[NodeSummary, ...]
    reasons: tuple[Reason, ...]
    findings: tuple[Finding, ...]  # the first MAX_FINDINGS
    findings_total: int

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]


def worst(verdicts: list[str]) -> str:
    """Of several verdicts: a difference weighs more than a gap; nothing looked at is a gap."""
    for verdict in (DIVERGED, INCOMPLETE):
        if verdict in verdicts:
            return verdict
    return CONSISTENT if verdicts else INCOMPLETE
