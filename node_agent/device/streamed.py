"""The device port over memory that the processor does not reach: bytes go through pinned memory and streams of work that end later.

A *feed* is one stream with the pinned memory that feeds it. Each call takes a feed of its own, asks it for what is to be done, and gives it
back only once all of that has happened: nothing is read before it was written, and pinned memory is never refilled under a copy. A wait
has an end. A device that failed, or did not end its work in time, is used by this process no more: what it still does, nobody knows, so
every later call is refused with the first fault, the slot stays dirty, and the process that starts next reads everything anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

import numpy as np

from consistency.vector import BLOCK_BYTES, Words
from node_agent.device.port import SLOTS, Records, SlotRecord, require_within
from node_agent.refusal import Refusal

LIMIT_S: Final = 30.0  # for one piece: a copy of 16 MiB takes a millisecond, a device that hangs takes for ever
_POLL_S: Final = (0.0, 0.0, 0.000_02, 0.000_05, 0.000_2, 0.001)  # between looks, the last one repeated


class DeviceFault(Exception):
    """A call to the device did not succeed; `name` is what the device's own library calls it."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.call = call
        self.name = name


class Feed(Protocol):
    """Work is asked for and happens later, in the order in which it was asked. Offsets are those of the device's memory of both slots.

    Every method may raise DeviceFault, also for what was asked before. Used by one thread at a time.
    """

    @property
    def buffer(self) -> memoryview:
        """Pinned memory of the host."""

    def upload(self, offset: int, size: int) -> None:
        """The first bytes of the buffer, as they are once this happens, to the device."""

    def move(self, from_offset: int, to_offset: int, size: int) -> None:
        """From the device's memory to the device's memory; the ranges do not overlap."""

    def checks(self, offset: int, size: int) -> Words:
        """Block checks [blocks, 2]; filled in once this has happened."""

    def done(self) -> bool:
        """Everything that was asked has happened."""


class Patience(NamedTuple):
    limit_s: float = LIMIT_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class StreamedDevice:
    """Control's side. At most as many calls at a time as there are feeds; further ones wait for one."""

    def __init__(self, name: str, records: Records, slot_bytes: int, feeds: Sequence[Feed], patience: Patience = Patience()) -> None:  # noqa: B008
        """`name` is said in refusals. Slot 1 begins `slot_bytes` behind slot 0."""
        self.slot_bytes = slot_bytes
        self.chunk_bytes = min(len(feed.buffer) for feed in feeds) // BLOCK_BYTES * BLOCK_BYTES
        if not self.chunk_bytes:
            raise ValueError(f"a feed's buffer holds no block of {BLOCK_BYTES} bytes")
        self._name = name
        self._records = records
        self._free = list(feeds)
        self._returned = threading.Condition()
        self._patience = patience
        self._fault: Refusal | None = None  # the first one

    def record(self, slot: int) -> SlotRecord:
        return self._records.record(slot)

    def begin(self, slot: int, record: SlotRecord) -> None:
        self._require_sound()
        self._records.mark_dirty(slot, record)

    def finish(self, slot: int, vector_root: str, snapshot_digest: str) -> SlotRecord:
        self._require_sound()
        return self._records.mark_verified(slot, vector_root, snapshot_digest)

    def fill(self, slot: int, offset: int, size: int, read_into: Callable[[memoryview], None]) -> None:
        self._records.require_dirty(slot)
        at = self._at(slot, offset, size)
        if size > self.chunk_bytes:
            raise ValueError(f"{size} bytes at once, expected at most the {self.chunk_bytes} of chunk_bytes")
        with self._feed("fill") as feed, feed.buffer[:size] as part:
            read_into(part)
            feed.upload(at, size)

    def copy(self, from_slot: int, from_offset: int, size: int, to_slot: int, to_offset: int) -> None:
        self._records.require_dirty(to_slot)
        source, target = self._at(from_slot, from_offset, size), self._at(to_slot, to_offset, size)
        with self._feed("fill") as feed:
            feed.move(source, target, size)

    def block_checks(self, slot: int, offset: int, size: int) -> Words:
        at = self._at(slot, offset, size)
        with self._feed("verify") as feed:
            checks = feed.checks(at, size)
        return np.array(checks)  # the feed's next user may reuse the memory

    def _at(self, slot: int, offset: int, size: int) -> int:
        require_within(offset, size, self.slot_bytes)
        if not 0 <= slot < SLOTS:
            raise ValueError(f"slot {slot} is outside 0..{SLOTS - 1}")
        return slot * self.slot_bytes + offset

    @contextmanager
    def _feed(self, phase: str) -> Iterator[Feed]:
        """A feed that nobody else uses. Left only when nothing asked of it is under way, or with the device given up."""
        feed, ended = self._take(phase), False
        try:
            try:
                yield feed
            finally:
                self._wait(feed, phase)
                ended = True
        except DeviceFault as cause:
            raise self._give_up("device_failed", cause.call, "success", cause.name, phase) from cause
        finally:
            if not ended:  # whoever waited was interrupted: this feed's work may still be under way
                self._give_up("device_failed", "work", "a wait to its end", "one that was interrupted", phase)
            with self._returned:
                self._free.append(feed)
                self._returned.notify()

    def _take(self, phase: str) -> Feed:
        with self._returned:
            if not self._returned.wait_for(lambda: bool(self._free) or self._fault is not None, self._patience.limit_s):
                raise Refusal("device_late", self._name, f"a free feed within {self._patience.limit_s:g} s", "none", phase)
            self._require_sound()
            return self._free.pop()

    def _wait(self, feed: Feed, phase: str) -> None:
        limit_s, clock, sleep = self._patience
        deadline, looks = clock() + limit_s, 0
        while not feed.done():
            if clock() >= deadline:
                raise self._give_up("device_late", "work", f"an end within {limit_s:g} s", "none", phase)
            sleep(_POLL_S[min(looks, len(_POLL_S) - 1)])
            looks += 1

    def _give_up(self, kind: str, what: str, expected: str, found: str, phase: str) -> Refusal:
        refusal = Refusal(kind, f"{what} on {self._name}", expected, found, phase)
        with self._returned:
            self._fault = self._fault or refusal
            self._returned.notify_all()
        return refusal

    def _require_sound(self) -> None:
        if self._fault is not None:
            first = self._fault
            raise Refusal(first.kind, self._name, "a device without a fault", f"first {first.detail}", "device")
