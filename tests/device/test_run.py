"""The run on a device, where there is none: it ends, rehearses what it can, and says loudly what was not looked at."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.device import checks, measures, run, steps
from tests.device.steps import INCOMPLETE, Result, Skipped, Step

pytestmark = pytest.mark.device


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ran(*planned: Step, limit_s: float = 10.0, clock: Clock | None = None) -> list[Result]:
    return steps.run(planned, limit_s, clock or Clock(), lambda line: None)


def skip(reason: str) -> str:
    raise Skipped(reason)


def fail() -> str:
    raise AssertionError("3 bytes differ\nand more lines")


def test_a_step_that_fails_fails_the_run_by_name_and_the_next_one_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    results = ran(Step("one", fail), Step("two", lambda: "fine"))
    assert [(result.name, result.state, result.detail) for result in results] == [
        ("one", "FAILED", "AssertionError: 3 bytes differ"),
        ("two", "ok", "fine"),
    ]
    assert steps.status(results) == 1 and "FAILED: one" in steps.table(results)


def test_a_step_that_is_skipped_is_told_with_its_reason_and_is_no_pass() -> None:
    results = ran(Step("one", lambda: "fine"), Step("two", lambda: skip("no such device")))
    text = steps.table(results)
    assert "no such device" in text and "NOT LOOKED AT (1 of 2): two. CUDA stays unproven" in text
    assert steps.status(results) == INCOMPLETE


def test_only_a_run_that_looked_at_everything_is_a_pass() -> None:
    assert steps.status(ran(Step("one", lambda: "fine"))) == 0
    assert steps.status([]) == 1


def test_no_step_begins_once_the_time_is_over() -> None:
    clock, done = Clock(), []

    def slow() -> str:
        clock.now = 10.0
        return "slow"

    def late() -> str:
        done.append("late")
        return "late"

    results = ran(Step("slow", slow), Step("late", late), clock=clock)
    assert [result.state for result in results] == ["ok", "SKIPPED"] and not done
    assert "the 10 s of this run were over" in results[1].detail


NEED_A_DEVICE = {
    "machine",
    "vector: backends equal on the device",
    "contract of the device port: device",
    "keeper: kills, device memory",
    "graphs: replay equals eager",
}


def test_without_a_device_every_step_that_needs_one_is_skipped_for_that_reason() -> None:
    planned = {step.name: step for step in run.plan("cuda:0", "no driver here", 16)}
    assert set(planned) >= NEED_A_DEVICE
    for name in NEED_A_DEVICE:
        with pytest.raises(Skipped, match=r"no driver here|there is none"):
            planned[name].work()
    rehearsed = [name for name in planned if name.startswith(("measure", "staging"))]
    assert len(rehearsed) == 4 and all("rehearsed on the host" in name for name in rehearsed)


def test_with_a_device_nothing_is_rehearsed() -> None:
    assert not [step.name for step in run.plan("cuda:0", "", 16) if "rehearsed" in step.name]


def test_a_device_that_the_driver_does_not_know_is_told_as_the_reason() -> None:
    assert "no_device" in run.why_no_device("cuda:99")


def test_staging_the_keeper_and_the_measures_can_be_rehearsed_on_the_host() -> None:
    assert "the last one with 12 MiB kept" in checks.staging_and_switch("cpu", 4)
    assert "keeps bytes" in checks.memory_of_the_host_outlives_a_kill()
    assert "GB/s verified" in measures.staging("cpu", 1)
    assert "first answer" in measures.switch("cpu", 1)
