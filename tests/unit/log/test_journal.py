"""The journal as its owner sees it: appending, reading, cutting, compacting, one sync for everything."""

from __future__ import annotations

from math import inf

import pytest

from raftmeta.log.hard_state import Owner
from raftmeta.log.journal import QUIET_S, DiskFull, Journal, Tuning, WrongCluster, WrongMember
from raftmeta.log.records import DATA_START, decode_mark
from tests.support.journals import DIRECTORY, everything, fill, open_journal, payload, segment_paths, written
from tests.support.memory_disk import MemoryDisk

HARD_STATE = DIRECTORY / "hard-state"


def test_a_new_journal_is_empty_in_term_0() -> None:
    journal = open_journal(MemoryDisk())
    assert (journal.first_index, journal.last_index, journal.last_term, journal.synced_index) == (1, 0, 0, 0)
    assert (journal.term, journal.voted_for) == (0, "")
    assert (journal.term_at(0), journal.term_at(1)) == (0, None)
    assert everything(journal) == []


def test_d1_what_was_synced_is_there_after_power_loss_and_what_was_not_is_gone() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    before = everything(journal)
    fill(journal, 10, 12)
    journal.set_hard_state(2, "b")
    assert (journal.last_index, journal.synced_index) == (12, 9)
    disk.crash(keep=0.0)
    journal = open_journal(disk)
    assert everything(journal) == before
    assert (journal.last_index, journal.last_term, journal.synced_index, journal.term, journal.voted_for) == (9, 1, 9, 1, "a")


def test_d1_without_syncs_that_reach_the_disk_acknowledged_records_are_lost() -> None:
    class LyingDisk(MemoryDisk):
        def _sync(self, name: str, file: object) -> None:
            """Says yes."""

    disk = LyingDisk()
    journal = open_journal(disk)
    MemoryDisk._sync(disk, "fsync", disk.open(DIRECTORY / "hard-state"))
    for path in segment_paths(disk):
        MemoryDisk._sync(disk, "fsync", disk.open(path))
    fill(journal, 1, 3)
    journal.sync()
    disk.crash(keep=0.0)
    assert open_journal(disk).last_index == 0


def test_d1_term_and_vote_are_durable_before_the_first_byte_of_a_record() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.idle(0.0)
    journal.idle(1.0)
    disk.log.clear()
    journal.set_hard_state(2, "b")
    fill(journal, 10, 12, term=2)
    journal.sync()
    calls = [(call, name.partition("-")[0]) for call, name in disk.log]
    assert calls == [("pwrite", "hard"), ("fdatasync", "hard"), ("pwrite", "segment"), ("fdatasync", "segment")]


def test_one_sync_makes_any_number_of_records_durable_with_one_write_and_one_mark() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.sync()
    disk.log.clear()
    fill(journal, 10, 20)
    assert journal.sync() >= 0
    assert [call for call, _ in disk.log] == ["pwrite", "pwrite", "fdatasync"]
    disk.log.clear()
    assert journal.sync() == 0.0
    assert not disk.log


def test_the_duration_of_a_sync_is_measured_on_the_given_clock() -> None:
    ticks = iter(range(100))
    journal = Journal.open(MemoryDisk(), DIRECTORY, segment_bytes=16 << 10, tuning=Tuning(clock=lambda: float(next(ticks))))
    fill(journal, 1, 1)
    assert journal.sync() == 1.0


@pytest.mark.parametrize("tail_bytes", [0, 500, 1 << 20])
def test_d8_entries_reads_the_same_from_memory_and_from_disk(tail_bytes: int) -> None:
    journal = open_journal(MemoryDisk(), tail_bytes=tail_bytes)
    fill(journal, 1, 200)
    fill(journal, 201, 400, term=2)
    journal.sync()
    assert everything(journal) == [(i, 1 + (i > 200), payload(i, 1 + (i > 200))) for i in range(1, 401)]
    assert [record[0] for record in journal.entries(150, 170, 1000)] == list(range(150, 160))
    assert [record[0] for record in journal.entries(150, 170, 1)] == [150]
    assert [record[0] for record in journal.entries(399, 500, 1 << 20)] == [399, 400]
    assert journal.entries(401, 500, 100) == []
    assert [journal.term_at(index) for index in (0, 1, 200, 201, 400, 401)] == [0, 1, 1, 2, 2, None]


def test_d8_memory_holds_no_more_than_its_bound_and_what_is_not_synced() -> None:
    journal = open_journal(MemoryDisk(), tail_bytes=1000)
    fill(journal, 1, 300)
    assert journal._tail.first_index == 1
    journal.sync()
    held = journal.last_index + 1 - journal._tail.first_index
    assert 8 <= held <= 10


@pytest.mark.parametrize("size", [0, 1, 4000, 9000])
def test_records_of_any_size_come_back(size: int) -> None:
    disk = MemoryDisk()
    journal = open_journal(disk, segment_bytes=32 << 10)
    fill(journal, 1, 9, size=size)
    journal.sync()
    before = everything(journal)
    disk.crash(keep=0.0)
    assert everything(open_journal(disk, segment_bytes=32 << 10)) == before


def test_a_record_beyond_a_segment_or_out_of_turn_is_refused_and_changes_nothing() -> None:
    journal = written(MemoryDisk())
    with pytest.raises(ValueError, match="more than a segment"):
        journal.append(10, 1, bytes(5000))
    for index, term in ((9, 1), (11, 1), (10, 0), (10, 2)):
        with pytest.raises(ValueError, match="cannot follow"):
            journal.append(index, term, b"")
    with pytest.raises(ValueError, match="cannot follow term"):
        journal.set_hard_state(0, "")
    with pytest.raises(ValueError, match="begins at 1"):
        journal.entries(0, 3, 100)
    assert journal.sync() >= 0
    assert journal.last_index == 9


# cutting


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
@pytest.mark.parametrize("index", [1, 2, 40, 41, 99, 100])
def test_a_cut_replaces_the_suffix_and_keeps_the_rest(index: int, tail_bytes: int) -> None:
    disk = MemoryDisk()
    journal = open_journal(disk, tail_bytes=tail_bytes)
    fill(journal, 1, 100)
    journal.sync()
    before = everything(journal)
    journal.set_hard_state(2, "b")
    journal.truncate_from(index)
    assert (journal.last_index, journal.synced_index, journal.term_at(index)) == (index - 1, index - 1, None)
    assert everything(journal) == before[: index - 1]
    fill(journal, index, index + 2, term=2)
    journal.sync()
    now = everything(journal)
    assert now == before[: index - 1] + [(i, 2, payload(i, 2)) for i in range(index, index + 3)]
    disk.crash(keep=0.0)
    assert everything(open_journal(disk)) == now


def test_a_cut_that_is_not_synced_leaves_the_old_suffix_after_power_loss() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    before = everything(journal)
    journal.set_hard_state(2, "")
    journal.truncate_from(4)
    fill(journal, 4, 6, term=2)
    disk.crash(keep=0.0)
    assert everything(open_journal(disk)) == before


def test_pending_records_are_cut_without_touching_the_disk() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.sync()
    fill(journal, 10, 14)
    disk.log.clear()
    journal.truncate_from(12)
    journal.truncate_from(20)
    assert not disk.log
    assert (journal.last_index, journal.synced_index) == (11, 9)
    journal.sync()
    assert len(segment_paths(disk)) == 1


def test_two_cuts_before_a_sync_are_one_at_the_lower_in_the_segment_that_is_there() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.set_hard_state(3, "")
    journal.truncate_from(7)
    fill(journal, 7, 8, term=2)
    journal.truncate_from(5)
    fill(journal, 5, 5, term=3)
    journal.sync()
    assert [record[1] for record in everything(journal)] == [1, 1, 1, 1, 3]
    assert len(segment_paths(disk)) == 1
    assert everything(open_journal(disk)) == everything(journal)


def test_lost_entries_of_thirty_leaders_take_no_segments() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk)
    fill(journal, 1, 1, size=1)
    for term in range(2, 32):
        journal.set_hard_state(term, "")
        journal.truncate_from(term)
        fill(journal, term, term + 1, term=term, size=1)  # the second is never committed
        journal.sync()
        journal.idle(float(term))
    assert len(segment_paths(disk)) == 1
    again = open_journal(disk)
    assert [record[1] for record in everything(again)] == [1, *range(2, 32), 31]


def test_a_cut_of_many_records_takes_a_new_segment_and_says_what_is_unused() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk, segment_bytes=4 << 20)
    fill(journal, 1, 20, size=100 << 10)
    journal.sync()
    journal.set_hard_state(2, "")
    journal.truncate_from(5)
    fill(journal, 5, 6, term=2)
    journal.sync()
    assert len(segment_paths(disk)) == 2
    assert journal.unused_bytes == (4 << 20) - DATA_START - 4 * ((100 << 10) + 24)
    assert everything(open_journal(disk, segment_bytes=4 << 20)) == everything(journal)


def test_a_cut_below_the_first_record_is_refused() -> None:
    journal = open_journal(MemoryDisk())
    journal.reset(10, 0)
    fill(journal, 11, 12)
    with pytest.raises(ValueError, match="below record 11"):
        journal.truncate_from(10)


# compaction and reset


def test_d3_compaction_deletes_whole_segments_only_and_the_rest_reads_as_before() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk, tail_bytes=0)
    fill(journal, 1, 100)
    journal.sync()
    before = everything(journal)
    contents = {path: disk.contents(path) for path in segment_paths(disk)}
    assert journal.compact_through(50) == 1
    first = journal.first_index
    assert 1 < first <= 51
    assert everything(journal) == before[first - 1 :]
    assert journal.term_at(first - 1) == 1
    assert journal.term_at(first - 2) is None
    assert {path: disk.contents(path) for path in segment_paths(disk)}.items() <= contents.items()
    disk.crash(keep=0.0)
    assert everything(open_journal(disk)) == before[first - 1 :]


def test_compaction_never_takes_the_active_segment_or_what_is_not_synced() -> None:
    journal = written(MemoryDisk())
    assert journal.compact_through(9) == 0
    fill(journal, 10, 100)
    assert journal.compact_through(100) == 0
    journal.sync()
    assert journal.compact_through(100) >= 1
    assert journal.last_index == 100


@pytest.mark.parametrize("index", [5, 9, 30])
def test_a_reset_empties_the_log_behind_a_snapshot(index: int) -> None:
    disk = MemoryDisk()
    journal = written(disk)
    fill(journal, 10, 11)
    journal.reset(index, 1)
    assert (journal.first_index, journal.last_index, journal.last_term, journal.synced_index) == (index + 1, index, 1, index)
    assert (journal.term_at(index), journal.term_at(index - 1)) == (1, None)
    disk.crash(keep=0.0)
    journal = open_journal(disk)
    assert (journal.first_index, journal.last_index, journal.last_term) == (index + 1, index, 1)
    fill(journal, index + 1, index + 3)
    journal.sync()
    assert len(everything(journal)) == 3


def test_a_reset_to_a_later_term_takes_that_term_without_a_vote() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.reset(30, 5)
    disk.crash(keep=0.0)
    journal = open_journal(disk)
    assert (journal.term, journal.voted_for, journal.last_term) == (5, "", 5)


# marks


def marks(disk: MemoryDisk) -> set[int]:
    """Last indexes that the two marks of the active segment speak of."""
    data = disk.contents(segment_paths(disk)[-1])
    found = [decode_mark(data[4096 * slot :]) for slot in (1, 2)]
    return {mark.cursor.index for mark in found if mark}


def test_d10_a_mark_speaks_only_of_records_of_an_earlier_sync() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk)
    seen = []
    for batch in range(4):
        fill(journal, batch * 3 + 1, batch * 3 + 3)
        journal.sync()
        seen.append(max(marks(disk)))
    assert seen == [0, 3, 6, 9]
    assert marks(disk) == {6, 9}


def test_d10_the_mark_of_the_last_records_is_written_alone_after_the_quiet_time() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.sync()
    now = 0.0
    assert journal.idle(now) == now + QUIET_S
    assert journal.idle(now + QUIET_S / 2) == now + QUIET_S
    assert max(marks(disk)) == 6
    fill(journal, 10, 10)
    journal.sync()
    assert journal.idle(now + QUIET_S) == now + 2 * QUIET_S
    disk.log.clear()
    active = segment_paths(disk)[-1]
    assert journal.idle(now + 2 * QUIET_S) == inf
    assert [call for call in disk.log if call[0] != "listdir"] == [
        ("pwrite", HARD_STATE.name),
        ("fdatasync", HARD_STATE.name),
        ("pwrite", active.name),
        ("fdatasync", active.name),
    ]
    assert max(marks(disk)) == 10
    disk.log.clear()
    assert journal.idle(now + 9) == inf
    assert not disk.log


def test_idle_completes_the_second_slot_of_the_hard_state() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.set_hard_state(2, "b")
    journal.sync()
    journal.idle(0.0)
    journal.idle(1.0)
    for slot in (0, 1):
        damaged = disk.clone()
        damaged.flip(DIRECTORY / "hard-state", slot * (128 << 10) + 50)
        assert open_journal(damaged).voted_for == "b"


def test_closing_syncs_marks_and_leaves_nothing_open() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    fill(journal, 10, 10)
    journal.close()
    assert max(marks(disk)) == 10
    assert not disk._open
    assert open_journal(disk).last_index == 10


def test_bytes_counts_what_is_written_and_not_what_is_allocated() -> None:
    journal = open_journal(MemoryDisk())
    assert journal.bytes == DATA_START
    fill(journal, 1, 2)
    journal.sync()
    assert journal.bytes == DATA_START + 2 * 124


def test_the_journal_of_another_cluster_is_refused_untouched() -> None:
    disk = MemoryDisk()
    Journal.open(disk, DIRECTORY, segment_bytes=16 << 10, tuning=Tuning(owner=Owner("one"))).close()
    calls = disk.calls
    with pytest.raises(WrongMember, match=r"cluster 'two'.*cluster 'one'"):
        Journal.open(disk, DIRECTORY, segment_bytes=16 << 10, tuning=Tuning(owner=Owner("two")))
    assert disk.calls == calls + 1  # make_directory
    assert Journal.open(disk, DIRECTORY, segment_bytes=16 << 10, tuning=Tuning(owner=Owner("one"))).last_index == 0


def test_a_segment_of_another_cluster_is_refused_untouched() -> None:
    disk, foreign = MemoryDisk(), MemoryDisk()
    for each, owner in ((disk, Owner("one")), (foreign, Owner("two"))):
        Journal.open(each, DIRECTORY, segment_bytes=16 << 10, tuning=Tuning(owner=owner)).close()
    disk.put(segment_paths(disk)[0], foreign.contents(segment_paths(foreign)[0]))
    calls = disk.calls
    with pytest.raises(WrongCluster):
        Journal.open(disk, DIRECTORY, segment_bytes=16 << 10, tuning=Tuning(owner=Owner("one")))
    assert disk.calls == calls + 1  # make_directory


def test_another_segment_size_goes_on_with_the_old_segments() -> None:
    disk = MemoryDisk()
    before = everything(written(disk))
    journal = open_journal(disk, segment_bytes=64 << 10)
    assert everything(journal) == before
    fill(journal, 10, 200)
    journal.sync()
    again = open_journal(disk, segment_bytes=64 << 10)
    assert again.last_index == 200
    assert {len(disk.contents(path)) for path in segment_paths(disk)} == {16 << 10, 64 << 10}


def test_the_number_of_segments_is_bounded() -> None:
    journal = open_journal(MemoryDisk(), tail_bytes=0)
    with pytest.raises(DiskFull, match="1000 segments, the limit"):
        fill(journal, 1, 2000, size=4000)
    journal.sync()
    assert len(journal._segments.all) == 1000
    assert not journal.has_room(4000)
    assert journal.sync() >= 0
    assert journal.compact_through(500) > 0
    assert journal.has_room(4000)
    fill(journal, journal.last_index + 1, journal.last_index + 1, size=4000)
