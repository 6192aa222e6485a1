"""Tending one deployment over real shared memory: what is attested, what is refused, what survives a crash of control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node_agent.journal import DeploymentRecord, LoadPhase
from node_agent.plan import Change, Order
from raftmeta.core.types import Phase, Stage
from tests.support.small_version import make_version
from tests.support.tending import TendScene as Scene
from tests.support.tending import run


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


def test_a_first_activation_reports_bytes_and_lag_and_pins_the_version(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        counters = scene.last()["counters"]
        assert counters["bytes_read"] == counters["bytes_total"] == 70_100
        assert counters["bytes_fetched"] > 70_100
        assert counters["lag_ms"] >= 0 and counters["switch_call_us"] > 0
        assert scene.last()["vector_root"] == scene.target(1).vector_root
        record = scene.remembered.record
        assert (record.pin, record.obeyed, record.fence) == (scene.target(1), scene.target(1), Order(1, 6))
        assert scene.tender.look().ready

    run(work)


def test_an_update_copies_what_is_equal_from_the_active_slot(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        counters = scene.last()["counters"]
        assert (counters["bytes_from_active"], counters["bytes_read"], counters["bytes_kept"]) == (70_000, 100, 0)
        assert counters["tensors_changed"] == 1
        assert counters["bytes_fetched"] < 1000

    run(work)


def test_a_roll_back_copies_nothing_and_proves_the_memory_again(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        loads = len(scene.crew.loads)
        await scene.roll(2, 1)
        counters = scene.last()["counters"]
        assert (counters["bytes_read"], counters["bytes_fetched"], counters["bytes_from_active"]) == (0, 0, 0)
        assert counters["bytes_kept"] == counters["bytes_total"] == 70_100
        assert scene.station.active == 0
        assert scene.crew.loads[loads:] == [(0, "1.0.0")], "the workers were not asked to check their module"
        assert scene.crew.released.count(0) == 1, "the slot was released for staging"

    run(work)


def test_a_version_goes_through_the_phases_of_a_load_in_order_and_never_back(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        assert scene.tender.look().change.reached is LoadPhase.VALIDATED
        seen: list[LoadPhase] = []
        note = scene.memory.journal.note

        def watched(name: str, make: Callable[[DeploymentRecord], DeploymentRecord]) -> None:
            note(name, make)
            seen.append(scene.remembered.record.change.reached)

        scene.memory.journal.note = watched  # type: ignore[method-assign]
        change = Change("r-2", Phase.SYNCING, scene.target(2), None)
        await scene.rest(scene.goal(1, change))
        assert list(dict.fromkeys(seen)) == list(LoadPhase), seen
        assert scene.last()["stage"] == "ready"
        scene.remembered.reach("r-2", LoadPhase.VERIFIED)
        scene.remembered.reach("r-1", LoadPhase.VERIFIED)
        assert scene.remembered.record.change.reached is LoadPhase.VALIDATED

    run(work)


def test_evidence_names_what_serves_when_it_was_compared_and_what_lies_beside_it(scene: Scene) -> None:
    async def work() -> None:
        assert scene.station.evidence() is None, "nothing serves"
        scene.memory.wall_ms = 1000
        await scene.roll(None, 1)
        found = scene.station.evidence()
        assert found is not None
        assert (found.record.version, found.record.vector_root, found.slot) == ("1.0.0", scene.target(1).vector_root, 0)
        assert (found.verified_at_ms, found.derived) == (1000, {"position_ids": "0" * 64})
        scene.memory.wall_ms = 2000
        assert scene.station.vector() is not None
        assert (found := scene.station.evidence()) is not None and found.verified_at_ms == 2000
        assert scene.station._arena is not None
        scene.station._arena._slot(0)[5] ^= 1
        scene.memory.wall_ms = 3000
        reading = scene.station.vector()
        assert reading is not None and reading.root != scene.target(1).vector_root
        assert (found := scene.station.evidence()) is not None and found.verified_at_ms == 2000, "what did not compare is no verification"
        assert found.finding == "integrity_mismatch" and found.verified_age_ms >= 0
        scene.station._arena._slot(0)[5] ^= 1
        assert scene.station.vector() is not None
        assert (found := scene.station.evidence()) is not None and found.finding == "" and found.verified_at_ms == 3000
        scene.close()
        scene.take_over()
        assert scene.station.evidence() is None, "another process said so"

    run(work)


def test_memory_that_rotted_in_the_standby_slot_is_found_before_it_serves_and_staged_again(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        assert scene.station._arena is not None
        scene.station._arena._slot(0)[5] ^= 1
        await scene.roll(2, 1)
        counters = scene.last()["counters"]
        assert counters["bytes_kept"] == 0 and counters["bytes_read"] + counters["bytes_from_active"] == 70_100
        assert scene.crew.released.count(0) == 2

    run(work)


def test_memory_that_rotted_in_the_active_slot_stops_serving_and_is_replaced(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        assert scene.station._arena is not None
        scene.station._arena._slot(0)[5] ^= 1
        scene.close()
        scene.take_over()
        await scene.rest(scene.goal(1))
        assert scene.station.slot_record(0).state == "empty"
        assert scene.station.active == 1
        assert scene.station.slot_record(1).version == "1.0.0"
        assert scene.tender.look().ready

    run(work)


def test_a_larger_first_version_gets_a_larger_arena_while_nothing_serves(scene: Scene, tmp_path: Path) -> None:
    async def work() -> None:
        change = Change("r-1", Phase.SYNCING, scene.target(1), Stage.PREPARED)
        await scene.rest(scene.goal(None, change))
        scene.versions["4.0.0"] = make_version(tmp_path / "v4", "4.0.0", {"a": b"4" * 900_000})
        await scene.roll(None, 4)
        assert -1 in scene.crew.released

    run(work)


def test_a_new_control_takes_over_what_serves_without_a_switch(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        epoch = scene.station.block.active()
        lag_ms = scene.remembered.record.lag_ms
        scene.close()
        scene.take_over()
        await scene.rest(scene.goal(1))
        assert scene.tender.look().ready
        assert scene.station.block.active() == epoch
        assert scene.remembered.record.lag_ms == lag_ms
        assert scene.provider.fetched == ["1.0.0"]

    run(work)


def test_control_killed_between_any_two_steps_of_an_update_converges(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        change = Change("r-2", Phase.PREPARING, scene.target(2), None)
        phases = [
            (1, change),
            (1, change._replace(phase=Phase.SYNCING, attested=Stage.PREPARED)),
            (2, change._replace(phase=Phase.COMMITTING, attested=Stage.READY)),
        ]
        for committed, at in phases:
            if at.phase is Phase.COMMITTING:
                scene.revision += 3
            for steps in range(1, 6):  # every control lives for a few steps only
                scene.close()
                scene.take_over()
                scene.tender.want(scene.goal(committed, at))
                goal = scene.tender.goal
                assert goal is not None
                for _ in range(steps):
                    await scene.tender._advance(goal)
        await scene.rest(scene.goal(2))
        assert scene.tender.look().ready
        active = scene.station.active
        assert active is not None and scene.station.slot_record(active).version == "2.0.0"
        counters = [item["counters"] for item in scene.plane.attested if item["stage"] == "active"][-1]
        assert counters["bytes_total"] == 70_100

    run(work)


def test_a_fetch_that_an_abort_made_pointless_is_stopped(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.provider.block = asyncio.Event()
        change = Change("r-2", Phase.PREPARING, scene.target(2), None)
        await scene.rest(scene.goal(1, change), lambda look: look.doing.startswith("Fetch"))
        task = asyncio.create_task(scene.tender.run())
        await asyncio.sleep(0.05)
        scene.tender.want(scene.goal(1))
        async with asyncio.timeout(10):
            while not scene.provider.cancelled:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scene.plane.attested[-1]["stage"] == "active", "an abandoned fetch is no failure"

    run(work)


def test_waiting_for_a_worker_ends_when_nobody_wants_the_version_any_more(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.crew.block = asyncio.Event()
        change = Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)
        scene.tender.want(scene.goal(1, change))
        task = asyncio.create_task(scene.tender.run())
        async with asyncio.timeout(15):
            while not scene.tender.doing.startswith("Warm"):
                await asyncio.sleep(0.01)
            scene.tender.want(scene.goal(1))
            while not scene.tender.idle:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scene.plane.attested[-1]["stage"] == "active"

    run(work)


def test_a_dry_run_names_the_steps_to_another_version_and_what_is_missing_and_takes_none(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        fetched, record = list(scene.provider.fetched), scene.remembered.record
        assert scene.tender.preview(scene.target(2))["steps"][0]["unknown"], "nothing is known of it here"
        scene.memory.store.put_manifest(scene.target(2).checksum, scene.versions["2.0.0"].manifest)
        shown = scene.tender.preview(scene.target(2))
        assert (shown["goal"], shown["rollout"], shown["refused"]) == ("1.0.0", "dry run", "")
        assert [step["step"] for step in shown["steps"]] == ["Fetch", "Attest", "StageInto", "Warm", "Attest"]
        assert [step["stage"] for step in shown["steps"] if step["step"] == "Attest"] == ["prepared", "ready"]
        assert 100 <= shown["steps"][0]["bytes_to_fetch"] < 1000, "the large tensor is in the slot that serves"
        assert shown["steps"][2]["counters"]["bytes_from_active"] == 70_000
        assert (scene.provider.fetched, scene.remembered.record) == (fetched, record)
        assert scene.tender.goal is not None and scene.tender.goal.change is None

    run(work)


def test_a_preview_names_the_steps_and_their_costs_and_takes_none(scene: Scene) -> None:
    async def work() -> None:
        assert scene.tender.preview()["refused"]
        await scene.roll(None, 1)
        scene.memory.fetch(scene.versions["2.0.0"])
        fetched, loads, record = list(scene.provider.fetched), list(scene.crew.loads), scene.remembered.record
        scene.tender.want(scene.goal(1, Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)))
        shown = scene.tender.preview()
        assert (shown["goal"], shown["rollout"], shown["refused"]) == ("1.0.0", "r-2", "")
        assert [(step["step"], step["version"]) for step in shown["steps"]] == [
            ("StageInto", "2.0.0"),
            ("Warm", "2.0.0"),
            ("Attest", "2.0.0"),
        ]
        counters = shown["steps"][0]["counters"]
        assert counters["bytes_total"] == counters["bytes_read"] + counters["bytes_from_active"] + counters["bytes_kept"] > 0
        assert (scene.provider.fetched, scene.crew.loads, scene.remembered.record) == (fetched, loads, record)

    run(work)
