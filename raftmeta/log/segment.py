"""One segment of the journal in use: writing, marking, sealing, checking, reading back.

The layout stands in `records`. What must stay true: a mark speaks only of records synced before it was written; nothing behind the end of
the active segment can ever chain to it; every read checks the chain again from a checkpoint, and damage raises JournalCorrupt. A segment
knows its own offsets and terms and nothing of its neighbours.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

from raftmeta.durable import Disk, File
from raftmeta.log.faults import Damage, JournalCorrupt, WrongCluster
from raftmeta.log.hard_state import SegmentRow
from raftmeta.log.records import (
    BLOCK_BYTES,
    CHECKPOINT_BYTES,
    DATA_START,
    MARK_BYTES,
    RECORD_HEAD_BYTES,
    Cursor,
    Header,
    Known,
    Mark,
    Record,
    Scanner,
    decode_header,
    decode_mark,
    encode_header,
    encode_mark,
    encode_records,
)
from raftmeta.log.spares import segment_path

_COPY_BYTES = 1 << 20
_ZEROS = bytes(_COPY_BYTES)


class Segment:
    """One segment in use. The last of a journal is active; all others are sealed and only read."""

    def __init__(self, disk: Disk, directory: Path, row: SegmentRow, capacity: int) -> None:
        self.disk = disk
        self.path = segment_path(directory, row.serial)
        self.row = row
        self.capacity = capacity
        start = Cursor(DATA_START, row.first_index - 1, row.previous_term, row.previous_crc)
        self.end = start  # behind the last record written
        self.mark = Mark(1, start)  # the newest
        self._synced = start
        self._file: File | None = None
        self._checkpoints = [start]  # at most CHECKPOINT_BYTES plus one record apart
        self._runs: list[tuple[int, int]] = []  # (first index, term) of each run of equal terms

    @property
    def first_index(self) -> int:
        return self.row.first_index

    @property
    def last_index(self) -> int:
        return self.end.index

    @property
    def marked(self) -> Cursor:
        """What the newest mark says of the records."""
        return self.mark.cursor

    @property
    def mark_due(self) -> bool:
        """Whether records are synced that no mark speaks of."""
        return self.marked.offset != self._synced.offset

    @staticmethod
    def create(disk: Disk, directory: Path, spare: Path, header: Header, known: Known) -> Segment:
        """Turn a spare into a segment that is durable under its name but in no list yet."""
        row = SegmentRow(header.serial, header.first_index, header.previous_term, header.previous_crc)
        segment = Segment(disk, directory, row, header.capacity)
        file = disk.open(spare)
        image = encode_header(header)
        for sequence in (0, 1):
            segment.mark = Mark(sequence, segment.end, segment._bounded(known))
            image += encode_mark(segment.mark).ljust(BLOCK_BYTES, b"\0")
        disk.pwrite(file, image, 0)
        disk.fsync(file)
        disk.close(file)
        disk.rename(spare, segment.path)
        disk.sync_directory(directory)
        return segment

    def add(self, records: Sequence[Record], start: int) -> int:
        """Write records from number `start` on as far as they fit, in one write, and return the number of the first that did not."""
        done = encode_records(records, start, self.end, self.capacity, self._checkpoints[-1].offset + CHECKPOINT_BYTES)
        if done.taken:
            self.disk.pwrite(self.file(), done.data, self.end.offset)
            self.end = done.end
            self._checkpoints += done.checkpoints
            self._runs += done.runs
        return start + done.taken

    def knows(self, known: Known) -> bool:
        """Whether the newest mark says so much. Of a segment without records nothing more is said: see `renew`."""
        noted = self.mark.known
        return self.end.offset == DATA_START or (noted.promised == known.promised and noted.committed >= self._bounded(known).committed)

    def write_mark(self, known: Known) -> None:
        """Write the mark of what the last sync covered. It becomes durable with the next sync."""
        self.mark = Mark(self.mark.sequence + 1, self._synced, self._bounded(known))
        self.disk.pwrite(self.file(), encode_mark(self.mark), BLOCK_BYTES * (1 + self.mark.sequence % 2))

    def note_end(self) -> SegmentRow:
        """The row of the list, with how far this open segment is synced."""
        return self.row_to(self._synced) if self._synced.offset > DATA_START else self.row

    def row_to(self, end: Cursor) -> SegmentRow:
        """The row, which says from now on that this open segment reaches so far at least."""
        self.row = SegmentRow(*_place(self.row), False, end.offset, end.index, end.term, end.crc)
        return self.row

    def retreat(self, end: Cursor, known: Known) -> None:
        """Clear the records behind `end`. A crash leaves all of them or none: the head of the first goes before the rest."""
        behind = self.end.offset
        self._forget(end)
        self.write_mark(known)
        self.sync()
        for size in (RECORD_HEAD_BYTES, behind - end.offset):
            self.disk.pwrite(self.file(), bytes(size), end.offset)
            self.disk.fdatasync(self.file())

    def sync(self) -> None:
        self.disk.fdatasync(self.file())
        self._synced = self.end

    def seal(self, end: Cursor) -> None:
        """Let the segment end at `end`: what lies behind no longer counts. Durable once the list of segments says so."""
        self.row = SegmentRow(*_place(self.row), True, end.offset, end.index, end.term, end.crc)
        self._forget(end)
        self.mark = self.mark._replace(cursor=end)
        self.close()

    def term_at(self, index: int) -> int:
        """Term of a record of this segment, or of the one before its first."""
        at = bisect.bisect_right(self._runs, index, key=lambda run: run[0]) - 1
        return self._runs[at][1] if at >= 0 else self.row.previous_term

    def read(self, first: int, stop: int, max_bytes: int) -> list[Record]:
        """Records first <= index < stop of this segment, at least one, then no more than `max_bytes` of payload."""
        found: list[Record] = []
        try:
            scanner = Scanner(self.disk, self.file(), self._checkpoint(first - 1), self.end.offset)
            for record in scanner:
                if record[0] < first:
                    continue
                max_bytes -= len(record[2])
                if found and max_bytes < 0:
                    return found
                found.append(record)
                if record[0] == stop - 1:
                    return found
        finally:
            self._leave()
        raise JournalCorrupt(self.damage(scanner.cursor, scanner.broken, stop - 1))

    def locate(self, index: int) -> Cursor:
        """The place behind record `index` of this segment, or before its first."""
        try:
            scanner = Scanner(self.disk, self.file(), self._checkpoint(index), self.end.offset)
            records = iter(scanner)
            while scanner.cursor.index < index and next(records, None):
                pass
        finally:
            self._leave()
        if scanner.cursor.index != index:
            raise JournalCorrupt(self.damage(scanner.cursor, scanner.broken, index))
        return scanner.cursor

    def check(self, promised: int) -> Damage | None:
        """Read everything once. Sets the end, the marks and what reading needs; returns the first damage at or below the promised end."""
        capacity = self.disk.size(self.file())
        if capacity < DATA_START:
            return self.damage(self.end, f"the end of the file at {capacity}", promised)
        row = self.row
        scanner = Scanner(self.disk, self.file(), self.end, row.end if row.sealed else capacity)
        marks = [mark for mark in map(self._read_mark, (0, 1)) if mark]
        self.mark = max(marks, key=lambda mark: mark.sequence, default=Mark(0, self.end))
        awaited = {self.marked, Cursor(row.end, row.last_index, row.last_term, row.last_crc) if row.end else self.end} - {self.end}
        for _ in scanner:
            self._learn(scanner.cursor)
            awaited.discard(scanner.cursor)
        self.capacity = capacity
        if row.sealed:
            whole = Cursor(row.end, row.last_index, row.last_term, row.last_crc)
            return None if self.end == whole else self.damage(self.end, scanner.broken or "another record", row.last_index)
        if not marks:
            return self.damage(self.end, "two damaged marks", promised)
        self._synced = self.marked
        missing = max(awaited, key=lambda cursor: cursor.index, default=None)
        return self.damage(self.end, scanner.broken or "no record that ends there", missing.index) if missing else None

    def check_header(self, cluster: bytes) -> str:
        """What is wrong with the header, "" when it is the one that the list of segments names."""
        header = decode_header(self.disk.pread(self.file(), BLOCK_BYTES, 0))
        if isinstance(header, str):
            return f"a header with {header}"
        if header.cluster != cluster:
            raise WrongCluster(self.path, cluster.hex(), header.cluster.hex())
        row = self.row
        if header[1:5] != (row.serial, row.first_index, row.previous_term, row.previous_crc):
            return f"the header of segment {header.serial} from record {header.first_index}"
        return ""

    def newest_mark(self) -> Mark | None:
        """Read from the disk; None when both are damaged."""
        return max((mark for mark in map(self._read_mark, (0, 1)) if mark), key=lambda mark: mark.sequence, default=None)

    def renew(self, known: Known) -> None:
        """After a restart: make durable what was read and clear what was not, so that nothing behind the end can ever chain again.

        The records above the mark are written once more, not only synced: after a failed sync the kernel shows them as read although the
        disk never got them.
        """
        file = self.file()
        for offset in range(self.marked.offset, self.end.offset, _COPY_BYTES):
            size = min(_COPY_BYTES, self.end.offset - offset)
            self.disk.pwrite(file, self.disk.pread(file, size, offset), offset)
        for offset in range(self.end.offset, self.capacity, _COPY_BYTES):
            data = self.disk.pread(file, min(_COPY_BYTES, self.capacity - offset), offset)
            if data == _ZEROS[: len(data)]:
                continue
            for at in range(0, len(data), BLOCK_BYTES):
                block = data[at : at + BLOCK_BYTES]
                if block != _ZEROS[: len(block)]:
                    self.disk.pwrite(file, _ZEROS[: len(block)], offset + at)
        self.sync()
        if self.end.offset > DATA_START:  # one that says nothing would stand beside the first that does, and outlive it under a zeroed tail
            self.write_mark(known)
            self.sync()

    def damage(self, cursor: Cursor, found: str, through: int = 0) -> Damage:
        index = cursor.index + 1
        return Damage(self.path, cursor.offset, index, cursor.term, max(index, through), f"record {index}", found)

    def file(self) -> File:
        if self._file is None:
            self._file = self.disk.open(self.path)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self.disk.close(self._file)
            self._file = None

    def _forget(self, end: Cursor) -> None:
        """What this object knows of records behind `end`, which become durable no more or are durable no longer."""
        self.end = self._synced = end
        self._checkpoints = [cursor for cursor in self._checkpoints if cursor.index <= end.index]
        self._runs = [run for run in self._runs if run[0] <= end.index]

    def _learn(self, cursor: Cursor) -> None:
        """Take in a record that was read."""
        if self.end.offset - self._checkpoints[-1].offset >= CHECKPOINT_BYTES:
            self._checkpoints.append(self.end)
        if cursor.term != self.end.term:
            self._runs.append((cursor.index, cursor.term))
        self.end = cursor

    def _checkpoint(self, index: int) -> Cursor:
        return self._checkpoints[bisect.bisect_right(self._checkpoints, index, key=lambda cursor: cursor.index) - 1]

    def _bounded(self, known: Known) -> Known:
        """As far as a mark may say it now."""
        return Known(known.promised, min(known.committed, self._synced.index))

    def _leave(self) -> None:
        """Sealed segments are many and read seldom: they hold no file open."""
        if self.row.sealed:
            self.close()

    def _read_mark(self, slot: int) -> Mark | None:
        return decode_mark(self.disk.pread(self.file(), MARK_BYTES, BLOCK_BYTES * (1 + slot)))


def _place(row: SegmentRow) -> tuple[int, int, int, int]:
    """What names the segment and chains it to the one before."""
    return row.serial, row.first_index, row.previous_term, row.previous_crc
