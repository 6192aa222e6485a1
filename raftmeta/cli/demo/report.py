"""What the demo measured, in the shape of its JSON report. Values only; `claims` judges them.

Per activation the bytes are those of the node that spent most: both sides do the same work, so sums would count it twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Version(msgspec.Struct, frozen=True):
    label: str
    number: int
    checksum: str


class Activation(msgspec.Struct, frozen=True):
    to: str
    kind: str  # activate | rollback
    total_s: float  # from the order to active on every node, by the leader's stamped times
    switch_call_us_max: int
    bytes_fetched: int  # from the source
    bytes_read: int  # from the node's store into the slot
    bytes_from_active: int
    bytes_kept: int
    bytes_total: int
    tensors_changed: int


class Requests(msgspec.Struct, frozen=True):
    sent: int
    ok: int
    lost: int  # no answer in time, an error, or never sent because too many were open
    wrong_version_label: int  # answered by other weights than the answer's label says


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds from the scheduled instant of a request to the end of its answer."""

    steady_p50: float
    steady_p99: float
    during_p50: float  # of requests scheduled while an activation ran
    during_p99: float


class Failover(msgspec.Struct, frozen=True):
    killed: str
    new_leader: str
    write_gap_ms: float  # longest time between two acknowledged writes around the kill
    acknowledged: int
    missing_after: int


class Check(msgspec.Struct, frozen=True):
    verdict: str
    models_primary: int
    models_standby: int
    lag_ms_primary: float
    lag_ms_standby: float
    mismatch_ratio: float


class Tried(msgspec.Struct, frozen=True):
    """What a node saw when it tried a version before anybody could ask it."""

    version: str
    node: str
    answers: int  # compared with those that the version was published with
    least_cosine: float  # of all of them; 0 without any


class Expected(msgspec.Struct, frozen=True):
    """What the manifests say an activation may cost, per version label."""

    changed_bytes: dict[str, int]  # against everything published before it: all that may be fetched
    differing_bytes: dict[str, int]  # against what its slot held before: all that may be written there
    output_distance: float  # smallest distance between the answers of two versions to one probe
    beside_bytes: dict[str, int]  # of the block checks, which come with a version


class Report(msgspec.Struct, frozen=True):
    model: str
    bytes: int  # of one version's weights
    versions: list[Version]
    publish_commit_ms: list[float]
    activate: list[Activation]
    requests: Requests
    latency_ms: Latency
    failover: Failover
    consistency: list[Check]
    tried: list[Tried]
    expected: Expected
    seconds: float


def to_json(report: Report, claims: list[tuple[str, bool, str]]) -> dict[str, Any]:
    """The report and its claims as one JSON object."""
    value: dict[str, Any] = msgspec.to_builtins(report)
    value["claims"] = [{"claim": claim, "held": held, "figure": figure} for claim, held, figure in claims]
    return value


def write(path: Path, report: Report, claims: list[tuple[str, bool, str]]) -> None:
    """Complete or not there."""
    value = to_json(report, claims)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    temporary.replace(path)
