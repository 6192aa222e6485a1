"""What the agent needs of device memory: two slots of equal size, and a record that says what each one holds.

The record is written before the bytes it speaks of: `begin` sets a slot dirty before `fill` or `copy` may touch it, `finish` sets it
verified only from dirty. When a call returns, what it asked for has happened: nothing of it is still under way, also when it raised, unless
the device itself failed; then every later call is refused. A file in shared memory implements it (`cpu`), and so does memory that is only
reached through streams of work (`streamed`). `tests/contract/test_device_port.py` holds both to it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from consistency.vector import Words

SLOTS: Final = 2


class SlotState(StrEnum):
    EMPTY = "empty"  # nothing is known about the bytes
    DIRTY = "dirty"  # being written, or a write did not end; the record says what is being written
    VERIFIED = "verified"  # the vector computed from these bytes equals the manifest's


class SlotRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one slot holds, as its header says. Fields that have their defaults are not written: earlier builds know fewer."""

    state: SlotState = SlotState.EMPTY
    version: str = ""  # label
    checksum: str = ""  # of the version
    manifest_digest: str = ""
    vector_root: str = ""  # computed from the slot's bytes when verified
    layout_digest: str = ""
    snapshot_digest: str = ""  # of the sidecar that lists the tensors held here
    generation: int = 0  # of the order that staged it; with the revision the fence
    revision: int = 0
    repairs: int = 0  # of blocks that were damaged, since it was staged: what computed across one sees another record
    repair_until_ns: int = 0  # while dirty for a repair: the monotonic time by which it is verified again, or never will be


EMPTY_RECORD = SlotRecord()


class Records(Protocol):
    """What is known of the slots, apart from their bytes. An `Arena` has them."""

    def record(self, slot: int) -> SlotRecord: ...

    def require_dirty(self, slot: int) -> SlotRecord:
        """Raises Refusal slot_not_dirty."""

    def mark_dirty(self, slot: int, record: SlotRecord) -> None: ...

    def mark_verified(self, slot: int, vector_root: str, snapshot_digest: str) -> SlotRecord: ...


class Device(Protocol):
    """Any thread may call `fill`, `copy` and `block_checks`. A range that leaves the slot is a defect: ValueError, nothing is touched."""

    @property
    def slot_bytes(self) -> int:
        """Size of each slot."""

    def record(self, slot: int) -> SlotRecord: ...

    def begin(self, slot: int, record: SlotRecord) -> None:
        """Set the slot dirty with this record. From here on its bytes may change."""

    def finish(self, slot: int, vector_root: str, snapshot_digest: str) -> SlotRecord:
        """Set the slot verified. Only from dirty."""

    def fill(self, slot: int, offset: int, size: int, read_into: Callable[[memoryview], None]) -> None:
        """Let `read_into` give exactly these bytes of a dirty slot, at most `chunk_bytes`; it may get other memory than the slot's own."""

    def copy(self, from_slot: int, from_offset: int, size: int, to_slot: int, to_offset: int) -> None:
        """Copy bytes into a dirty slot."""

    @property
    def chunk_bytes(self) -> int:
        """How much to fill and check at a time: whole blocks of the vector."""

    def block_checks(self, slot: int, offset: int, size: int) -> Words:
        """Block checks [blocks, 2] computed from the bytes as they are in device memory; `offset` is where a block of a tensor begins."""


def require_within(offset: int, size: int, slot_bytes: int) -> None:
    """Raises ValueError for a range that leaves the slot."""
    if offset < 0 or size < 0 or offset + size > slot_bytes:
        raise ValueError(f"bytes {offset}..{offset + size} leave the {slot_bytes} bytes of a slot")
