"""The member's write-ahead log: records in segments, term and vote, one sync for all that is pending.

`append`, `truncate_from` and `set_hard_state` change what the owner sees at once; `sync` makes it durable: hard state first, then a cut,
then the records. Until it returns nothing that depends on them may leave the member. How the segments on the disk change is segments.py's.
A failed write or sync is final: every later call raises. One thread owns a journal. Memory is bounded by `tail_bytes` plus what is not
synced; the rest is read back and checked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, DiskError, DiskFailed, DiskFull
from raftmeta.log import recovery
from raftmeta.log.faults import Damage, HardStateCorrupt, JournalCorrupt, SnapshotCorrupt, WrongCluster, WrongMember
from raftmeta.log.hard_state import MAX_VOTE_BYTES, NOBODY, Owner, Promise
from raftmeta.log.records import DATA_START, Cursor, Payload, Record, cluster_digest
from raftmeta.log.room import Room
from raftmeta.log.segments import Cut, SegmentList
from raftmeta.log.spares import InlineWorker, SparePool, Worker
from raftmeta.log.tail import Tail

__all__ = [
    "Damage",
    "DiskFailed",
    "DiskFull",
    "HardStateCorrupt",
    "Journal",
    "JournalCorrupt",
    "SnapshotCorrupt",
    "Tuning",
    "WrongCluster",
    "WrongMember",
]

SEGMENT_BYTES = 64 << 20
QUIET_S = 0.020  # a mark is written alone after this much quiet (D10)
BEHIND_S = 1.0  # without such quiet, the hard state learns this often how far the records go


class Reach(NamedTuple):
    """What a journal holds, before anything is changed in it."""

    first_index: int = 1
    last_index: int = 0
    awaited: tuple[int, int] = (0, 0)  # (index, term) of the snapshot that takes its place


@dataclass(frozen=True, slots=True)
class Tuning:
    """What tests and the member's configuration set. The default worker prepares segments in line, in the same order every time."""

    owner: Owner = NOBODY
    joining: bool = False  # of a new one: it has no vote yet (hard_state.py)
    tail_bytes: int = 32 << 20  # payload of recent records kept in memory for followers that keep up
    worker: Worker = field(default_factory=InlineWorker)
    clock: Callable[[], float] = time.perf_counter  # measures `sync`
    accept: Callable[[Reach], object] = lambda reach: None  # asked before opening changes a file; raises where the rest does not fit


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

    def __init__(self, segments: SegmentList, room: Room, tuning: Tuning) -> None:
        self._segments, self._hard, self._room, self._pool = segments, segments.hard, room, room.pool
        self._clock = tuning.clock
        self._cut: Cut | None = None
        self._failed: DiskFailed | None = None
        self._fatal = _Fatal(self._fail)
        self._quiet_since: float | None = None
        self._behind_since: float | None = None
        promise = self._hard.state.promise
        self.term, self.voted_for = promise.term, promise.voted_for
        self.joining, self.awaited = promise.joining, promise.awaited  # both for `boot` and `opening` to look at
        end = segments.all[-1].end
        self._tail = Tail(end.index, end.term, tuning.tail_bytes)
        self.synced_index = end.index
        self._replan()

    @staticmethod
    def open(
        disk: Disk, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, reserve: bool = True, tuning: Tuning | None = None
    ) -> Journal:
        """Check every record, cut what was never acknowledged, and go on. Creates the journal in a directory that never held one.

        Raises JournalCorrupt, HardStateCorrupt, WrongMember or WrongCluster, having changed nothing. Without `reserve` no segment is held
        back.
        """
        tuning = tuning or Tuning()
        disk.make_directory(directory)
        findings = recovery.inspect(disk, directory, tuning.owner, segment_bytes)
        try:
            if findings.damage is not None:
                raise JournalCorrupt(findings.damage)
            tuning.accept(_reach(findings))
        except RaftmetaError:
            recovery.close(findings)
            raise
        pool = SparePool(disk, directory, segment_bytes, 1 + reserve, tuning.worker, findings.next_serial, deque(findings.spares))
        room = Room(pool, int(reserve))
        hard = recovery.adopt(disk, directory, findings, tuning.owner, Promise(joining=tuning.joining))
        segments = SegmentList(hard, findings.segments, pool, cluster_digest(tuning.owner.cluster_id))
        if not segments.all:
            try:
                room.claim(1)
            except DiskFull:
                segments.close()
                raise
            segments.begin(Cursor(DATA_START, 0, 0, 0), 0, hard.state.promise)
        journal = Journal(segments, room, tuning)
        pool.top_up()
        return journal

    # what the owner sees

    @property
    def first_index(self) -> int:
        """Index of the first record, last_index + 1 when there is none."""
        return self._segments.all[0].first_index

    @property
    def last_index(self) -> int:
        return self._tail.last_index

    @property
    def last_term(self) -> int:
        return self._tail.last_term

    @property
    def bytes(self) -> int:
        """Size of headers and synced records; files are longer, each has its full segment allocated."""
        return sum(segment.end.offset for segment in self._segments.all)

    @property
    def unused_bytes(self) -> int:
        """What the disk gives for segments that were ended before they were full."""
        return sum(segment.capacity - segment.end.offset for segment in self._segments.all[:-1])

    def bytes_after(self, index: int) -> int:
        """About how much of `bytes` holds records behind `index`: exact but for the segment in which it lies."""
        total = 0
        for segment in self._segments.all:
            records = segment.last_index - segment.first_index + 1
            behind = min(max(segment.last_index - index, 0), records)
            total += segment.end.offset * behind // records if records else 0
        return total

    def segment_end_before(self, n_bytes: int) -> int:
        """Last index of the newest segment behind which at least `n_bytes` lie; the index before the first record when there is none."""
        behind = 0
        for segment in reversed(self._segments.all):
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
        return self._segments.of(index).term_at(index)

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
                segment = self._segments.of(lo)
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

    @property
    def committed_index(self) -> int:
        """Last index known to be committed, now or in an earlier life; it may be behind. No leader may contradict what is up to here."""
        return self._segments.committed

    def note_committed(self, index: int) -> None:
        """Goes to the disk with the next mark."""
        self._segments.committed = max(self._segments.committed, min(index, self.last_index))

    def has_room(self, n_bytes: int) -> bool:
        """Whether a record of that size fits without the reserve, which is for what a member must write even when its disk is full."""
        self._look_at_spares()
        return self._room.has_room(n_bytes, len(self._segments.all))

    def has_reserve(self, n_bytes: int) -> bool:
        """Whether a record of that size that must be written fits; the reserve is for such."""
        self._look_at_spares()
        return self._room.has_reserve(n_bytes, len(self._segments.all))

    def _look_at_spares(self) -> None:
        if self._failed is not None:
            self._check()
        if not self._pool.at_rest:
            with self._fatal:
                self._pool.top_up()

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
            room.check_fit(size, len(self._segments.all))
            self._claim(room.rolls + 1)
        room.add(size)
        tail.append((index, term, payload))

    def truncate_from(self, index: int) -> None:
        """Forget the records from `index` on, because another leader's replace them. Raises DiskFull, having changed nothing."""
        self._check()
        if index > self.last_index:
            return
        if index < self.first_index or index <= self.committed_index:
            raise ValueError(f"a cut at {index} would reach below record {self.first_index}, or what is committed, {self.committed_index}")
        if index <= self.synced_index:
            with self._fatal:
                cut = self._segments.plan_cut(index)
            if not cut.in_place:
                self._claim(1)
            self._cut = cut
            self.synced_index = index - 1
        last_term = self.term_at(index - 1)
        assert last_term is not None
        self._tail.cut(index, last_term)
        self._replan()

    def sync(self) -> float:
        """Make all of it durable and return the seconds it took, 0.0 when nothing was pending. Raises DiskFailed: end the process."""
        self._check()
        hard, state = self._hard, self._hard.state
        promise = self._promise
        changed = promise != state.promise
        pending = self._tail.after(self.synced_index)
        if not (pending or changed or self._cut) and hard.settled:
            return 0.0
        started = self._clock()
        self._quiet_since = None
        with self._fatal:
            if self._cut is not None:
                self._segments.make(self._cut, promise)
                self._cut = None
            elif changed or not hard.settled:
                hard.write(promise, state.segments)
            if pending:
                self._segments.write(pending, promise)
        self.synced_index = self.last_index
        self._tail.trim(self.synced_index)
        self._replan()
        return self._clock() - started

    def idle(self, now: float) -> float:
        """Do what waits for a quiet moment. Returns when to call again, on the clock of `now`, infinity when nothing waits."""
        self._check()
        with self._fatal:
            again = self._pool.tend(now)
            if self._cut is not None or self._segments.settled:
                return again
            self._quiet_since = now if self._quiet_since is None else self._quiet_since
            self._behind_since = now if self._behind_since is None else self._behind_since
            due = min(self._quiet_since + QUIET_S, self._behind_since + BEHIND_S)
            if now < due:
                return min(again, due)
            self._settle()
        return again

    # changes that are durable when they return

    def compact_through(self, index: int) -> int:
        """Delete whole segments whose every record is <= index; the caller has a durable, verified snapshot of it. Returns how many."""
        self._check()
        count = sum(1 for segment in self._segments.all[:-1] if segment.last_index <= min(index, self.synced_index))
        if count == 0 or self._cut is not None:
            return 0
        with self._fatal:
            self._segments.drop_first(count, self._promise)
            self._pool.retry()
        return count

    def grant_vote(self) -> None:
        """This member may vote from here on: it holds again what it may have acknowledged, or nobody ever acknowledged anything."""
        self.joining = False
        self.sync()

    def await_snapshot(self, index: int, term: int) -> None:
        """Promise that a verified snapshot of (index, term) may take the journal's place: no other one that reaches beyond it may."""
        self.awaited = index, term
        self.sync()

    def reset(self, index: int, term: int) -> None:
        """Empty the log: a durable, verified snapshot stands in for everything up to (index, term). Raises DiskFull, nothing changed.

        A later term than the journal's becomes the journal's: the crash came between the snapshot and the sync of the term it came in.
        """
        self._check()
        self._claim(1)
        if term > self.term:
            self.term, self.voted_for = term, ""
        self.awaited = (0, 0)
        self._segments.committed = index
        with self._fatal:
            self._segments.begin(Cursor(DATA_START, index, term, 0), 0, self._promise)
            self._pool.retry()
        self._cut = None
        self.synced_index = index
        self._tail.reset(index, term)
        self._replan()

    def close(self, *, sync: bool = True) -> None:
        """Sync and mark what is pending, unless the disk failed or the owner did, and let go of the files."""
        if sync and self._failed is None:
            self.sync()
            with self._fatal:
                self._settle()
                self._pool.drain()
        self._segments.close()

    # inside

    @property
    def _promise(self) -> Promise:
        return Promise(self.term, self.voted_for, self.joining, self.awaited)

    def _check(self) -> None:
        if self._failed is not None:
            raise DiskFailed(f"the journal stopped at an earlier error: {self._failed.detail}", self._failed.errno)

    def _fail(self, cause: DiskError) -> DiskFailed:
        self._failed = DiskFailed(cause.detail, cause.errno)
        return self._failed

    def _claim(self, count: int) -> None:
        """See that `count` spares are ready, or raise DiskFull, which is no fault: nothing was written."""
        try:
            self._room.claim(count)
        except DiskFailed as cause:
            self._failed = cause
            raise

    def _replan(self) -> None:
        active, cut = self._segments.all[-1], self._cut
        in_place = cut is not None and cut.in_place
        end = cut.previous.offset if cut is not None and in_place else active.end.offset
        self._room.plan(end, active.capacity, cut is not None and not in_place, self._tail.after(self.synced_index))

    def _settle(self) -> None:
        self._segments.settle()
        self._quiet_since = self._behind_since = None


def _reach(findings: recovery.Findings) -> Reach:
    if findings.hard is None or not findings.segments:
        return Reach()
    return Reach(findings.segments[0].first_index, findings.segments[-1].last_index, findings.hard.state.promise.awaited)
