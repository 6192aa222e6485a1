"""The words of a check, as frozen values: what should be there, what the nodes answered, what came out. Pure.

A `Target` is the decision of the cluster, an `Answer` is what one node said or why it said nothing, a `Verdict` is the result. JSON of the
verdict is a promise: fields are added, never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

CONSISTENT, DIVERGED, INCOMPLETE = "consistent", "diverged", "incomplete"
EXIT_STATUS = {CONSISTENT: 0, DIVERGED: 1, INCOMPLETE: 2}


MAJORITY, ALL = "majority", "all"


class Limits(msgspec.Struct, frozen=True):
    """How far the two sides may be apart, and what may be left out. Everything else has no tolerance."""

    lag_ms: float = 200.0  # between the sides' mean version lags
    quorum: str = ALL  # of each side's nodes that must have been seen: all | majority | a number, which means all of a smaller side
    max_age_ms: int | None = None  # of a reading of a node's memory; None: it is read for this check
    deep: bool = False  # SHA-256 of every tensor too

    def needed(self, nodes: int) -> int:
        """How many of a side's nodes must have been seen; never none."""
        wanted = nodes if self.quorum == ALL else nodes // 2 + 1 if self.quorum == MAJORITY else int(self.quorum)
        return max(1, min(wanted, nodes))


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the manifest."""

    entry: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    sha256: str = ""


class NodePlace(msgspec.Struct, frozen=True):
    """A node of the deployment and what it should report beside the weights."""

    node: str
    side: str  # primary | standby
    zone: str
    models_least: int  # active models that the cluster has decided for the node
    models_most: int  # more than `models_least` while another deployment of the node is being switched


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
    moved: bool = False  # the order was another one at the end than at the beginning
    order_revision: int = 0  # of the order that this is
    started_revision: int = 0  # of the state in which it was read first
    revision: int = 0  # of the state in which it was read last
    generation: int = 0
    attested_lags: Mapping[str, int] = {}  # node -> lag in ms of the rollout that brought the version, as far as they were needed
    tensors: Mapping[str, TensorSpec] = {}  # those of the manifest that some node differs in


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
    age_ms: int = 0  # when the node answered, since it began to read its memory
    under_way_ms: int = 0  # from then until the answer was here, at most

    @property
    def identity(self) -> tuple[str, str, int | str, int]:
        """Two answers with the same identity speak of the same memory."""
        return self.boot_id, self.checksum, self.slot, self.epoch


class DigestPage(msgspec.Struct, frozen=True):
    """SHA-256 of some tensors of a node's memory, in order of their names."""

    node: str
    boot_id: str
    deployment: str
    checksum: str
    slot: int | str
    epoch: int
    sha256: dict[str, str]
    following: str  # the last name here when more follow, "" at the end
    taken_s: float = 0.0  # by the node, to answer

    @property
    def identity(self) -> tuple[str, str, int | str, int]:
        return self.boot_id, self.checksum, self.slot, self.epoch


class Difference(msgspec.Struct, frozen=True):
    """In what a node's tensors differ from the manifest's, counted in full and listed up to a bound."""

    root: str  # that the node's entries add up to
    changed: tuple[tuple[str, str], ...]  # (name, entry found), by name
    missing: tuple[str, ...]
    extra: tuple[tuple[str, str], ...]
    extra_total: int
    bits: int  # the i-th is set when the i-th tensor of the manifest by name is changed or missing

    @property
    def total(self) -> int:
        return self.bits.bit_count() + self.extra_total


class Digested(msgspec.Struct, frozen=True):
    """The SHA-256 of every tensor of a node was compared."""

    wrong: tuple[tuple[str, str], ...]  # (name, digest found), by name, up to a bound
    wrong_total: int


class Answer(msgspec.Struct, frozen=True):
    """What one node said; without a vector, why."""

    place: NodePlace
    vector: NodeVector | None
    code: str = ""
    detail: str = ""
    difference: Difference | None = None  # when its root is not the manifest's and its tensors were told
    digested: Digested | None = None
    since_ms: int = 0  # from the moment at which the node answered to the verdict, at most


class Reason(msgspec.Struct, frozen=True):
    """Something that could not be looked at."""

    code: str  # switching | nothing_active | lag_unknown | one of an answer
    node: str  # "" when it concerns no single node
    detail: str


class Finding(msgspec.Struct, frozen=True):
    """One difference beyond its limit."""

    code: str  # version | config | sides | vector_root | tensor | block | tensor_missing | tensor_extra | self_contradiction | sha256
    # | active_models | lag
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
    age_ms: int = -1  # of what is known of its memory, when the verdict was given
    sha256_equal: bool | None = None  # None when the digests were not compared


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
    order_revision: int = 0  # the order that was looked at; a verdict is of no other
    started_revision: int = 0
    nodes_total: int = 0
    nodes_seen: int = 0
    unseen: tuple[Reason, ...] = ()  # nodes that the quorum allows to be missing: the verdict says nothing of them
    oldest_proof_ms: int | None = None  # of what is known of the memory of a node that was seen; None when none was
    moved: bool = False  # another order was given meanwhile: of no use to anybody later
    oldest_answer_ms: int | None = None  # since the node that answered first did so, at most; None when none was seen

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]


def worst(verdicts: list[str]) -> str:
    """Of several verdicts: a difference weighs more than a gap; nothing looked at is a gap."""
    for verdict in (DIVERGED, INCOMPLETE):
        if verdict in verdicts:
            return verdict
    return CONSISTENT if verdicts else INCOMPLETE
