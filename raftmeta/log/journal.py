"""The member's write-ahead log: records in segments, term and vote, one sync for all that is pending.

`append`, `truncate_from` and `set_hard_state` change what the owner sees at once; `sync` makes it durable: hard state first, then a cut,
then the records. Until it returns nothing that depends on them may leave the member. A cut never rewrites: the list of segments, replaced
as a whole, ends the old suffix and begins a new segment, so a crash leaves one suffix or the other. A failed write or sync is final: every
later call raises. One thread owns a journal. Memory is bounded by `tail_bytes` plus what is not synced; the rest is read back and checked.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, DiskError, DiskFailed, DiskFull
from raftmeta.log import recovery
from raftmeta.log.faults import Damage, HardStateCorrupt, JournalCorrupt, SnapshotCorrupt, WrongCluster
from raftmeta.log.hard_state import MAX_VOTE_BYTES, HardStateFile, SegmentRow
from raftmeta.log.records import DATA_START, Cursor, Header, Payload, Record, cluster_digest
from raftmeta.log.room import Room
from raftmeta.log.segment import Segment
from raftmeta.log.spares import InlineWorker, SparePool, Worker, segment_path, spare_path
from raftmeta.log.tail import Tail

__all__ = ["Damage", "DiskFailed", "DiskFull", "HardStateCorrupt", "Journal", "JournalCorrupt", "SnapshotCorrupt", "Tuning", "WrongCluster"]

SEGMENT_BYTES = 64 << 20
QUIET_S = 0.020  # a mark is written alone after this much quiet (D10)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What tests and the member's configuration set. The default worker prepares segments in line, in the same order every time."""

    cluster_id: str = ""
    tail_bytes: int = 32 << 20  # payload of recent records kept in memory for followers that keep up
    worker: Worker = field(default_factory=InlineWorker)
    clock: Callable[[], float] = time.perf_counter  # measures `sync`
    accept: Callable[[int], object] = lambda first_index: None  # asked before opening changes a file; raises where the rest does not fit


@dataclass(slots=True)
class _Cut:
    """A cut that the next sync makes: `keep` segments stay, the last of them ends at `seal` (None: where it ends already)."""

    keep: int
    seal: Cursor | None
    previous: Cursor  # what the new segment's first record follows


class _Fatal:
    """Any error inside is final, also a full disk: what is needed was allocated before, so its state is unknown."""

    def __init__(self, fail: Callable[[DiskError], DiskFailed]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DiskError):
            raise self._fail(error) from error


class Journal:
    """Made by `open`."""

    def __init__(self, hard: HardStateFile, segments: list[Segment], room: Room, tuning: Tuning) -> None:
        self._hard, self._segments, self._room, self._pool = hard, segments, room, room.pool
        self._disk, self._directory = room.pool.disk, room.pool.directory
        self._cluster = cluster_digest(tuning.cluster_id)
        self._clock = tuning.clock
        self._cut: _Cut | None = None
        self._failed: DiskFailed | None = None
        self._fatal = _Fatal(self._fail)
        self._quiet_since: float | None = None
        self.term = hard.state.term
        self.voted_for = hard.state.voted_for
        end = segments[-1].end if segments else Cursor(DATA_START, 0, 0, 0)
        self._tail = Tail(end.index, end.term, tuning.tail_bytes)
        self.synced_index = end.index

    @staticmethod
    def open(
        disk: Disk, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, reserve: bool = True, tuning: Tuning | None = None
    ) -> Journal:
        """Check every record, cut what was never acknowledged, and go on. Creates the journal in a directory that never held one.

        Raises JournalCorrupt, HardStateCorrupt or WrongCluster, having changed nothing. Without `reserve` no segment is held back.
        """
        tuning = tuning or Tuning()
        disk.make_directory(directory)
        findings = recovery.inspect(disk, directory, cluster_digest(tuning.cluster_id), segment_bytes)
        try:
            if findings.damage is not None:
                raise JournalCorrupt(findings.damage)
            tuning.accept(findings.segments[0].first_index if findings.segments else 1)
        except RaftmetaError:
            recovery.close(findings)
            raise
        return Journal._start(disk, directory, findings, (segment_bytes, reserve, tuning))

    @staticmethod
    def accept_loss(
        disk: Disk, directory: Path, index: int, *, segment_bytes: int = SEGMENT_BYTES, tuning: Tuning | None = None
    ) -> tuple[int, int]:
        """Give up the records from `index` on, which must be the damaged one that `open` named. Returns the range that is lost.

        Only for a single member whose operator said so. The damaged bytes stay on disk, as `lost-` files or behind the new end.
        """
        tuning = tuning or Tuning()
        findings = recovery.inspect(disk, directory, cluster_digest(tuning.cluster_id), segment_bytes)
        damage = findings.damage
        if damage is None or damage.index != index:
            recovery.close(findings)
            found = "no damage" if damage is None else f"damage from record {damage.index} on"
            raise RaftmetaError("bad_field", f"{directory}: expected damage from record {index} on, found {found}; nothing was changed")
        assert findings.hard is not None
        bad = findings.segments[-1]
        previous = bad.end
        if bad.last_index < bad.first_index:
            findings.segments.pop().close()
        else:
            bad.sync()
            bad.seal(bad.end)
        lost = [row.serial for row in findings.hard.state.segments[len(findings.segments) :]]
        pool = SparePool(disk, directory, segment_bytes, 0, tuning.worker, findings.next_serial, deque(findings.spares))
        journal = Journal(findings.hard, findings.segments, Room(pool, 0), tuning)
        journal._begin_segment(previous, len(findings.segments))
        for serial in lost:
            path = segment_path(directory, serial)
            if disk.exists(path):
                disk.rename(path, directory / f"lost-{path.name}")
        disk.sync_directory(directory)
        journal.close()
        return damage.index, damage.through

    @staticmethod
    def _start(disk: Disk, directory: Path, findings: recovery.Findings, options: tuple[int, bool, Tuning]) -> Journal:
        segment_bytes, reserve, tuning = options
        pool = SparePool(disk, directory, segment_bytes, 1 + reserve, tuning.worker, findings.next_serial, deque(findings.spares))
        hard = recovery.adopt(disk, directory, findings)
        journal = Journal(hard, findings.segments, Room(pool, int(reserve)), tuning)
        if not findings.segments:
            try:
                journal._room.claim(1)
            except DiskFull:
                hard.close()
                raise
            journal._begin_segment(Cursor(DATA_START, 0, 0, 0), 0)
        journal._replan()
        pool.top_up()
        return journal

    # what the owner sees

    @property
    def first_index(self) -> int:
        """Index of the first record, last_index + 1 when there is none."""
        return self._segments[0].first_index

    @property
    def last_index(self) -> int:
        return self._tail.last_index

    @property
    def last_term(self) -> int:
        return self._tail.last_term

    @property
    def bytes(self) -> int:
        """Size of headers and synced records; files are longer, each has its full segment allocated."""
        return sum(segment.end.offset for segment in self._segments)

    def bytes_after(self, index: int) -> int:
        """About how much of `bytes` holds records behind `index`: exact but for the segment in which it lies."""
        total = 0
        for segment in self._segments:
            records = segment.last_index - segment.first_index + 1
            behind = min(max(segment.last_index - index, 0), records)
            total += segment.end.offset * behind // records if records else 0
        return total

    def segment_end_before(self, n_bytes: int) -> int:
        """Last index of the newest segment behind which at least `n_bytes` lie; the index before the first record when there is none."""
        behind = 0
        for segment in reversed(self._segments):
            if behind >= n_bytes:
                return segment.last_index
            behind += segment.end.offset
        return self.first_index - 1

    def term_at(self, index: int) -> int | None:
        """Term of a record or of the one just before the first, None outside."""
        if not self.first_index - 1 <= index <= self.last_index:
            return None
        if index >= self._tail.first_index:
            return self._tail.term_at(index)
        return self._segment_of(index).term_at(index)

    def entries(self, lo: int, hi: int, max_bytes: int) -> list[Record]:
        """(index, term, payload) of lo <= index < hi: at least one, then no more than max_bytes of payload.

        Raises JournalCorrupt when what is read back does not check.
        """
        hi = min(hi, self.last_index + 1)
        if lo < self.first_index:
            raise ValueError(f"records {lo} to {hi - 1} were asked for, the journal begins at {self.first_index}")
        found: list[Record] = []
        while lo < hi and (not found or max_bytes > 0):
            if lo >= self._tail.first_index:
                part = self._tail.slice(lo, hi, max_bytes)
            else:
                segment = self._segment_of(lo)
                part = segment.read(lo, min(hi, self._tail.first_index, segment.last_index + 1), max_bytes)
            if found and len(part[0][2]) > max_bytes:
                break
            found += part
            max_bytes -= sum(len(record[2]) for record in part)
            lo = part[-1][0] + 1
        return found

    # changes, durable with the next sync

    def set_hard_state(self, term: int, voted_for: str) -> None:
        if term < self.term or len(voted_for.encode()) > MAX_VOTE_BYTES:
            raise ValueError(f"term {term} with vote {voted_for!r} cannot follow term {self.term}")
        self.term, self.voted_for = term, voted_for

    def has_room(self, n_bytes: int) -> bool:
        """Whether a record of that size fits without the reserve, which is for what a member must write even when its disk is full."""
        if self._failed is not None:
            self._check()
        if not self._pool.at_rest:
            with self._fatal:
                self._pool.top_up()
        return self._room.has_room(n_bytes, len(self._segments))

    def append(self, index: int, term: int, payload: Payload) -> None:
        """Raises DiskFull, having changed nothing, when no segment is left for it."""
        tail, room, size = self._tail, self._room, len(payload)
        if self._failed is not None:
            self._check()
        if index != tail.last_index + 1 or not tail.last_term <= term <= self.term:
            raise ValueError(
                f"record {index} of term {term} cannot follow record {tail.last_index} of term {tail.last_term} in term {self.term}"
            )
        if room.needs_segment(size):
            room.check_fit(size, len(self._segments))
            self._claim(room.rolls + 1)
        room.add(size)
        tail.append((index, term, payload))

    def truncate_from(self, index: int) -> None:
        """Forget the records from `index` on, because another leader's replace them. Raises DiskFull, having changed nothing."""
        self._check()
        if index > self.last_index:
            return
        if index < self.first_index:
            raise ValueError(f"a cut at {index} would reach below the first record, {self.first_index}")
        if index <= self.synced_index:
            self._claim(1)
            number = self._number_of(index)
            segment = self._segments[number]
            if index == segment.first_index:
                row = segment.row
                self._cut = _Cut(number, None, Cursor(DATA_START, index - 1, row.previous_term, row.previous_crc))
            else:
                with self._fatal:
                    seal = segment.locate(index - 1)
                self._cut = _Cut(number + 1, seal, seal)
            self.synced_index = index - 1
        last_term = self.term_at(index - 1)
        assert last_term is not None
        self._tail.cut(index, last_term)
        self._replan()

    def sync(self) -> float:
        """Make all of it durable and return the seconds it took, 0.0 when nothing was pending. Raises DiskFailed: end the process."""
        self._check()
        hard, state = self._hard, self._hard.state
        changed = (self.term, self.voted_for) != (state.term, state.voted_for)
        pending = self._tail.after(self.synced_index)
        if not (pending or changed or self._cut) and hard.settled:
            return 0.0
        started = self._clock()
        self._quiet_since = None
        with self._fatal:
            if self._cut is not None:
                self._make_cut(self._cut)
            elif changed or not hard.settled:
                hard.write(self.term, self.voted_for, state.segments)
            if pending:
                self._write(pending)
        self.synced_index = self.last_index
        self._tail.trim(self.synced_index)
        self._replan()
        return self._clock() - started

    def idle(self, now: float) -> float:
        """Do what waits for a quiet moment. Returns when to call again, on the clock of `now`, infinity when nothing waits."""
        self._check()
        with self._fatal:
            again = self._pool.tend(now)
            segment, hard = self._segments[-1], self._hard
            if self._cut is not None or not (segment.mark_due or not hard.settled):
                return again
            if self._quiet_since is None:
                self._quiet_since = now
            if now < self._quiet_since + QUIET_S:
                return min(again, self._quiet_since + QUIET_S)
            self._settle()
        return again

    # changes that are durable when they return

    def compact_through(self, index: int) -> int:
        """Delete whole segments whose every record is <= index; the caller has a durable, verified snapshot of it. Returns how many."""
        self._check()
        count = sum(1 for segment in self._segments[:-1] if segment.last_index <= min(index, self.synced_index))
        if count == 0 or self._cut is not None:
            return 0
        with self._fatal:
            self._list_segments(self._segments[count:], self._segments[:count])
            self._pool.retry()
        return count

    def reset(self, index: int, term: int) -> None:
        """Empty the log: a durable, verified snapshot stands in for everything up to (index, term). Raises DiskFull, nothing changed.

        A later term than the journal's becomes the journal's: the crash came between the snapshot and the sync of the term it came in.
        """
        self._check()
        self._claim(1)
        if term > self.term:
            self.term, self.voted_for = term, ""
        with self._fatal:
            self._begin_segment(Cursor(DATA_START, index, term, 0), 0)
            self._pool.retry()
        self._cut = None
        self.synced_index = index
        self._tail.reset(index, term)
        self._replan()

    def close(self) -> None:
        """Sync and mark what is pending, unless the disk failed, and let go of the files."""
        if self._failed is None:
            self.sync()
            with self._fatal:
                self._settle()
                self._pool.drain()
        for segment in self._segments:
            segment.close()
        self._hard.close()

    # inside

    def _check(self) -> None:
        if self._failed is not None:
            raise DiskFailed(f"the journal stopped at an earlier error: {self._failed.detail}", self._failed.errno)

    def _fail(self, cause: DiskError) -> DiskFailed:
        self._failed = DiskFailed(cause.detail, cause.errno)
        return self._failed

    def _number_of(self, index: int) -> int:
        return bisect.bisect_right(self._segments, index, key=lambda segment: segment.first_index) - 1

    def _segment_of(self, index: int) -> Segment:
        return self._segments[max(0, self._number_of(index))]

    def _claim(self, count: int) -> None:
        """See that `count` spares are ready, or raise DiskFull, which is no fault: nothing was written."""
        try:
            self._room.claim(count)
        except DiskFailed as cause:
            self._failed = cause
            raise

    def _replan(self) -> None:
        active = self._segments[-1]
        self._room.plan(active.end.offset, active.capacity, self._cut is not None, self._tail.after(self.synced_index))

    def _write(self, pending: list[Record]) -> None:
        done = 0
        while True:
            segment = self._segments[-1]
            if segment.mark_due:
                segment.write_mark()
            done = segment.add(pending, done)
            segment.sync()
            if done == len(pending):
                return
            segment.seal(segment.end)
            self._begin_segment(segment.end, len(self._segments))

    def _make_cut(self, cut: _Cut) -> None:
        if cut.seal is not None:
            self._segments[cut.keep - 1].seal(cut.seal)
        self._begin_segment(cut.previous, cut.keep)
        self._cut = None

    def _begin_segment(self, previous: Cursor, keep: int) -> None:
        """Put a new, empty segment behind the first `keep`; those after them go."""
        if not self._pool.wait(1):
            raise self._pool.full or DiskFull(f"{self._directory}: no spare segment")
        serial = self._pool.take()
        header = Header(self._cluster, serial, previous.index + 1, previous.term, previous.crc, self._pool.size)
        segment = Segment.create(self._disk, self._directory, spare_path(self._directory, serial), header)
        self._list_segments([*self._segments[:keep], segment], self._segments[keep:])
        self._pool.top_up()

    def _list_segments(self, segments: list[Segment], dropped: list[Segment]) -> None:
        """The moment at which the set of segments changes. Files go only after the list without them is in both slots."""
        rows: tuple[SegmentRow, ...] = tuple(segment.row for segment in segments)
        self._hard.write_settled(self.term, self.voted_for, rows)
        self._segments = segments
        for segment in dropped:
            segment.close()
            self._pool.discard(segment.path)

    def _settle(self) -> None:
        """The mark of the last records and the second slot of the hard state, without waiting for the next sync."""
        segment = self._segments[-1]
        if segment.mark_due:
            segment.write_mark()
            segment.sync()
        if not self._hard.settled:
            self._hard.mirror()
        self._quiet_since = None
