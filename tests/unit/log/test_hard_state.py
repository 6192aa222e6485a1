"""D7: term and vote survive a torn write and one damaged slot; with both slots bad nobody guesses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from raftmeta.durable import DiskFailed
from raftmeta.log.hard_state import MAX_SEGMENTS, MAX_VOTE_BYTES, NOBODY, SLOT_BYTES, HardState, HardStateFile, Promise, SegmentRow
from raftmeta.log.journal import HardStateCorrupt, Journal
from tests.support.journals import open_journal, segment_paths, written
from tests.support.memory_disk import MemoryDisk, PowerLost

DIRECTORY = Path("/member/journal")
FILE = DIRECTORY / "hard-state"
ROWS = tuple(SegmentRow(serial, serial * 10 + 1, 3, 7, True, 12288, serial * 10 + 10, 3, 9) for serial in range(60))  # over two sectors


def created(disk: MemoryDisk) -> HardStateFile:
    disk.make_directory(DIRECTORY)
    return HardStateFile.create(disk, DIRECTORY, NOBODY, Promise())


def loaded(disk: MemoryDisk) -> HardState:
    return HardStateFile.load(disk, DIRECTORY).state


def test_a_new_file_says_term_0_and_no_vote() -> None:
    disk = MemoryDisk()
    created(disk)
    disk.crash(keep=0.0)
    assert (loaded(disk).promise.term, loaded(disk).promise.voted_for, loaded(disk).segments) == (0, "", ())


def test_d7_every_flipped_byte_of_a_settled_state_costs_nothing() -> None:
    disk = MemoryDisk()
    created(disk).write_settled(Promise(4, "b"), ROWS[:3])
    state = loaded(disk)
    for slot in (0, 1):
        end = len(disk.contents(FILE)[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES].rstrip(b"\0"))
        for offset in [*range(end), end + 1, end + 999]:
            disk.flip(FILE, slot * SLOT_BYTES + offset, 0x20)
            found = loaded(disk)
            assert (found.promise.term, found.promise.voted_for, found.segments) == (4, "b", ROWS[:3])
            assert found.sequence in (state.sequence, state.sequence - 1)
            disk.flip(FILE, slot * SLOT_BYTES + offset, 0x20)


def test_d7_both_slots_bad_is_refused_at_every_byte() -> None:
    disk = MemoryDisk()
    created(disk).write_settled(Promise(4, "b"), ROWS[:3])
    used = len(disk.contents(FILE)[SLOT_BYTES:].rstrip(b"\0"))
    for offset in range(used):
        disk.flip(FILE, offset)
        disk.flip(FILE, SLOT_BYTES + used - 1 - offset)
        with pytest.raises(HardStateCorrupt, match=r"slot 0: .*slot 1: "):
            loaded(disk)
        disk.flip(FILE, offset)
        disk.flip(FILE, SLOT_BYTES + used - 1 - offset)


def test_d7_a_file_cut_at_any_place_keeps_the_state_or_is_refused() -> None:
    disk = MemoryDisk()
    created(disk).write_settled(Promise(4, "b"), ROWS[:3])
    used = len(disk.contents(FILE)[SLOT_BYTES:].rstrip(b"\0"))
    for size in (0, 1, used - 1, used, SLOT_BYTES, SLOT_BYTES + used - 1, SLOT_BYTES + used, 2 * SLOT_BYTES - 1):
        cut = disk.clone()
        cut.cut(FILE, size)
        if size < used:
            with pytest.raises(HardStateCorrupt):
                loaded(cut)
        else:
            assert loaded(cut).promise.voted_for == "b"


def test_d7_a_journal_with_both_slots_bad_does_not_open_and_touches_nothing() -> None:
    disk = MemoryDisk()
    written(disk).close()
    for offset in (20, SLOT_BYTES + 20):
        disk.flip(FILE, offset)
    calls = disk.calls
    with pytest.raises(HardStateCorrupt, match="this member must not vote"):
        open_journal(disk)
    assert disk.calls == calls + 1  # make_directory


def test_d7_a_missing_file_beside_segments_is_refused_and_is_not_term_0() -> None:
    disk = MemoryDisk()
    written(disk).close()
    disk.unlink(FILE)
    with pytest.raises(HardStateCorrupt, match="a file beside 1 segments, found none"):
        open_journal(disk)
    assert len(segment_paths(disk)) == 1


def test_d7_a_term_below_that_of_the_last_record_is_refused() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.close()
    hard = HardStateFile.load(disk, DIRECTORY)
    hard.write_settled(Promise(0, ""), hard.state.segments)
    with pytest.raises(HardStateCorrupt, match="a term of at least 1"):
        open_journal(disk)


class OneSlotDisk(MemoryDisk):
    """Puts every state into the first slot, as if there were no second."""

    def pwrite(self, file, data, offset):  # type: ignore[no-untyped-def]
        super().pwrite(file, data, offset % SLOT_BYTES)


@pytest.mark.parametrize("kind", [MemoryDisk, OneSlotDisk])
def test_d7_a_torn_write_leaves_the_old_or_the_new_state(kind: type[MemoryDisk]) -> None:
    refused, seen = 0, set()
    for seed in range(40):
        disk = kind(seed)
        hard = created(disk)
        hard.write_settled(Promise(4, "b"), ROWS)
        disk.crash_at(1)
        with pytest.raises(PowerLost):
            hard.write(Promise(5, "c"), ROWS[:19:-1])
        disk.crash(keep=0.5)
        try:
            found = loaded(disk)
            seen.add((found.promise.term, found.promise.voted_for, len(found.segments)))
        except HardStateCorrupt:
            refused += 1
    assert seen <= {(4, "b", 60), (5, "c", 40)}
    if kind is MemoryDisk:
        assert len(seen) == 2
        assert refused == 0
    else:
        assert refused


def test_d7_the_newest_of_two_whole_slots_counts() -> None:
    disk = MemoryDisk()
    hard = created(disk)
    for term in range(1, 6):
        hard.write(Promise(term, "x"), ())
        assert loaded(disk).promise.term == term


def test_d1_a_vote_is_durable_when_the_sync_returns() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.set_hard_state(7, "me")
    assert Journal.open(disk.clone(), DIRECTORY, segment_bytes=16 << 10).term == 1
    journal.sync()
    disk.crash(keep=0.0)
    again = open_journal(disk)
    assert (again.term, again.voted_for) == (7, "me")


def test_d4_a_vote_can_be_stored_on_a_full_disk() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    disk.capacity_bytes = disk.used_bytes()
    journal.set_hard_state(7, "me")
    journal.sync()
    disk.crash(keep=0.0)
    assert open_journal(disk).voted_for == "me"


def test_a_failed_sync_of_the_hard_state_ends_the_journal() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.set_hard_state(7, "me")
    disk.fail("fdatasync", errno.EIO, name="hard-state")
    with pytest.raises(DiskFailed):
        journal.sync()
    with pytest.raises(DiskFailed):
        journal.sync()


def test_the_largest_state_fits_its_slot() -> None:
    disk = MemoryDisk()
    hard = created(disk)
    big = (1 << 64) - 1
    rows = tuple(SegmentRow(big, big, big, 2**32 - 1, True, big, big, big, 2**32 - 1) for _ in range(MAX_SEGMENTS))
    hard.write(Promise(big, "v" * MAX_VOTE_BYTES), rows)
    assert loaded(disk).segments == rows
    with pytest.raises(ValueError, match="exceeds its slot"):
        hard.write(Promise(1, ""), rows * 2)
