"""D4: a full disk is known before anything is written, stops proposals and not the member, and is left when space is freed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import TypeVar

import pytest

from raftmeta.durable import DiskFailed, DiskFull, OsDisk
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.spares import RETRY_S, Handle
from tests.support.journals import DIRECTORY, SEGMENT_BYTES, everything, fill, open_journal, segment_paths, written
from tests.support.memory_disk import MemoryDisk

T = TypeVar("T")


def spares(disk: MemoryDisk) -> list[str]:
    return [name for name in disk.listdir(DIRECTORY) if name.startswith("spare-")]


def fill_up(journal: Journal) -> int:
    """Append and sync small records until the journal refuses one; returns the last index."""
    while True:
        try:
            fill(journal, journal.last_index + 1, journal.last_index + 1, term=max(1, journal.term))
        except DiskFull:
            return journal.last_index
        journal.sync()


def test_the_next_segment_and_a_reserve_are_ready_before_the_first_record() -> None:
    disk = MemoryDisk()
    open_journal(disk)
    assert len(spares(disk)) == 2
    disk.crash(keep=0.0)
    assert len(spares(disk)) == 2
    other = MemoryDisk()
    open_journal(other, reserve=False)
    assert len(spares(other)) == 1


def test_a_spare_is_taken_without_needing_room_on_the_disk() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    disk.capacity_bytes = disk.used_bytes()
    last = fill_up(journal)
    assert last > 66  # two spares took 33 records each
    assert not spares(disk)
    assert everything(journal)[-1][0] == last


def test_proposals_are_refused_while_the_reserve_is_left_for_what_must_be_written() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    disk.capacity_bytes = disk.used_bytes()
    while journal.has_room(100):
        fill(journal, journal.last_index + 1, journal.last_index + 1)
        journal.sync()
    assert len(spares(disk)) == 1
    before = journal.last_index
    assert fill_up(journal) >= before + 33


def test_without_a_reserve_the_room_ends_with_the_last_segment() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk, reserve=False)
    disk.capacity_bytes = disk.used_bytes()
    fill(journal, 1, 1)
    while journal.has_room(100):
        fill(journal, journal.last_index + 1, journal.last_index + 1)
        journal.sync()
    with pytest.raises(DiskFull):
        fill(journal, journal.last_index + 1, journal.last_index + 1)


def test_has_room_counts_what_waits_for_the_sync() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    disk.capacity_bytes = disk.used_bytes()
    index = journal.last_index
    while journal.has_room(100):
        index += 1
        fill(journal, index, index)
    journal.sync()
    assert journal.last_index == index
    assert not journal.has_room(100)


def test_a_full_disk_is_refused_before_anything_is_written_and_the_rest_goes_on() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    disk.capacity_bytes = disk.used_bytes()
    fill_up(journal)
    journal.idle(0.0)
    journal.idle(0.5)
    records, calls = everything(journal), [call for call, _ in disk.log]
    with pytest.raises(DiskFull) as caught:
        fill(journal, journal.last_index + 1, journal.last_index + 1)
    assert caught.value.code == "disk_full"
    assert "no room for another segment" in caught.value.detail
    written_since = [call for call, _ in list(disk.log)[len(calls) :] if call == "pwrite"]
    assert not written_since
    assert everything(journal) == records
    with pytest.raises(DiskFull):
        journal.truncate_from(5)
    with pytest.raises(DiskFull):
        journal.reset(500, 1)
    assert everything(journal) == records
    journal.set_hard_state(9, "me")
    journal.sync()
    assert (journal.term, everything(journal)) == (9, records)


def test_a_member_restarts_on_a_full_disk_and_reads_everything() -> None:
    for crash in (True, False):
        disk = MemoryDisk()
        journal = written(disk)
        disk.capacity_bytes = disk.used_bytes()
        last = fill_up(journal)
        records = everything(journal)
        if crash:
            disk.crash(keep=0.0)
        else:
            journal.close()
        journal = open_journal(disk)
        assert (journal.last_index, everything(journal)) == (last, records)
        assert not journal.has_room(100)


def test_a_full_disk_is_left_when_space_is_freed() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    full = disk.capacity_bytes = disk.used_bytes()
    fill_up(journal)
    assert journal.idle(0.0) < inf
    assert journal.idle(RETRY_S) == 2 * RETRY_S
    assert not journal.has_room(100)
    disk.capacity_bytes = full + 3 * SEGMENT_BYTES
    journal.idle(1.5 * RETRY_S)
    assert not journal.has_room(100)
    journal.idle(2 * RETRY_S)
    assert journal.has_room(100)
    assert len(spares(disk)) == 2
    assert journal.idle(3 * RETRY_S) == inf


def test_a_compaction_frees_what_the_next_segments_need() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    disk.capacity_bytes = disk.used_bytes()
    last = fill_up(journal)
    assert journal.compact_through(last) >= 2
    assert journal.has_room(100)
    fill(journal, last + 1, last + 40)
    journal.sync()


def test_disk_full_at_any_allocation_loses_nothing_and_is_raised_by_no_sync() -> None:
    for skip in range(12):
        for call in ("preallocate", "create", "pwrite"):
            disk = MemoryDisk(skip)
            journal = written(disk)
            before = journal.last_index
            disk.fail(call, errno.ENOSPC, name=".tmp", skip=skip, times=1000)
            last = fill_up(journal) if skip < 6 else before
            records = everything(journal)
            assert records[-1][0] == last
            assert not [name for name in disk.listdir(DIRECTORY) if name.endswith(".tmp")]
            disk.heal()
            disk.crash(keep=0.0)
            journal = open_journal(disk)
            assert everything(journal) == records
            assert journal.has_room(100)


def test_a_first_start_on_a_full_disk_says_so_and_succeeds_later() -> None:
    disk = MemoryDisk(capacity_bytes=300 << 10)
    disk.capacity_bytes = (256 << 10) + 100
    with pytest.raises(DiskFull, match="no room for another segment"):
        open_journal(disk)
    assert not disk._open
    disk.capacity_bytes = None
    assert open_journal(disk).last_index == 0


def test_a_disk_that_fails_while_a_spare_is_made_ends_the_journal() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    disk.fail("fdatasync", errno.EIO, name="spare-")
    with pytest.raises(DiskFailed):
        fill_up(journal)
    with pytest.raises(DiskFailed):
        journal.sync()


def test_a_real_disk_and_a_real_worker_give_the_same_journal(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as worker:
        journal = Journal.open(OsDisk(), tmp_path, segment_bytes=SEGMENT_BYTES, tuning=Tuning(worker=worker, tail_bytes=500))
        fill(journal, 1, 200)
        journal.sync()
        journal.set_hard_state(2, "b")
        journal.truncate_from(150)
        fill(journal, 150, 170, term=2)
        assert journal.sync() > 0
        journal.compact_through(60)
        records = everything(journal)
        journal.close()
        journal = Journal.open(OsDisk(), tmp_path, segment_bytes=SEGMENT_BYTES, tuning=Tuning(worker=worker))
        assert everything(journal) == records
        assert (journal.term, journal.voted_for) == (2, "b")
        journal.close()
    names = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert names.count("spare") == 2


class LaterWorker:
    """Runs a job when the test says so, or when its result is waited for."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, fn: Callable[[], T], /) -> Handle[T]:
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(fn())
            except DiskFull as error:
                future.set_exception(error)

        class Later:
            def done(self) -> bool:
                return future.done()

            def result(self) -> T:
                if not future.done():
                    job()
                return future.result()

        self.jobs.append(lambda: None if future.done() else job())
        return Later()

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


def test_spares_are_made_in_the_worker_and_waited_for_only_when_none_is_left() -> None:
    disk, worker = MemoryDisk(), LaterWorker()
    journal = Journal.open(disk, DIRECTORY, segment_bytes=SEGMENT_BYTES, tuning=Tuning(worker=worker))
    assert len(segment_paths(disk)) == 1
    assert not spares(disk)
    while worker.jobs:
        worker.run()
        journal.idle(0.0)
    assert len(spares(disk)) == 2
    fill(journal, 1, 40)
    journal.sync()
    assert len(spares(disk)) == 1
    fill(journal, 41, 150)
    journal.sync()
    assert journal.last_index == 150
    disk.crash(keep=0.0)
    assert open_journal(disk).last_index == 150


def test_d4_while_another_try_for_a_spare_is_under_way_the_reserve_stays_held_back() -> None:
    disk, worker = MemoryDisk(), LaterWorker()
    journal = Journal.open(disk, DIRECTORY, segment_bytes=SEGMENT_BYTES, tuning=Tuning(worker=worker))
    run_all(worker, journal, 0.0)
    disk.capacity_bytes = disk.used_bytes()
    while journal.has_room(100):
        fill(journal, journal.last_index + 1, journal.last_index + 1)
        journal.sync()
        run_all(worker, journal, 0.0)
    before = len(segment_paths(disk))
    while len(segment_paths(disk)) == before:  # what must be written begins the reserve
        fill(journal, journal.last_index + 1, journal.last_index + 1)
        journal.sync()
    run_all(worker, journal, 1.0)
    assert (journal.has_room(100), journal.has_reserve(100)) == (False, True)
    journal.idle(1.0 + 2 * RETRY_S)
    assert worker.jobs, "another try waits for its turn"
    assert (journal.has_room(100), journal.has_reserve(100)) == (False, True)
    disk.capacity_bytes = None
    run_all(worker, journal, 1.0 + 2 * RETRY_S)
    assert journal.has_room(100)


def run_all(worker: LaterWorker, journal: Journal, now: float) -> None:
    journal.idle(now)
    while worker.jobs:
        worker.run()
        journal.idle(now)
