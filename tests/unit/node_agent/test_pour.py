from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.vector import BLOCK_BYTES, entry_of, tensor_entry
from node_agent import layout as layouts
from node_agent.background import NICENESS
from node_agent.budget import Budget
from node_agent.device.arena import Arena
from node_agent.device.cpu import CpuDevice
from node_agent.device.port import SlotRecord
from node_agent.page_cache import MAX_WAITING, DropBehind
from node_agent.pour import NoBlobs, Pace, PieceFailed, pour
from node_agent.staging_plan import Origin, Step
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import TensorEntry
from tests.support.shm import shm_directory
from tests.support.versions import MemoryBlob, MemoryBlobs

CHUNK = 2 * BLOCK_BYTES


class Slots:
    """An arena with a dirty slot 0, and slot 1 as the active one, holding what `active` says."""

    def __init__(self, directory: Path, sizes: dict[str, int]) -> None:
        rng = np.random.default_rng(len(sizes))
        self.data = {name: rng.integers(0, 256, size, np.uint8).tobytes() for name, size in sizes.items()}
        tensors = [
            TensorEntry(name, "U8", (len(data),), "model.safetensors", 0, len(data), "0" * 64, "0" * 64) for name, data in self.data.items()
        ]
        self.layout = layouts.plan(tensors)
        self.arena = Arena.create(directory / "arena", max(1, self.layout.total_bytes))
        self.device = CpuDevice(self.arena, CHUNK)
        self.blobs = MemoryBlobs()
        self.blobs.blobs = {self.sha(name): data for name, data in self.data.items()}
        for slot in (0, 1):
            self.arena.mark_dirty(slot, SlotRecord())
        with self.arena.staging_view(1) as view:
            for place in self.layout.placements:
                view[place.offset : place.end] = self.data[place.name]

    def sha(self, name: str) -> str:
        return hashlib.sha256(self.data[name]).hexdigest()

    def steps(self, origin: Callable[[str], Origin]) -> list[Step]:
        return [Step(place, self.sha(place.name), origin(place.name), place.offset) for place in self.layout.placements]

    def held(self, name: str, slot: int = 0) -> bytes:
        place = next(place for place in self.layout.placements if place.name == name)
        return bytes(self.arena.slot_view(slot)[place.offset : place.end])


@pytest.fixture
def slots(shm: Path) -> Slots:
    return Slots(shm, {"a": 5 * BLOCK_BYTES + 3, "b": 10, "c": 4 * BLOCK_BYTES, "d": 0})


SIZES = st.integers(0, 6 * BLOCK_BYTES + 9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SIZES, st.sampled_from(list(Origin))), max_size=6), st.integers(1, 3))
def test_whatever_the_pieces_and_threads_the_checks_are_those_of_the_bytes_and_the_bytes_are_the_blobs(
    wanted: list[tuple[int, Origin]], threads: int
) -> None:
    with shm_directory() as directory:
        slots = Slots(directory, {f"t{n}": size for n, (size, _) in enumerate(wanted)})
        origins = {f"t{n}": origin for n, (_, origin) in enumerate(wanted)}
        steps = slots.steps(origins.__getitem__)
        with slots.arena.staging_view(0) as view:
            for step in steps:
                if step.origin is Origin.KEPT:
                    view[step.placement.offset : step.placement.end] = slots.data[step.placement.name]
        checks = pour(slots.device, 0, 1, steps, slots.blobs, Pace(threads))
        for step, found in zip(steps, checks, strict=True):
            place, data = step.placement, slots.data[step.placement.name]
            assert slots.held(place.name) == data
            assert entry_of("U8", place.shape, place.size_bytes, found) == tensor_entry(data, "U8", place.shape).entry
        assert slots.blobs.opened == 0
        assert set(slots.blobs.reads) == {step.sha256 for step in steps if step.origin is Origin.STORE and step.placement.size_bytes}
        slots.arena.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_blob_that_ends_early_stops_everything_names_its_tensor_and_leaves_nothing_open(slots: Slots, threads: int) -> None:
    class Short(MemoryBlob):
        def read_into(self, offset: int, into: memoryview) -> None:
            if offset >= CHUNK and self._sha256 == slots.sha("a"):
                raise RaftmetaError("integrity", "it ended")
            super().read_into(offset, into)

    class Blobs(MemoryBlobs):
        def open(self, sha256: str, size_bytes: int) -> MemoryBlob:
            return Short(self, sha256, slots.data["a"] if sha256 == slots.sha("a") else slots.blobs.blobs[sha256])

    blobs = Blobs()
    with pytest.raises(PieceFailed, match="a") as failed:
        pour(slots.device, 0, 1, slots.steps(lambda name: Origin.STORE), blobs, Pace(threads))
    assert isinstance(failed.value.__cause__, RaftmetaError)
    assert blobs.opened == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pour-")], "nobody is left to write"


def test_a_missing_blob_is_the_tensors_failure(slots: Slots) -> None:
    del slots.blobs.blobs[slots.sha("c")]
    with pytest.raises(PieceFailed, match="c"):
        pour(slots.device, 0, 1, slots.steps(lambda name: Origin.STORE), slots.blobs, Pace())


def test_what_nobody_foresaw_in_a_thread_reaches_the_caller(slots: Slots) -> None:
    slots.blobs.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt):
        pour(slots.device, 0, 1, slots.steps(lambda name: Origin.STORE), slots.blobs, Pace(threads=2))
    assert slots.blobs.opened == 0


def test_kept_steps_read_no_blob_and_change_no_byte(slots: Slots) -> None:
    before = bytes(slots.arena.slot_view(1))
    checks = pour(slots.device, 1, None, slots.steps(lambda name: Origin.KEPT), NoBlobs(), Pace(2))
    assert bytes(slots.arena.slot_view(1)) == before
    place = slots.layout.placements[0]
    assert entry_of("U8", place.shape, place.size_bytes, checks[0]) == tensor_entry(slots.data["a"], "U8", place.shape).entry


def test_beside_requests_only_its_own_threads_give_way(slots: Slots) -> None:
    seen: set[int] = set()

    class Watching(MemoryBlob):
        def read_into(self, offset: int, into: memoryview) -> None:
            seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            super().read_into(offset, into)

    class Blobs(MemoryBlobs):
        def open(self, sha256: str, size_bytes: int) -> MemoryBlob:
            return Watching(self, sha256, slots.blobs.blobs[sha256])

    pour(slots.device, 0, 1, slots.steps(lambda name: Origin.STORE), Blobs(), Pace(1, idle=True))
    assert seen == {NICENESS}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < NICENESS


class Time:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_every_byte_that_moves_is_paid_for_whatever_moves_it(slots: Slots) -> None:
    time = Time()
    budget = Budget(1 << 20, lambda: time.now, time.sleep)
    pour(slots.device, 0, 1, slots.steps(lambda name: Origin.ACTIVE if name == "c" else Origin.STORE), slots.blobs, Pace(1, budget=budget))
    budget.spend(0)
    assert time.now - 100.0 == pytest.approx((9 * BLOCK_BYTES + 13) / (1 << 20))


def test_a_budget_is_not_saved_up() -> None:
    time = Time()
    budget = Budget(10.0, lambda: time.now, time.sleep)
    time.now += 1000.0
    budget.spend(50)
    assert time.slept == []
    budget.spend(20)
    budget.spend(1)
    assert time.slept == [pytest.approx(5.0), pytest.approx(2.0)]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget(0)


def test_descriptors_are_closed_behind_also_when_too_many_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    descriptors = [os.open(tmp_path / "file", os.O_RDONLY) for _ in range(2 * MAX_WAITING)]
    drop = DropBehind()
    for fd in descriptors:
        drop(fd)
    drop.wait()
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert not [thread for thread in threading.enumerate() if thread.name == "drop-behind"], "no thread that a killed process waits for"
    again = os.open(tmp_path / "file", os.O_RDONLY)
    drop(again)
    drop.wait()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again)
