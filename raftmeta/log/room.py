"""Where pending records will stand, so that a full disk is known before anything is written.

The plan is arithmetic over the active segment and the ready spares: a record that does not fit begins the next spare. `claim` makes sure
of spares or raises DiskFull; nothing here writes. The reserve is never promised by `has_room`, nor is what is left of it once it was begun
on a full disk: it is for what a member must write anyhow, a cut or the first entry of a leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raftmeta.durable import DiskFull
from raftmeta.log.hard_state import MAX_SEGMENTS
from raftmeta.log.records import DATA_START, MAX_RECORD_BYTES, RECORD_HEAD_BYTES, Record
from raftmeta.log.spares import SparePool


@dataclass(slots=True)
class Room:
    pool: SparePool
    reserve: int  # spares held back from `has_room`
    capacity: int = 0  # of the segment that the next record goes to
    place: int = 0  # offset at which it will stand
    rolls: int = 0  # segments that the pending records will begin

    def plan(self, end: int, capacity: int, begins_segment: bool, pending: Iterable[Record]) -> None:
        """Start over: the active segment ends at `end`, or a new one comes first, and these records wait."""
        self.place, self.capacity, self.rolls = end, capacity, 0
        if begins_segment:
            self._roll()
        for _, _, payload in pending:
            self.add(len(payload))

    def has_room(self, n_bytes: int, segments: int) -> bool:
        """Whether it fits without the reserve."""
        lacks_reserve = self.pool.short and len(self.pool.ready) - self.rolls < self.reserve
        return not lacks_reserve and self._fits(n_bytes, segments, self.reserve)

    def has_reserve(self, n_bytes: int, segments: int) -> bool:
        """Whether it fits at all."""
        return self._fits(n_bytes, segments, 0)

    def _fits(self, n_bytes: int, segments: int, kept: int) -> bool:
        if not self.needs_segment(n_bytes):
            return True
        return len(self.pool.ready) - self.rolls > kept and self._fits_a_segment(n_bytes) and segments + self.rolls < MAX_SEGMENTS

    def check_fit(self, n_bytes: int, segments: int) -> None:
        """Refuse a record that begins a segment where none may be begun for it."""
        if not self._fits_a_segment(n_bytes):
            raise ValueError(f"a record of {n_bytes} bytes is more than a segment of {self.pool.size} bytes takes")
        if segments + self.rolls >= MAX_SEGMENTS:
            raise DiskFull(f"{self.pool.directory} holds {MAX_SEGMENTS} segments, the limit; a snapshot has to come first")

    def needs_segment(self, n_bytes: int) -> bool:
        return self.place + RECORD_HEAD_BYTES + n_bytes > self.capacity

    def claim(self, count: int) -> None:
        """See that `count` spares are ready, waiting for the worker where needed, or raise DiskFull."""
        if not self.pool.wait(count):
            why = self.pool.full.detail if self.pool.full else "none is ready"
            raise DiskFull(f"{self.pool.directory} has no room for another segment of {self.pool.size} bytes: {why}")

    def add(self, n_bytes: int) -> None:
        if self.needs_segment(n_bytes):
            self._roll()
        self.place += RECORD_HEAD_BYTES + n_bytes

    def _fits_a_segment(self, n_bytes: int) -> bool:
        return DATA_START + RECORD_HEAD_BYTES + n_bytes <= self.pool.size and n_bytes <= MAX_RECORD_BYTES

    def _roll(self) -> None:
        self.rolls += 1
        self.place, self.capacity = DATA_START, self.pool.size
