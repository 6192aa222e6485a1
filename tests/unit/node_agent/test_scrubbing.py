"""Passes over memory that serves: what is found, what is said of it, when the node is ready again, and who goes first."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from consistency.vector import BLOCK_BYTES, Words
from node_agent import metric_table as table
from node_agent import scrub
from node_agent.active_memory import Watched
from node_agent.budget import Budget
from node_agent.mending import Mender
from node_agent.messages import DerivedChecked, DerivedDamage
from node_agent.metrics import Meter, page
from node_agent.observe import Observer
from node_agent.remembered import Remembered
from node_agent.scrub import Span
from node_agent.scrubbing import MAX_REPLACED, Scrub, ScrubMeans, idle_thread
from tests.support.scrub_scene import GOOD, ScrubScene
from tests.unit.node_agent.test_mending import FakeFront, FakeProvider


class FakeWorkers:
    def __init__(self) -> None:
        self.damage: dict[int, list[tuple[DerivedDamage, ...]]] = {}  # worker -> what it finds, one call after the other
        self.loading: dict[int, list[bool]] = {}  # worker -> whether it says nothing yet
        self.asked: list[bool] = []
        self.failures = 0

    def failed(self, deployment: str) -> int:
        return self.failures

    async def check_derived(self, deployment: str, slot: int, checksum: str, ends: bool) -> list[tuple[int, DerivedChecked]]:
        self.asked.append(ends)
        replies = []
        for worker in (0, 1):
            if self.loading.get(worker) and self.loading[worker].pop(0):
                continue
            found = self.damage[worker].pop(0) if self.damage.get(worker) else ()
            replies.append((worker, DerivedChecked(1, found, bool(found) and ends)))
        return replies


class Scene(ScrubScene):
    def __init__(self, root: Path, arena_dir: Path, interval_s: float = 0.2) -> None:
        super().__init__(root, arena_dir)
        self.now_ns = 0
        self.meter = Meter()
        self.front = FakeFront()
        self.provider = FakeProvider(self)
        self.workers = FakeWorkers()
        self.remembered = Remembered(self.memory.journal, "search")
        self.budget = Budget(1e12)
        self.pool = ThreadPoolExecutor(1)
        self.wall_s = 7200.0
        self.kicked = 0
        self.begin(interval_s)

    def begin(self, interval_s: float) -> None:
        means = ScrubMeans(interval_s, self.budget, self.pool, self.workers, Observer(self.meter), wall_s=lambda: self.wall_s)
        mender = Mender("search", "encoder", self.active, self.front, self.memory.store, self.provider, self.kick, 5.0, 0.2)
        self.scrub = Scrub(self.active, mender, self.remembered, means)

    def kick(self) -> None:
        self.kicked += 1

    def counted(self, spec: table.Spec, *labels: str) -> float:
        name = f"{spec.full_name}_total"
        wanted = {f'{key}="{value}"' for key, value in zip(spec.labels, ("search", *labels), strict=True)}
        for line in page({("control", "0"): self.meter.tally}, []).decode().splitlines():
            if line.startswith(name + "{") and set(line[len(name) + 1 :].split("}")[0].split(",")) == wanted:
                return float(line.split()[-1])
        return 0.0

    async def until(self, holds: Callable[[], bool]) -> None:
        """With the scrub at work."""
        task = asyncio.create_task(self.scrub.run())
        try:
            async with asyncio.timeout(20):
                while not holds():
                    await asyncio.sleep(0.005)
                    if task.done():
                        task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until_passes(self, count: int) -> None:
        goal = self.counted(table.SCRUB_PASSES) + count
        await self.until(lambda: self.counted(table.SCRUB_PASSES) >= goal)

    def close(self) -> None:
        self.pool.shutdown()
        super().close()


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def spied(scene: Scene) -> list[Span]:
    """Every span that is read from here on."""
    seen: list[Span] = []
    read = scene.active.read

    def reading(watched: Watched, span: Span) -> Words:
        seen.append(span)
        return read(watched, span)

    scene.active.read = reading  # type: ignore[method-assign]
    return seen


def test_a_pass_reads_every_block_once_in_the_order_of_its_number_and_moves_the_time_of_verification(scene: Scene) -> None:
    async def work() -> None:
        seen = spied(scene)
        await scene.until_passes(1)
        number = scrub.pass_number(scene.wall_s, 0.2)
        order = scrub.Order(scene.watched.sizes, scrub.seed(scene.watched.record.checksum, number))
        assert seen[: sum(map(len, order))] == [span for each in order for span in each]
        assert scene.scrub.look().number == number
        found = scene.station.evidence()
        assert found is not None and found.verified_at_ms == 7_200_000
        assert scene.counted(table.SCRUB_BYTES) >= order.total_bytes == sum(scene.watched.sizes.values())
        assert scene.scrub.look().findings == ()

    run(work)


def test_a_flipped_bit_is_found_named_mended_and_the_node_ready_again_after_all_was_read_once_more(scene: Scene) -> None:
    async def work() -> None:
        said: list[str] = []
        when: list[int] = []  # how much was read when it was said
        keep = scene.memory.journal.keep

        def updated(name: str, make: Any) -> None:
            keep(name, make)
            said.append(scene.remembered.record.damage)
            when.append(len(seen))

        scene.memory.journal.keep = updated  # type: ignore[method-assign]
        scene.damage(BLOCK_BYTES + 3, value=ord("g") ^ 16)
        seen = spied(scene)
        await scene.until(lambda: bool(said) and not said[-1])
        (finding,) = scene.scrub.look().findings
        assert (finding.kind, finding.tensor, finding.block, finding.where, finding.remedy) == ("memory", "a", 1, "slot 0", "repaired")
        assert finding.expected == scrub.sums_text(scene.watched.vectors["a"].blocks[1]) != finding.found
        assert said[0].startswith("memory of 1.0.0 is damaged: tensor 'a' block 1 in slot 0") and said == [said[0], ""]
        repaired = max(at for at, span in enumerate(seen[: when[1]]) if span == Span("a", 1, 1))
        blocks = sum(len(vector.blocks) for vector in scene.watched.vectors.values())
        assert sum(span.blocks for span in seen[repaired + 1 : when[1]]) >= blocks, "all of it, after the repair and before it was ready"
        assert scene.answer() == GOOD
        assert scene.counted(table.SCRUB_FINDINGS, "memory") == scene.counted(table.SCRUB_REPAIRS, "repaired") == 1

    run(work)


def test_a_reading_that_was_wrong_once_is_counted_apart_and_nothing_is_written(scene: Scene) -> None:
    async def work() -> None:
        read, wrong = scene.active.read, [True]

        def reading(watched: Watched, span: Span) -> Words:
            found = read(watched, span)
            if span.tensor == "a" and wrong:
                wrong.clear()
                found[0, 1] ^= 1
            return found

        scene.active.read = reading  # type: ignore[method-assign]
        before = scene.watched
        await scene.until_passes(1)
        (finding,) = scene.scrub.look().findings
        assert (finding.kind, finding.tensor, finding.remedy) == ("transient", "a", "")
        assert scene.active.is_current(before) and scene.remembered.record.damage == "" and scene.front.holds == 0
        assert scene.counted(table.SCRUB_FINDINGS, "transient") == 1 and scene.counted(table.SCRUB_FINDINGS, "memory") == 0

    run(work)


def test_damage_that_is_gone_at_the_third_reading_was_the_reading_too(scene: Scene) -> None:
    async def work() -> None:
        read, wrong = scene.active.read, [True, True]

        def reading(watched: Watched, span: Span) -> Words:
            found = read(watched, span)
            if span.tensor == "a" and wrong:
                wrong.pop()
                found[0, 1] ^= 1
            return found

        scene.active.read = reading  # type: ignore[method-assign]
        await scene.until_passes(1)
        assert [finding.kind for finding in scene.scrub.look().findings] == ["transient"]
        assert scene.watched.record.repairs == 0 and scene.remembered.record.damage == ""

    run(work)


def test_what_cannot_be_mended_in_place_is_staged_elsewhere_and_the_node_is_ready_once_that_serves(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        scene.front.in_flight = [1]  # a request that never ends
        scene.begin(0.2)
        scene.scrub._mender = Mender(
            "search", "encoder", scene.active, scene.front, scene.memory.store, scene.provider, scene.kick, limit_s=0.2, restage_s=0.1
        )
        await scene.until(lambda: scene.kicked > 0)
        assert scene.remembered.record.damage and scene.active.watched() is None
        scene.bring_up(1, 1)
        scene.switch(1, 1)
        await scene.until(lambda: scene.remembered.record.damage == "")
        assert scene.answer() == GOOD

    run(work)


def test_a_record_of_damage_that_an_earlier_control_left_is_taken_back_once_this_one_verified_what_serves(scene: Scene) -> None:
    async def work() -> None:
        scene.remembered.remember(damage="memory is damaged")
        checked = dict(scene.station.checked)
        scene.station.checked.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await scene.until(lambda: scene.remembered.record.damage == "")
        scene.station.checked.update(checked)
        await scene.until(lambda: scene.remembered.record.damage == "")

    run(work)


def test_the_scrub_stands_back_while_anybody_stages_and_reads_on_afterwards(scene: Scene) -> None:
    async def work() -> None:
        seen = spied(scene)
        with scene.budget.first():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.4):
                    await scene.until_passes(1)
            assert seen == []
        await scene.until_passes(1)

    run(work)


def test_what_somebody_else_found_in_the_memory_that_serves_is_looked_for_at_once(tmp_path: Path, shm: Path) -> None:
    scene = Scene(tmp_path, shm, 3600.0)
    scene.station.suspect.set()  # the first pass at once as well

    async def work() -> None:
        task = asyncio.create_task(scene.scrub.run())
        try:
            async with asyncio.timeout(20):
                while not scene.counted(table.SCRUB_PASSES):
                    await asyncio.sleep(0.01)
                scene.damage()
                await asyncio.sleep(1.5)
                assert scene.scrub.look().findings == (), "the next pass is an hour away"
                reading = scene.station.vector()
                assert reading is not None and reading.root != reading.record.vector_root
                while scene.answer() != GOOD or scene.remembered.record.damage:
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert [finding.remedy for finding in scene.scrub.look().findings] == ["repaired"]

    try:
        run(work)
    finally:
        scene.close()


def test_a_module_that_fails_is_a_reason_to_look_at_its_memory_now_and_not_all_the_time(tmp_path: Path, shm: Path) -> None:
    scene = Scene(tmp_path, shm, 3600.0)
    scene.station.suspect.set()

    async def work() -> None:
        task = asyncio.create_task(scene.scrub.run())
        try:
            async with asyncio.timeout(30):
                while not scene.counted(table.SCRUB_PASSES):
                    await asyncio.sleep(0.01)
                scene.damage()
                scene.workers.failures = 1
                while scene.answer() != GOOD or scene.remembered.record.damage:
                    await asyncio.sleep(0.01)
            passes = scene.counted(table.SCRUB_PASSES)
            scene.workers.failures = 50
            await asyncio.sleep(1.5)
            assert scene.counted(table.SCRUB_PASSES) <= passes + 1, "not again within a tenth of the interval"
            assert not scene.station.suspect.is_set()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    try:
        run(work)
    finally:
        scene.close()


def test_runs_are_due_one_after_the_other_over_the_interval(tmp_path: Path, shm: Path) -> None:
    scene = Scene(tmp_path, shm, 3600.0)
    seen = spied(scene)

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await scene.until_passes(1)
        order = scrub.Order(scene.watched.sizes, scrub.seed(scene.watched.record.checksum, 2))
        assert len(order) == 2
        assert tuple(seen) == next(iter(order)), "the second run is not due for many minutes"
        assert scene.scrub.look().done_bytes == order.run_bytes(seen)

    try:
        run(work)
    finally:
        scene.close()


def test_a_switch_in_the_middle_of_a_pass_begins_another_one_over_what_serves_then(scene: Scene) -> None:
    async def work() -> None:
        scene.bring_up(2, 1)
        await scene.until_passes(1)
        scene.switch(2, 1)
        await scene.until_passes(1)
        assert scene.scrub.look().findings == ()
        assert scene.watched.record.version == "2.0.0"

    run(work)


def damage(tensor: str = "ids", block: int = 0) -> tuple[DerivedDamage, ...]:
    return (DerivedDamage(tensor, block, "1:2", "3:4"),)


def test_a_worker_whose_own_memory_changed_is_named_and_replaced_and_the_node_ready_once_the_next_one_was_looked_at(scene: Scene) -> None:
    async def work() -> None:
        scene.workers.damage = {1: [damage(block=2), ()]}
        scene.workers.loading = {1: [False, True]}  # at the second look it has not loaded yet
        await scene.until_passes(1)
        (finding,) = scene.scrub.look().findings
        assert (finding.kind, finding.tensor, finding.block, finding.where, finding.remedy) == ("derived", "ids", 2, "worker 1", "replaced")
        assert scene.workers.asked[:3] == [True, False, False] and scene.remembered.record.damage == ""
        assert scene.counted(table.SCRUB_REPAIRS, "replaced") == 1

    run(work)


def test_a_tensor_that_changes_in_every_new_worker_is_no_damage_of_memory_and_workers_are_left_alone_but_the_node_is_not_ready(
    scene: Scene,
) -> None:
    async def work() -> None:
        scene.workers.damage = {0: [damage(), ()] * MAX_REPLACED + [damage()] * 100}
        await scene.until_passes(MAX_REPLACED + 2)
        assert scene.workers.asked[: 2 * MAX_REPLACED + 2] == [True, False] * MAX_REPLACED + [False, False]
        assert "worker is damaged: tensor 'ids'" in scene.remembered.record.damage
        assert scene.counted(table.SCRUB_REPAIRS, "replaced") == MAX_REPLACED
        scene.workers.damage = {}
        await scene.until_passes(2)
        assert scene.remembered.record.damage == ""

    run(work)


def test_the_reading_thread_gives_way_and_can_still_give_the_interpreters_lock_back() -> None:
    pool = idle_thread()
    assert pool.submit(lambda: (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))).result(10) == (0, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
    pool.shutdown()
