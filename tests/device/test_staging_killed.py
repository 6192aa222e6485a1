"""A control process killed between any two steps of staging: the slot never claims bytes it lacks, and the next control goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from consistency.vector import root, tensor_entry
from node_agent.device.arena import Arena
from node_agent.device.cpu import CpuDevice
from node_agent.device.port import SlotRecord, SlotState
from node_agent.device.snapshot import SlotSnapshot, Snapshots
from node_agent.staging import StageOrder, stage
from raftmeta.core.types import StageCounters
from tests.support.shm import shm_directory
from tests.support.versions import MemoryBlobs, manifest_of
from tests.support.weights import Tensors

pytestmark = pytest.mark.device
SIZE = 5_000
OLD, NEW = "1.0.0", "2.0.0"
VERSIONS: dict[str, Tensors] = {
    OLD: {f"t{i}": ("U8", (SIZE,), bytes([i]) * SIZE) for i in range(6)},
    NEW: {f"t{i}": ("U8", (SIZE,), bytes([i + 100 if i < 3 else i]) * SIZE) for i in range(6)},
}


class Steps:
    """Kills its own process at the n-th moment; counts them when n is beyond the last."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.done = 0

    def moment(self) -> None:
        if self.done == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.done += 1


class KilledDevice(CpuDevice):
    def __init__(self, arena: Arena, steps: Steps) -> None:
        super().__init__(arena)
        self._steps = steps

    def begin(self, slot: int, record: SlotRecord) -> None:
        self._steps.moment()
        super().begin(slot, record)
        self._steps.moment()

    def finish(self, slot: int, vector_root: str, snapshot_digest: str) -> SlotRecord:
        self._steps.moment()
        record = super().finish(slot, vector_root, snapshot_digest)
        self._steps.moment()
        return record

    def fill(self, slot: int, offset: int, size: int, read_into: Callable[[memoryview], None]) -> None:
        def half_then_whole(into: memoryview) -> None:
            into[: len(into) // 2] = b"\xee" * (len(into) // 2)
            self._steps.moment()
            read_into(into)

        super().fill(slot, offset, size, half_then_whole)
        self._steps.moment()


class KilledSnapshots(Snapshots):
    def __init__(self, arena_path: Path, steps: Steps) -> None:
        super().__init__(arena_path)
        self._steps = steps

    def save(self, slot: int, snapshot: SlotSnapshot) -> str:
        digest = super().save(slot, snapshot)
        self._steps.moment()
        return digest

    def drop_others(self, slot: int, digest: str) -> None:
        super().drop_others(slot, digest)
        self._steps.moment()


def stage_into(arena: Arena, slot: int, version: str, active: int | None, steps: Steps | None = None) -> StageCounters:
    manifest = manifest_of(VERSIONS[version])
    order = StageOrder(version, "c" * 64, manifest, "d" * 64, slot, active, 1, 1)
    steps = steps or Steps(None)
    device, snapshots = KilledDevice(arena, steps), KilledSnapshots(arena.path, steps)
    return stage(device, snapshots, order, MemoryBlobs(VERSIONS[version])).counters


def root_in_memory(arena: Arena, slot: int) -> str:
    snapshot = Snapshots(arena.path).load(slot, arena.verified(slot).snapshot_digest)
    assert snapshot is not None
    with arena.slot_view(slot) as memory:
        return root({p.name: tensor_entry(bytes(memory[p.offset : p.end]), p.dtype, p.shape).entry for p in snapshot.layout.placements})


def killed_while_staging(path: Path, kill_at: int) -> bool:
    """Run the staging of NEW over OLD in slot 1 in a child that dies at this moment. False when it lived to the end."""
    pid = os.fork()
    if pid == 0:
        stage_into(Arena.open(path, readonly=False), 1, NEW, 0, Steps(kill_at))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def test_a_slot_whose_writer_was_killed_is_dirty_or_holds_exactly_the_version_it_names() -> None:
    states: list[SlotState] = []
    killed = True
    while killed:
        with shm_directory() as directory:
            arena = Arena.create(directory / "arena", 1 << 16)
            for slot in (0, 1):
                stage_into(arena, slot, OLD, None)
            active = bytes(arena.slot_view(0))
            arena.close()
            killed = killed_while_staging(directory / "arena", len(states))
            arena = Arena.open(directory / "arena", readonly=False)
            record = arena.record(1)
            states.append(record.state)
            assert bytes(arena.slot_view(0)) == active
            if record.state is SlotState.VERIFIED:
                assert root_in_memory(arena, 1) == record.vector_root == manifest_of(VERSIONS[record.version]).vector_root
            counters = stage_into(arena, 1, NEW, 0)
            assert counters.bytes_kept >= 3 * SIZE, "what the new version leaves as it was is known after any crash"
            assert root_in_memory(arena, 1) == manifest_of(VERSIONS[NEW]).vector_root
            assert len(list(directory.glob("*.slot1.*.json"))) == 1
            arena.close()
    verified, dirty = SlotState.VERIFIED, SlotState.DIRTY
    first, last = states.index(dirty), len(states) - states[::-1].index(dirty)
    assert states == [verified] * first + [dirty] * (last - first) + [verified] * (len(states) - last)
    assert last - first > 6
