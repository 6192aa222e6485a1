"""The device port over an arena in shared memory: the processor writes and reads the slots directly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from consistency import vector
from consistency.vector import Words
from node_agent.device.arena import Arena
from node_agent.device.port import SlotRecord, require_within

CHUNK_BYTES = 2 << 20  # filled and checked at a time. Measured: with 256 KiB a tenth slower, with 4 MiB as fast and a coarser budget


class CpuDevice:
    """Control's side; the arena is open for writing. `chunk_bytes` is smaller in tests alone."""

    def __init__(self, arena: Arena, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._arena = arena
        self.chunk_bytes = chunk_bytes

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
        require_within(offset, size, self.slot_bytes)
        with self._arena.staging_view(slot) as view, view[offset : offset + size] as part:
            read_into(part)

    def copy(self, from_slot: int, from_offset: int, size: int, to_slot: int, to_offset: int) -> None:
        require_within(from_offset, size, self.slot_bytes)
        require_within(to_offset, size, self.slot_bytes)
        with self._arena.staging_view(to_slot) as target, self._arena.slot_view(from_slot) as source:
            into = np.frombuffer(target, np.uint8, size, to_offset)
            np.copyto(into, np.frombuffer(source, np.uint8, size, from_offset))  # without the interpreter lock
            del into  # or the view could not be released

    def block_checks(self, slot: int, offset: int, size: int) -> Words:
        require_within(offset, size, self.slot_bytes)
        with self._arena.slot_view(slot) as memory:
            return vector.block_checks(memory[offset : offset + size])
