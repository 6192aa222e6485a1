"""What is counted, and the page that is made of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping

import pytest

from node_agent import metric_table as table
from node_agent import metrics, tally
from node_agent.failure import Failure
from node_agent.memory import private_bytes, tree_private_bytes
from node_agent.messages import GaugeSample
from node_agent.metric_table import METRICS, Kind
from node_agent.metrics import Meter
from node_agent.observe import Observer
from node_agent.plan import AwaitWorkers, Fetch, StageInto, Target, Verify, Warm
from node_agent.refusal import Refusal
from node_agent.tally import SIZE_BYTES, Tally
from node_agent.trouble import phase_of
from raftmeta.core.types import StageCounters


def page(*meters: Meter, gauges: tuple[GaugeSample, ...] = ()) -> str:
    tallies: Mapping[tuple[str, str], Tally] = {("worker", str(index)): meter.tally for index, meter in enumerate(meters)}
    return metrics.page(tallies, [gauges, *(meter.gauges() for meter in meters)]).decode()


def full() -> str:
    """A page with a sample of every metric, and labels that have to be escaped."""
    meter = Meter()
    for spec in METRICS:
        labels = tuple(f'{label} "1"\n' for label in spec.labels)
        match spec.kind:
            case Kind.COUNTER:
                meter.count(spec, *labels, amount=2)
            case Kind.HISTOGRAM:
                meter.observe(spec, 0.3, *labels)
            case Kind.GAUGE:
                meter.set(spec, 1, *labels)
    return page(meter)


def test_processes_that_count_the_same_are_added_and_others_stand_beside_each_other() -> None:
    first, second = Meter(), Meter()
    for index, meter in enumerate((first, second)):
        meter.count(table.WORKER_REQUESTS, str(index), "search", "ok", amount=index + 1)
        meter.count(table.REPLAYS)
    text = page(first, second)
    assert text.count("# TYPE raftmeta_agent_worker_requests_total counter") == 1
    for index in (0, 1):
        assert f'raftmeta_agent_worker_requests_total{{deployment="search",outcome="ok",worker="{index}"}} {index + 1}.0' in text
    assert "raftmeta_agent_replays_total 2.0" in text


def test_a_histogram_has_cumulative_buckets_that_end_in_its_count() -> None:
    meter = Meter()
    for value in (0.001, 0.02, 0.02, 99.0, -1.0):
        meter.observe(table.REQUEST_SECONDS, value, "search")
    text = page(meter)
    for bound, count in (("0.001", 2), ("0.01", 2), ("0.025", 4), ("30.0", 4), ("+Inf", 5)):
        assert f'raftmeta_agent_request_seconds_bucket{{deployment="search",le="{bound}"}} {count}.0' in text
    assert 'raftmeta_agent_request_seconds_count{deployment="search"} 5.0' in text
    assert 'raftmeta_agent_request_seconds_sum{deployment="search"} 99.041' in text


def test_a_block_that_fails_is_not_timed() -> None:
    meter = Meter()
    with pytest.raises(ZeroDivisionError), meter.timed(table.REQUEST_SECONDS, "search"):
        raise ZeroDivisionError
    assert "request_seconds_count{" not in page(meter)
    with meter.timed(table.REQUEST_SECONDS, "search"):
        pass
    assert 'request_seconds_count{deployment="search"} 1.0' in page(meter)


def test_the_next_life_of_a_process_goes_on_counting_and_its_gauges_begin_anew() -> None:
    fd = tally.make()
    for life in (1, 2):
        meter = Meter(Tally(fd))
        meter.count(table.REQUESTS, "search", "200")
        assert f'raftmeta_agent_requests_total{{deployment="search",status="200"}} {life}.0' in page(meter)
        assert meter.gauges() == ()
        meter.set(table.READY, True)
    os.close(fd)


def test_gauges_of_deployments_that_are_gone_are_forgotten() -> None:
    meter = Meter()
    meter.set(table.VERIFIED, 2, "search")
    meter.set(table.READY, True)
    meter.clear(table.VERIFIED)
    assert meter.gauges() == (GaugeSample("ready", (), 1.0),)


def test_counts_that_found_no_room_are_said() -> None:
    meter = Meter()
    meter.count(table.REQUESTS, "x" * SIZE_BYTES, "200")
    assert 'raftmeta_agent_series_lost_total{index="0",role="worker"} 1.0' in page(meter)


def test_what_tending_tells_becomes_counts_by_deployment() -> None:
    meter = Meter()
    observer = Observer(meter)
    observer.fetched("search", 7)
    observer.placed("search", StageCounters(bytes_total=60, bytes_read=10, bytes_from_active=20, bytes_kept=30))
    observer.paused("search", 47.0)
    observer.answered("search", 1500)
    observer.answered("search", -1)
    observer.failed("search", Failure("vector_mismatch", "verify"))
    observer.failed("search", Failure("no_such_kind", "of a later build"))
    with observer.step("search", "stage"):
        time.sleep(0)
    text = page(meter)
    for name, value in (("fetched", 7), ("read", 10), ("from_active", 20), ("kept", 30)):
        assert f'raftmeta_agent_{name}_bytes_total{{deployment="search"}} {value}.0' in text
    assert 'switch_pause_seconds_bucket{deployment="search",le="5e-05"} 1.0' in text
    assert 'switch_seconds_count{deployment="search"} 1.0' in text and 'switch_seconds_sum{deployment="search"} 1.5' in text
    assert 'failures_total{class="integrity_mismatch",deployment="search",phase="verify"} 1.0' in text
    assert 'failures_total{class="internal",deployment="search",phase="other"} 1.0' in text
    assert 'step_seconds_count{deployment="search",step="stage"} 1.0' in text


def test_every_phase_that_a_step_or_a_refusal_names_by_itself_is_in_the_closed_set() -> None:
    target = Target("m", "1", "c", "v")
    steps = (Fetch(target), StageInto(target, 0), Verify(target, 0), Warm(target, 0), AwaitWorkers(target))
    named = {phase_of(step) for step in steps} | {Refusal("slot_busy", "x", "y", "z").phase}
    assert named <= set(table.PHASES) - {"other"}


def test_memory_of_a_tree_is_that_of_its_processes_together() -> None:
    code = "import sys; held = bytearray(64 << 20); held[::4096] = b'x' * len(held[::4096]); print('holds', flush=True); sys.stdin.read()"
    before = tree_private_bytes(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"holds\n"
        grown = tree_private_bytes(os.getpid()) - before
        assert grown > 60 << 20
        assert grown > private_bytes(child.pid) / 2
    finally:
        child.communicate(timeout=30)
    assert tree_private_bytes(child.pid) == 0, "it has ended"


def test_every_metric_has_a_sample_on_a_page_where_all_was_counted() -> None:
    text = full()
    for spec in METRICS:
        ending = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_count", Kind.GAUGE: ""}[spec.kind]
        assert f"\n{spec.full_name}{ending}" in text, spec.name


@pytest.mark.parametrize("made", ["full", "empty"])
def test_promtool_finds_no_fault_with_the_page(made: str) -> None:
    if shutil.which("promtool") is None:
        why = "promtool is not here (Debian has it in the package prometheus), so nobody but ourselves judged the metrics page"
        warnings.warn(why, stacklevel=1)  # a skipped test alone says nothing in a quiet run
        pytest.skip(why)
    text = full() if made == "full" else page(Meter())
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
