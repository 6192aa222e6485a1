"""What changes of a deployment leave in the metrics: steps, pauses, bytes as they were attested, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node_agent import metrics
from node_agent.failure import FailureClass
from node_agent.fetch import FetchFailed
from node_agent.metric_table import PHASES, PREFIX
from node_agent.plan import Change
from raftmeta.core.types import Phase
from tests.support.tending import TendScene as Scene
from tests.support.tending import run


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


def samples(scene: Scene) -> dict[tuple[str, ...], float]:
    """By name and label values, the deployment left out."""
    text = metrics.page({("control", "0"): scene.meter.tally}, []).decode()
    return {
        (sample.name.removeprefix(PREFIX), *(value for name, value in sorted(sample.labels.items()) if name != "deployment")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_an_update_and_a_roll_back_leave_their_steps_pauses_and_bytes(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        await scene.roll(2, 1)
        found = samples(scene)
        done = {step[1]: value for step, value in found.items() if step[0] == "step_seconds_count"}
        assert done == {"fetch": 2, "stage": 2, "verify": 1, "probe": 2, "warm": 3, "switch": 3, "await_workers": 3}
        assert (found["switch_pause_seconds_count",], found["switch_seconds_count",]) == (3, 3)
        assert 0 < found["switch_pause_seconds_sum",] < found["step_seconds_sum", "switch"], "a part of the whole"
        attested = [item["counters"] for item in scene.plane.attested if item["stage"] == "active"]
        for name in ("fetched", "read", "from_active", "kept"):
            assert found[f"{name}_bytes_total",] == sum(item[f"bytes_{name}"] for item in attested), name
        assert found["kept_bytes_total",] == 70_100
        assert not [name for name, *_ in found if name == "failures_total"]

    run(work)


def test_a_switch_is_measured_once_though_its_workers_are_asked_again_by_the_next_control(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.station.close()
        scene.take_over()
        await scene.rest(scene.goal(1), lambda look: look.ready)
        found = samples(scene)
        assert (found["step_seconds_count", "await_workers"], found["step_seconds_count", "switch"]) == (2, 1)
        assert (found["switch_seconds_count",], found["switch_pause_seconds_count",]) == (1, 1)

    run(work)


def test_a_step_that_fails_is_counted_by_class_and_phase_each_time_and_is_no_step_that_was_done(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        before = samples(scene)
        scene.provider.refuse = FetchFailed("source_unavailable", "no route")
        await scene.rest(scene.goal(1, Change("r-2", Phase.PREPARING, scene.target(2), None)))
        assert scene.last()["stage"] == "failed"
        found = samples(scene)
        failed = {tuple(labels): value for name, *labels in found if name == "failures_total" for value in [found[name, *labels]]}
        assert failed == {(FailureClass.SOURCE_UNAVAILABLE.value, "fetch"): 1.0} and "fetch" in PHASES
        assert {name: value for name, value in found.items() if name[0] == "step_seconds_count"} == {
            name: value for name, value in before.items() if name[0] == "step_seconds_count"
        }
        assert found["fetched_bytes_total",] == before["fetched_bytes_total",]

    run(work)
