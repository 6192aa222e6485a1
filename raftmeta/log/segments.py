"""The segments of one journal in order, and the moments at which their set changes.

The list of them lies in the hard state, so it is written with the member's term and vote (its promise). A new segment is durable before
the list names it, and a file goes only once no slot names it; a cut replaces the list as a whole, or clears the head of its first record
before the rest, so that a crash leaves one suffix or the other. All that is changed here is durable when the method returns, and any error
is final: what is needed was allocated before. Knows nothing of records that wait for a sync.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from raftmeta.durable import DiskFull
from raftmeta.log.hard_state import HardStateFile, Promise
from raftmeta.log.records import DATA_START, Cursor, Header, Known, Record
from raftmeta.log.segment import Segment
from raftmeta.log.spares import SparePool, spare_path

IN_PLACE_BYTES = 1 << 20  # of records that a cut clears where they are; for more a new segment costs less than writing zeros


@dataclass(slots=True)
class Cut:
    """A cut to be made: `keep` segments stay, the last of them ends at `seal` (None: where it ends already)."""

    keep: int
    seal: Cursor | None
    previous: Cursor  # what the next record follows
    in_place: bool = False  # the last segment goes on behind `previous`; otherwise a new one does


class SegmentList:
    def __init__(self, hard: HardStateFile, segments: list[Segment], pool: SparePool, cluster: bytes) -> None:
        self.hard, self._pool, self._cluster = hard, pool, cluster
        self.all = segments  # in order of index; the last one is active, empty only until the first `begin`
        self.committed = segments[-1].mark.known.committed if segments else 0  # last index that is known to be; goes with the marks

    def number_of(self, index: int) -> int:
        return bisect.bisect_right(self.all, index, key=lambda segment: segment.first_index) - 1

    def of(self, index: int) -> Segment:
        """The segment that holds record `index`, or whose first record follows it."""
        return self.all[max(0, self.number_of(index))]

    # records

    def write(self, records: list[Record], promise: Promise) -> None:
        """Write and sync them, in as many segments as it takes."""
        done = 0
        while True:
            segment = self.all[-1]
            if segment.mark_due:
                segment.write_mark(self._known)
            done = segment.add(records, done)
            segment.sync()
            if done == len(records):
                return
            segment.seal(segment.end)
            self.begin(segment.end, len(self.all), promise)

    @property
    def settled(self) -> bool:
        """Whether marks and hard state know of each other what they should."""
        segment = self.all[-1]
        return self.hard.settled and not segment.mark_due and segment.knows(self._known)

    def settle(self) -> None:
        """Without waiting for the next sync: the second slot of the hard state, how far the records go in it, and the mark that knows both.

        In this order, so that each speaks only of what is durable; then neither can be an older copy of its file without the other telling.
        """
        segment = self.all[-1]
        row = segment.note_end()
        if not self.hard.settled or row != self.hard.state.segments[-1]:
            self.hard.write(self.hard.state.promise, (*self.hard.state.segments[:-1], row))
        if segment.mark_due or not segment.knows(self._known):
            segment.write_mark(self._known)
            segment.sync()

    @property
    def _known(self) -> Known:
        return Known(self.hard.since, self.committed)

    # cutting

    def plan_cut(self, index: int) -> Cut:
        """How to forget the records from `index` on, which must be there. Only reads."""
        number = self.number_of(index)
        segment = self.all[number]
        if index == segment.first_index:
            row = segment.row
            return Cut(number, None, Cursor(DATA_START, index - 1, row.previous_term, row.previous_crc))
        seal = segment.locate(index - 1)
        in_place = number == len(self.all) - 1 and segment.end.offset - seal.offset <= IN_PLACE_BYTES
        return Cut(number + 1, seal, seal, in_place)

    def make(self, cut: Cut, promise: Promise) -> None:
        if cut.in_place:
            segment = self.all[-1]
            row = segment.row_to(cut.previous)
            self.hard.write_settled(promise, (*self.hard.state.segments[:-1], row))  # before the mark: what goes is awaited by neither
            segment.retreat(cut.previous, self._known)
            return
        if cut.seal is not None:
            self.all[cut.keep - 1].seal(cut.seal)
        self.begin(cut.previous, cut.keep, promise)

    # the list

    def begin(self, previous: Cursor, keep: int, promise: Promise) -> None:
        """Put a new, empty segment behind the first `keep`; those after them go."""
        pool = self._pool
        if not pool.wait(1):
            raise pool.full or DiskFull(f"{pool.directory}: no spare segment")
        serial = pool.take()
        header = Header(self._cluster, serial, previous.index + 1, previous.term, previous.crc, pool.size)
        segment = Segment.create(pool.disk, pool.directory, spare_path(pool.directory, serial), header, self._known)
        self._list([*self.all[:keep], segment], self.all[keep:], promise)
        pool.top_up()

    def drop_first(self, count: int, promise: Promise) -> None:
        self._list(self.all[count:], self.all[:count], promise)

    def _list(self, segments: list[Segment], dropped: list[Segment], promise: Promise) -> None:
        """The moment at which the set of segments changes. Files go only after the list without them is in both slots."""
        self.hard.write_settled(promise, tuple(segment.row for segment in segments))
        self.all = segments
        for segment in dropped:
            segment.close()
            self._pool.discard(segment.path)

    def close(self) -> None:
        for segment in self.all:
            segment.close()
        self.hard.close()
