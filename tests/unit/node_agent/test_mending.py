"""Damaged blocks come back from the blob while requests are held; what cannot be mended so is given up, never served."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import hashlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from consistency.vector import BLOCK_BYTES
from node_agent import scrub
from node_agent.active_memory import Watched
from node_agent.fetch import FetchFailed
from node_agent.ipc import ConnectionLost
from node_agent.mending import Damage, Mender, read_blocks
from node_agent.messages import NOTHING_SERVES, Done, Held, Hold, LetGo, Numbered, Reply
from node_agent.pause import LEASE_S, Pause, paused
from node_agent.plan import Target
from node_agent.scrub import Remedy
from raftmeta.durable import DiskFull
from tests.support.scrub_scene import GOOD, A, ScrubScene

BLOB = hashlib.sha256(A).hexdigest()


class FakeFront:
    """Holds requests, of which `in_flight` says how many workers still have, a look at a time; the last one stays."""

    def __init__(self, *in_flight: int) -> None:
        self.in_flight = list(in_flight) or [0]
        self.is_held = False
        self.holds = self.let_goes = 0
        self.lost = 0  # calls that find no front
        self.lease_ms: int | None = None  # what it grants, None: what was asked for

    async def call(self, make: Callable[[int], Numbered], timeout_s: float) -> Reply:
        call = make(1)
        if self.lost:
            self.lost -= 1
            self.is_held = False
            raise ConnectionLost("no front")
        if isinstance(call, LetGo):
            self.let_goes, self.is_held = self.let_goes + 1, False
            return Done(1)
        assert isinstance(call, Hold)
        self.holds, self.is_held = self.holds + 1, True
        left = self.in_flight.pop(0) if len(self.in_flight) > 1 else self.in_flight[0]
        return Held(1, left, call.lease_ms if self.lease_ms is None else self.lease_ms)


class FakeProvider:
    def __init__(self, scene: ScrubScene) -> None:
        self.scene = scene
        self.fetched: list[tuple[Target, frozenset[str]]] = []
        self.refuse: Exception | None = None

    async def fetch(self, target: Target, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
        self.fetched.append((target, elsewhere))
        if self.refuse is not None:
            raise self.refuse
        self.scene.memory.fetch(self.scene.versions[1])
        return 1


class Scene(ScrubScene):
    def __init__(self, root: Path, arena_dir: Path) -> None:
        super().__init__(root, arena_dir)
        self.front = FakeFront()
        self.provider = FakeProvider(self)
        self.found: list[Damage] = []
        self.was_held: list[bool] = []
        self.kicked = 0
        self.mender = Mender(
            "search", "encoder", self.active, self.front, self.memory.store, self.provider, self.kick, limit_s=5.0, restage_s=0.2
        )

    def kick(self) -> None:
        self.kicked += 1
        self.was_held.append(self.front.is_held)

    def note(self, damage: Damage) -> None:
        self.found.append(damage)
        self.was_held.append(self.front.is_held)

    async def mend(self, *tensors: str) -> Remedy:
        return (await self.mender.mend(self.watched, tensors or ("a",), self.note)).remedy


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    made.now_ns = 0  # the lease is never over, unless a test says so
    yield made
    made.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def test_damage_is_named_while_requests_already_wait_and_written_again_from_the_blob(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        scene.damage(2 * BLOCK_BYTES + 1)
        scene.damage(7, tensor="s3")
        assert await scene.mend("a", "s3") is Remedy.REPAIR
        assert scene.found == [{"a": [0, 2], "s3": [0]}] and scene.was_held == [True]
        assert scene.answer() == GOOD and scene.watched.record.repairs == 1
        assert all(scene.active.damaged(scene.watched, name) == [] for name in scene.watched.places)
        assert not scene.front.is_held and scene.front.let_goes == 1
        assert scene.provider.fetched == [] and scene.kicked == 0

    run(work)


@pytest.mark.parametrize("spoil", ["changed", "cut", "missing"])
def test_a_blob_that_is_no_longer_what_it_was_is_fetched_again_before_a_byte_of_it_is_used(scene: Scene, spoil: str) -> None:
    async def work() -> None:
        scene.damage()
        path = scene.memory.store.path(BLOB)
        path.chmod(0o640)
        if spoil == "missing":
            path.unlink()
        else:
            path.write_bytes(A[:-1] + (b"!" if spoil == "changed" else b""))
        assert await scene.mend() is Remedy.REPAIR
        ((target, elsewhere),) = scene.provider.fetched
        assert target == scene.versions[1].target
        assert BLOB not in elsewhere and len(elsewhere) == 6, "only the damaged tensor is asked for"
        assert scene.answer() == GOOD

    run(work)


def test_a_blob_that_came_is_used_although_something_else_of_the_version_could_not_be_had(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        scene.memory.store.discard(BLOB)

        async def fetch(target: Target, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
            scene.memory.fetch(scene.versions[1])
            raise FetchFailed("source_unavailable", "no block checks")

        scene.provider.fetch = fetch  # type: ignore[method-assign]
        assert await scene.mend() is Remedy.REPAIR
        assert scene.answer() == GOOD

    run(work)


def test_without_a_blob_the_slot_is_given_up_and_the_plan_looks_again_while_requests_wait(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        scene.memory.store.discard(BLOB)
        scene.provider.refuse = FetchFailed("source_unavailable", "no source")
        assert await scene.mend() is Remedy.RESTAGE
        assert scene.was_held == [True, True] and scene.kicked == 1
        assert scene.answer() == NOTHING_SERVES and not scene.front.is_held

    run(work)


def test_requests_wait_for_the_other_slot_where_that_does_not_take_long(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        scene.memory.store.discard(BLOB)
        scene.provider.refuse = FetchFailed("source_unavailable", "no source")

        def kick() -> None:
            scene.memory.fetch(scene.versions[1])
            scene.bring_up(1, 1)
            scene.switch(1, 1)
            scene.was_held.append(scene.front.is_held)

        scene.mender = Mender("search", "encoder", scene.active, scene.front, scene.memory.store, scene.provider, kick, 5.0, 5.0)
        assert await scene.mend() is Remedy.RESTAGE
        assert scene.was_held == [True, True] and scene.answer() == GOOD

    run(work)


def test_more_blocks_than_requests_should_wait_for_go_into_the_other_slot(scene: Scene) -> None:
    async def work() -> None:
        scene.damage(*(block * BLOCK_BYTES for block in range(scrub.MAX_IN_PLACE_BLOCKS)), tensor="big")
        assert await scene.mend("big") is Remedy.REPAIR
        scene.damage(*(block * BLOCK_BYTES for block in range(scrub.MAX_IN_PLACE_BLOCKS + 1)), tensor="big")
        assert await scene.mend("big") is Remedy.RESTAGE
        assert scene.answer() == NOTHING_SERVES

    run(work)


def test_a_node_may_be_told_never_to_write_to_the_slot_that_serves(scene: Scene) -> None:
    async def work() -> None:
        scene.mender = dataclasses.replace(scene.mender, most_in_place=0)
        scene.damage()
        assert await scene.mend() is Remedy.RESTAGE
        assert scene.answer() == NOTHING_SERVES

    run(work)


def test_what_workers_compute_is_waited_for_and_a_hold_that_is_never_granted_ends_in_the_other_slot(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        scene.front.in_flight = [2, 1, 1, 0]
        assert await scene.mend() is Remedy.REPAIR
        assert scene.front.holds >= 4
        scene.damage()
        scene.front.in_flight = [1]
        scene.mender = Mender(
            "search", "encoder", scene.active, scene.front, scene.memory.store, scene.provider, scene.kick, limit_s=0.3, restage_s=0.1
        )
        assert await scene.mend() is Remedy.RESTAGE
        assert scene.answer() == NOTHING_SERVES

    run(work)


def test_a_lease_that_ends_before_the_write_is_tried_again(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        ticks = iter([10**18] * 1 + [0] * 100)  # the first look at the clock comes far too late
        scene.active._clock_ns = lambda: next(ticks)
        assert await scene.mend() is Remedy.REPAIR
        assert scene.answer() == GOOD

    run(work)


def test_a_front_that_dies_while_it_holds_is_asked_again_when_it_is_back(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        scene.front.in_flight = [1, 1, 0]
        scene.front.lost = 3
        assert await scene.mend() is Remedy.REPAIR
        assert scene.answer() == GOOD

    run(work)


def test_a_front_that_grants_nothing_any_more_is_not_taken_for_idle() -> None:
    async def work() -> None:
        front = FakeFront(0)
        front.lease_ms = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await Pause(front, "search").idle()
        front.lease_ms = None
        until_ns = await Pause(front, "search", lambda: 7).idle()
        assert until_ns == 7 + int(LEASE_S * 1e9), "counted from before it was asked for"

    run(work)


def test_a_pause_is_renewed_as_long_as_it_lasts_and_let_go_whatever_happens_in_it() -> None:
    async def work() -> None:
        front = FakeFront()
        with pytest.raises(RuntimeError, match="inside"):
            async with paused(front, "search"):
                async with asyncio.timeout(10):
                    while front.holds < 3:
                        await asyncio.sleep(0.01)
                raise RuntimeError("inside")
        assert not front.is_held and front.let_goes == 1
        holds = front.holds
        await asyncio.sleep(0.3)
        assert front.holds == holds

    run(work)


def test_damage_that_is_gone_when_it_is_looked_at_again_changes_nothing(scene: Scene) -> None:
    async def work() -> None:
        before = scene.watched
        assert await scene.mend() is Remedy.NOTHING
        assert scene.active.is_current(before) and scene.found == [] and scene.kicked == 0

    run(work)


def test_blocks_are_read_out_of_the_bytes_that_were_hashed(tmp_path: Path) -> None:
    data = bytes(range(256)) * 256 * 40 + b"tail"
    path = tmp_path / "blob"
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    last = len(data) // BLOCK_BYTES
    found = read_blocks(path, sha256, [0, 17, last])
    assert found == {block: data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in (0, 17, last)}
    assert found[last] == b"tail"
    assert read_blocks(path, "0" * 64, [0]) is None
    assert read_blocks(path, sha256, [last + 1]) is None
    assert read_blocks(tmp_path / "none", sha256, [0]) is None


def full(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(slot: int, snapshot: object) -> str:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(scene.active._station.snapshots, "save", save)


def test_memory_is_mended_in_place_where_the_file_system_of_the_arena_has_no_room_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        full(scene, monkeypatch)
        scene.damage()
        assert await scene.mend() is Remedy.REPAIR
        assert scene.answer() == GOOD

    run(work)


def test_memory_that_cannot_be_mended_is_given_up_without_room_for_a_file(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        full(scene, monkeypatch)
        scene.mender = dataclasses.replace(scene.mender, most_in_place=0)
        scene.damage()
        assert await scene.mend() is Remedy.RESTAGE
        assert scene.answer() == NOTHING_SERVES and scene.kicked == 1
        assert scene.active._station.held_by_active() == frozenset(), "nothing of it is believed whole"

    run(work)


def test_damage_that_cannot_be_written_down_is_mended_all_the_same(scene: Scene) -> None:
    async def work() -> None:
        def found(damage: Damage) -> None:
            raise DiskFull("no room for the record")

        scene.damage()
        assert (await scene.mender.mend(scene.watched, ("a",), found)).remedy is Remedy.REPAIR
        assert scene.answer() == GOOD

    run(work)


def test_a_slot_whose_repair_was_put_back_is_given_up_by_the_record_that_it_has_by_then(scene: Scene) -> None:
    async def work() -> None:
        scene.damage()
        ticks = iter([0, 10**18])  # the first look at the lease in time, the one behind the record too late: put back
        scene.active._clock_ns = lambda: next(ticks, 0)
        scene.front.in_flight = [0, 0, 1]  # and then a request computes for longer than is waited for
        scene.mender = dataclasses.replace(scene.mender, limit_s=0.3, restage_s=0.1)
        assert await scene.mend() is Remedy.RESTAGE
        assert scene.answer() == NOTHING_SERVES

    run(work)


def test_a_repair_that_ended_after_its_time_is_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        scene.damage()
        repair, late = scene.active.repair, threading.Event()

        def slow(*args: object) -> None:
            late.wait(10)
            repair(*args)  # type: ignore[arg-type]

        prepare = scene.active.prepare
        prepared: list[str] = []

        def prepare_again(watched: Watched, tensors: Sequence[str]) -> str:
            prepared.append(prepare(watched, tensors))
            if len(prepared) == 2:  # after the time: let the repair go on, and see it end
                late.set()
                while scene.active.is_current(watched) or scene.active._station.in_repair:
                    time.sleep(0.001)
            return prepared[-1]

        monkeypatch.setattr(scene.active, "repair", slow)
        monkeypatch.setattr(scene.active, "prepare", prepare_again)
        scene.mender = dataclasses.replace(scene.mender, limit_s=0.3, restage_s=0.1)
        assert await scene.mend() is Remedy.REPAIR
        assert scene.answer() == GOOD and scene.kicked == 0

    run(work)


@pytest.mark.parametrize("stopped", [True, False])
def test_whatever_ends_a_mend_leaves_no_damaged_memory_to_requests_that_are_let_go(scene: Scene, stopped: bool) -> None:
    async def work() -> None:
        scene.damage()
        scene.front.in_flight = [1]
        if not stopped:
            scene.active.damaged = lambda watched, tensor: 1 // 0  # type: ignore[method-assign]
        mending = asyncio.create_task(scene.mend())
        while stopped and not scene.found:
            await asyncio.sleep(0.01)
        if stopped:
            mending.cancel()
        with pytest.raises(asyncio.CancelledError if stopped else ZeroDivisionError):
            await mending
        assert not scene.front.is_held and scene.answer() == NOTHING_SERVES

    run(work)
