"""Each claim of the demo holds for a good report and fails when its figure is bad: a guard that cannot fail proves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from raftmeta.cli.demo import claims, measure, report
from raftmeta.cli.demo.measure import Sample, Window

CHECK = report.Check("consistent", 1, 1, 4.0, 5.0, 0.0)
V1 = report.Activation("v1", "activate", 2.0, 30, 100, 100, 0, 0, 100, 10)
V2 = report.Activation("v2", "activate", 1.0, 31, 23, 20, 80, 0, 100, 3)
V3 = report.Activation("v3", "activate", 1.0, 32, 13, 10, 10, 80, 100, 2)
BACK = report.Activation("v2", "rollback", 0.1, 33, 0, 0, 0, 100, 100, 2)
GOOD = report.Report(
    model="m",
    bytes=100,
    versions=[report.Version(label, number, label * 32) for label, number in (("v1", 1), ("v2", 2), ("v3", 3))],
    publish_commit_ms=[1.0, 1.1, 1.2],
    activate=[V1, V2, V3, BACK],
    requests=report.Requests(1000, 1000, 0, 0),
    latency_ms=report.Latency(10.0, 20.0, 11.0, 25.0),
    failover=report.Failover("m-a", "m-b", 900.0, 200, 0),
    consistency=[CHECK, CHECK],
    tried=[report.Tried(label, node, 4, 0.9999) for label in ("v1", "v2", "v3") for node in ("n-a", "n-b")],
    expected=report.Expected({"v2": 20, "v3": 10}, {"v2": 100, "v3": 20}, 0.03, {"v2": 3, "v3": 3}),
    seconds=60.0,
)


def changed(**changes: Any) -> report.Report:
    return msgspec.structs.replace(GOOD, **changes)


def replace(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


def failed(value: report.Report) -> int:
    return sum(not claim.held for claim in claims.evaluate(value))


def test_every_claim_holds_for_a_good_report_and_has_a_figure() -> None:
    found = claims.evaluate(GOOD)
    assert len(found) == 11 and all(claim.held and claim.figure for claim in found)


@pytest.mark.parametrize(
    "bad",
    [
        changed(versions=GOOD.versions[:2]),
        changed(versions=GOOD.versions[::-1]),
        changed(versions=[replace(version, checksum="same") for version in GOOD.versions]),
        changed(expected=replace(GOOD.expected, output_distance=0.009)),
        changed(tried=GOOD.tried[1:]),
        changed(tried=[*GOOD.tried[1:], replace(GOOD.tried[0], answers=0)]),
        changed(tried=[*GOOD.tried[1:], replace(GOOD.tried[0], least_cosine=0.99)]),
        changed(tried=[*GOOD.tried[1:], GOOD.tried[1]]),
        changed(requests=report.Requests(1000, 999, 1, 0)),
        changed(requests=report.Requests(1001, 1000, 0, 0)),
        changed(requests=report.Requests(1000, 999, 0, 1)),
        changed(activate=[V1, replace(V2, bytes_fetched=24), V3, BACK]),
        changed(activate=[V1, replace(V2, bytes_fetched=20), V3, BACK]),
        changed(activate=[V1, replace(V2, bytes_from_active=79), V3, BACK]),
        changed(activate=[V1, replace(V2, bytes_fetched=0), V3, BACK]),
        changed(activate=[V1, V3, BACK]),
        changed(activate=[V1, V2, replace(V3, bytes_kept=0, bytes_from_active=90), BACK]),
        changed(activate=[V1, V2, replace(V3, bytes_fetched=14), BACK]),
        changed(activate=[V1, V2, BACK]),
        changed(activate=[V1, V2, V3, replace(BACK, bytes_read=1)]),
        changed(activate=[V1, V2, V3, replace(BACK, bytes_from_active=1)]),
        changed(activate=[V1, V2, V3]),
        changed(failover=replace(GOOD.failover, new_leader="m-a")),
        changed(failover=replace(GOOD.failover, new_leader="")),
        changed(failover=replace(GOOD.failover, write_gap_ms=0.0)),
        changed(failover=replace(GOOD.failover, missing_after=1)),
        changed(failover=replace(GOOD.failover, acknowledged=0)),
        changed(consistency=[CHECK]),
        changed(consistency=[]),
        changed(consistency=[CHECK, replace(CHECK, verdict="incomplete")]),
        changed(consistency=[CHECK, replace(CHECK, mismatch_ratio=0.01)]),
    ],
)
def test_one_bad_figure_fails_exactly_its_claim(bad: report.Report) -> None:
    assert failed(bad) == 1


def test_nothing_measured_proves_nothing() -> None:
    nothing = changed(
        versions=[],
        activate=[],
        requests=report.Requests(0, 0, 0, 0),
        consistency=[],
        tried=[],
        failover=report.Failover("", "", 0, 0, 0),
    )
    assert failed(nothing) == len(claims.evaluate(nothing)) - 1  # the distance between the answers was measured beforehand


def test_the_report_has_the_documented_shape(tmp_path: Path) -> None:
    report.write(tmp_path / "build" / "demo.json", GOOD, [tuple(claim) for claim in claims.evaluate(GOOD)])
    value = json.loads((tmp_path / "build" / "demo.json").read_text())
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["demo.json"]
    assert {
        "model",
        "bytes",
        "versions",
        "publish_commit_ms",
        "activate",
        "requests",
        "latency_ms",
        "failover",
        "consistency",
        "seconds",
    } <= set(value)
    assert set(value["versions"][0]) == {"label", "number", "checksum"}
    assert {"to", "total_s", "switch_call_us_max", *measure.COUNTERS} <= set(value["activate"][0])
    assert set(value["requests"]) == {"sent", "ok", "lost", "wrong_version_label"}
    assert set(value["latency_ms"]) == {"steady_p50", "steady_p99", "during_p50", "during_p99"}
    assert {"killed", "write_gap_ms", "acknowledged", "missing_after"} <= set(value["failover"])
    assert set(value["consistency"][0]) == {
        "verdict", "models_primary", "models_standby", "lag_ms_primary", "lag_ms_standby", "mismatch_ratio",
    }  # fmt: skip


def sample(at: float, ms: float, outcome: str = "ok") -> Sample:
    return Sample("primary", at, ms / 1000, outcome, "v1", "")


def test_latency_counts_answers_by_when_they_were_due() -> None:
    samples = [sample(at, 10.0) for at in range(100)] + [sample(100.5, 500.0), sample(101.0, 5000.0, "lost")]
    assert measure.latency(samples, Window(0, 100), [Window(100, 102)]) == report.Latency(10.0, 10.0, 500.0, 500.0)
    assert measure.requests(samples) == report.Requests(102, 101, 1, 0)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_a_percentile_is_a_value_that_was_seen(share: float, value: float) -> None:
    assert measure.percentile(list(range(1, 101)), share) == value
    assert measure.percentile([], share) == 0.0


def test_the_write_gap_is_the_longest_pause_that_ends_after_the_kill() -> None:
    assert measure.longest_gap_ms([0.0, 5.0, 5.1, 6.3, 6.4], around_s=5.05) == 1200.0
    assert measure.longest_gap_ms([0.0, 5.0], around_s=6.0) == 0.0


def test_an_activation_costs_what_its_most_expensive_node_spent() -> None:
    counters = dict.fromkeys(("bytes_read", "bytes_from_active", "bytes_kept", "bytes_total", "tensors_changed", "switch_call_us"), 1)
    rollout = {"to_version": "v2", "kind": "activate", "started_ms": 1000, "ended_ms": 2500}
    rollout["attestations"] = [{"counters": counters | {"bytes_fetched": 5}}, {"counters": counters | {"bytes_fetched": 9}}]
    assert measure.activation(rollout) == report.Activation("v2", "activate", 1.5, 1, 9, 1, 1, 1, 1, 1)


def test_differing_bytes_are_counted_by_name_and_content() -> None:
    def manifest(**tensors: tuple[int, str]) -> dict[str, Any]:
        return {"tensors": [{"name": name, "begin": 0, "end": size, "sha256": sha} for name, (size, sha) in tensors.items()]}

    v1, v2 = manifest(a=(10, "x"), b=(5, "y")), manifest(a=(10, "x"), b=(5, "z"))
    v3 = manifest(a=(10, "w"), b=(5, "y"), c=(2, "q"))
    assert measure.differing_bytes(v2, [v1]) == 5
    assert measure.differing_bytes(v3, [v1]) == 12
    assert measure.differing_bytes(v3, [v1], frozenset({"c"})) == 10
    assert measure.differing_bytes(v3, [v1, v2]) == 12 and measure.differing_bytes(v1, []) == 15


def test_block_checks_are_counted_by_the_name_of_their_file() -> None:
    files = [{"name": "model.safetensors", "size_bytes": 90}, {"name": f"raftmeta-blocks-{'0' * 16}.wcv", "size_bytes": 7}]
    assert measure.block_check_bytes({"files": files}) == 7
    assert measure.block_check_bytes({"files": files[:1]}) == 0
