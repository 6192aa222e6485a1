"""What the demo claims, each with the figure that shows it. Pure: a report in, verdicts out; the exit code is their conjunction.

A claim about something that was not measured does not hold: an empty list of checks is no proof of consistency.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from raftmeta.cli.demo.report import Activation, Report

MIN_DISTANCE = 1e-2  # closer answers would let a wrong label pass
CHECKS = 2  # one after the switch under load, one after the roll-back
VERSIONS = ("v1", "v2", "v3")
NODES = 2  # that try every version
LEAST_COSINE = 0.999  # as `raftmeta probe` asks for


class Claim(NamedTuple):
    claim: str
    held: bool
    figure: str


def evaluate(report: Report) -> list[Claim]:
    """Every claim, in the order of the story."""
    return [
        Claim(*row)
        for row in (*_versions(report), *_tried(report), *_traffic(report), *_bytes(report), *_failover(report), *_checks(report))
    ]


def _versions(report: Report) -> Iterator[tuple[str, bool, str]]:
    labels = tuple(version.label for version in report.versions)
    rising = all(a.number < b.number for a, b in pairwise(report.versions))
    distinct = len({version.checksum for version in report.versions}) == len(labels)
    numbers = ", ".join(f"{version.label} = number {version.number}" for version in report.versions)
    yield "three versions were published, each with its own bytes and a higher number", labels == VERSIONS and rising and distinct, numbers
    distance = report.expected.output_distance
    yield "a wrong label would show: the versions answer differently", distance >= MIN_DISTANCE, f"at least {distance:.3f} apart"


def _tried(report: Report) -> Iterator[tuple[str, bool, str]]:
    good = {(item.version, item.node) for item in report.tried if item.answers > 0 and item.least_cosine >= LEAST_COSINE}
    held = len(good) == len(report.tried) and all(sum(version == label for version, _ in good) == NODES for label in VERSIONS)
    least = min((item.least_cosine for item in report.tried), default=0.0)
    figure = f"{sum(item.answers for item in report.tried)} answers on {len(report.tried)} tries, least cosine {least:.6f}"
    yield "each node tried each version before a request reached it, and it answered as it was published", held, figure


def _traffic(report: Report) -> Iterator[tuple[str, bool, str]]:
    requests = report.requests
    accounted = requests.sent == requests.ok + requests.lost + requests.wrong_version_label
    sent = f"{requests.lost} of {requests.sent} lost"
    yield (
        "no request was lost over three switches, a killed leader and a roll-back",
        _none(requests.lost, requests.sent) and accounted,
        sent,
    )
    wrong = f"{requests.wrong_version_label} of {requests.ok} wrong"
    yield "every answer came from the weights that its label names", _none(requests.wrong_version_label, requests.ok), wrong


def _bytes(report: Report) -> Iterator[tuple[str, bool, str]]:
    v2, v3, back = _activation(report, "v2"), _activation(report, "v3"), _activation(report, "v2", "rollback")
    expected = report.expected
    allowed = {to: size + expected.beside_bytes.get(to, 0) for to, size in expected.changed_bytes.items()}
    what = "v2 fetched only the tensors that changed, and its block checks; the rest came from the active slot"
    if v2:
        changed = expected.changed_bytes.get("v2", 0)
        held = changed > 0 and v2.bytes_fetched == allowed["v2"] and changed + v2.bytes_from_active == v2.bytes_total
        yield what, held, _cost(v2)
    else:
        yield what, False, "v2 was not activated"
    if v3:
        written = v3.bytes_read + v3.bytes_from_active
        held = 0 < written == expected.differing_bytes.get("v3") and v3.bytes_kept + written == v3.bytes_total
        held = held and v3.bytes_fetched == allowed.get("v3")
        yield "v3 staged only what differs from what its slot held", held, _cost(v3)
    else:
        yield "v3 staged only what differs from what its slot held", False, "v3 was not activated"
    if back:
        copied = back.bytes_fetched + back.bytes_read + back.bytes_from_active
        yield "the roll-back copied nothing", copied == 0, f"{copied} bytes, {back.total_s:.2f} s on both sides"
    else:
        yield "the roll-back copied nothing", False, "there was no roll-back"


def _failover(report: Report) -> Iterator[tuple[str, bool, str]]:
    failover = report.failover
    took_over = bool(failover.killed) and bool(failover.new_leader) and failover.killed != failover.new_leader
    gap = (
        f"{failover.killed} killed, {failover.new_leader} leads, longest gap between two acknowledged writes {failover.write_gap_ms:.0f} ms"
    )
    yield "another member took over from the killed leader and writes went on", took_over and failover.write_gap_ms > 0, gap
    missing = f"{failover.missing_after} of {failover.acknowledged} missing"
    yield "no acknowledged write is missing", _none(failover.missing_after, failover.acknowledged), missing


def _checks(report: Report) -> Iterator[tuple[str, bool, str]]:
    verdicts = [check.verdict for check in report.consistency]
    held = len(verdicts) >= CHECKS and set(verdicts) == {"consistent"} and all(check.mismatch_ratio == 0 for check in report.consistency)
    yield "primary and standby hold the same bytes, computed from the memory that serves", held, ", ".join(verdicts) or "never checked"


def _none(count: int, of: int) -> bool:
    return count == 0 and of > 0


def _activation(report: Report, to: str, kind: str = "activate") -> Activation | None:
    return next((item for item in report.activate if (item.to, item.kind) == (to, kind)), None)


def _cost(item: Activation) -> str:
    return (
        f"{item.bytes_fetched / 1e6:.1f} MB fetched, {item.bytes_from_active / 1e6:.1f} MB from the active slot, "
        f"{item.bytes_kept / 1e6:.1f} MB kept of {item.bytes_total / 1e6:.1f} MB"
    )
