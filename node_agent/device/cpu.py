"""The device port over an arena in shared memory: the processor writes and reads the slots directly."""

from __future__ import annotations

from collections.abc import Callable

from node_agent.device.arena import Arena
from node_agent.device.port import SlotRecord

COPY_BYTES = 8 << 20  # at a time: the interpreter lock is held for about a millisecond, whatever the size of a tensor


class CpuDevice:
    """Control's side; the arena is open for writing."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def slot_bytes(self) -> int:
        return self._arena.slot_bytes

    def record(self, slot: int) -> SlotRecord:
        return self._arena.record(slot)

    def begin(self, slot: int, record: SlotRecord) -> None:
        self._arena.mark_dirty(slot, record)

    def finish(self, slot: int, vector_root: str, snapshot_digest: str) -> SlotRecord:
        return self._arena.mark_verified(slot, vector_root, snapshot_digest)

    def fill(self, slot: int, offset: int, size: int, read_into: Callable[[memoryview], None]) -> None:
        with self._arena.staging_view(slot) as view, view[offset : offset + size] as part:
            read_into(part)

    def copy(self, from_slot: int, from_offset: int, size: int, to_slot: int, to_offset: int) -> None:
        with self._arena.staging_view(to_slot) as target, self._arena.slot_view(from_slot) as source:
            for done in range(0, size, COPY_BYTES):
                piece = min(COPY_BYTES, size - done)
                target[to_offset + done : to_offset + done + piece] = source[from_offset + done : from_offset + done + piece]

    def read(self, slot: int, offset: int, size: int) -> memoryview:
        return self._arena.slot_view(slot)[offset : offset + size]
