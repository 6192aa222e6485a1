"""D5 and D10: damage to what was acknowledged is found and named; what was never acknowledged is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raftmeta.core.errors import RaftmetaError
from raftmeta.log import recovery
from raftmeta.log.hard_state import NOBODY, HardStateFile, SegmentRow
from raftmeta.log.journal import JournalCorrupt
from raftmeta.log.records import BLOCK_BYTES, DATA_START, RECORD_HEAD_BYTES, Cursor, Mark, encode_mark
from tests.support.journals import DIRECTORY, SEGMENT_BYTES, everything, fill, open_journal, segment_paths, written
from tests.support.memory_disk import MemoryDisk

RECORD = 124  # bytes of one of the small records


def many_segments() -> tuple[MemoryDisk, list[tuple[int, int, bytes]]]:
    """Three segments, the last with a few records, closed: every record is marked or listed."""
    disk = MemoryDisk()
    journal = open_journal(disk)
    journal.set_hard_state(1, "a")
    for first in range(1, 80, 10):
        fill(journal, first, first + 9)
        journal.sync()
    records = everything(journal)
    journal.close()
    assert len(segment_paths(disk)) == 3
    return disk, records


def inspected(disk: MemoryDisk) -> str:
    """ "damage", or the last record that opening would find."""
    findings = recovery.inspect(disk, DIRECTORY, NOBODY, SEGMENT_BYTES)
    recovery.close(findings)
    return "damage" if findings.damage else f"reads to {findings.segments[-1].last_index}"


def two_small_segments() -> MemoryDisk:
    """A sealed segment with two records and an active one with three, closed."""
    disk = MemoryDisk()
    journal = open_journal(disk)
    fill(journal, 1, 2, size=20)
    fill(journal, 3, 3, size=4000)  # begins a segment
    journal.sync()
    journal.set_hard_state(2, "")
    journal.truncate_from(3)
    fill(journal, 3, 5, term=2, size=20)
    journal.close()
    return disk


def test_d5_every_flipped_byte_of_every_segment_is_found_or_harmless() -> None:
    disk = two_small_segments()
    assert inspected(disk) == "reads to 5"
    small = RECORD_HEAD_BYTES + 20
    for path, records in zip(segment_paths(disk), (2, 3), strict=True):
        end = DATA_START + records * small
        header = [*range(64), *range(64, BLOCK_BYTES, 31), *range(BLOCK_BYTES - 32, BLOCK_BYTES)]
        marks = [*range(BLOCK_BYTES, BLOCK_BYTES + 70), *range(2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 70)]
        for offset in [*header, *range(DATA_START, end), *marks, *range(end, end + 4 * small), SEGMENT_BYTES - 1]:
            disk.flip(path, offset, 0x40)
            harmless = BLOCK_BYTES <= offset < DATA_START or offset >= end
            assert inspected(disk) == ("reads to 5" if harmless else "damage"), (path.name, offset)
            disk.flip(path, offset, 0x40)


def test_d5_every_cut_of_every_segment_is_found_or_harmless() -> None:
    disk = two_small_segments()
    for path, records in zip(segment_paths(disk), (2, 3), strict=True):
        end = DATA_START + records * (RECORD_HEAD_BYTES + 20)
        for size in [*range(0, DATA_START, 900), *range(DATA_START, end + 3), SEGMENT_BYTES - 1]:
            cut = disk.clone()
            cut.cut(path, size)
            assert inspected(cut) == ("damage" if size < end else "reads to 5"), (path.name, size)


def test_d5_a_missing_segment_is_found() -> None:
    for number in range(3):
        disk, _ = many_segments()
        disk.unlink(segment_paths(disk)[number])
        with pytest.raises(JournalCorrupt, match="no such file"):
            open_journal(disk)


def test_d5_segments_that_changed_places_are_found() -> None:
    disk, _ = many_segments()
    first, second, _ = segment_paths(disk)
    one, two = disk.contents(first), disk.contents(second)
    disk.put(first, two)
    disk.put(second, one)
    assert inspected(disk) == "damage"


def test_d5_damage_that_comes_later_is_found_when_it_is_read_back() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk, tail_bytes=0)
    fill(journal, 1, 9)
    journal.sync()
    path = segment_paths(disk)[0]
    disk.flip(path, DATA_START + 4 * RECORD + 50)
    assert len(journal.entries(1, 5, 1 << 20)) == 4
    for lo in (1, 5, 8):
        with pytest.raises(JournalCorrupt) as caught:
            journal.entries(lo, 10, 1 << 20)
        assert (caught.value.index, caught.value.damage.path) == (5, path)
    with pytest.raises(JournalCorrupt):
        journal.truncate_from(7)


def test_d5_the_error_names_file_offset_record_and_the_command_that_accepts_the_loss() -> None:
    disk, _ = many_segments()
    path = segment_paths(disk)[1]
    first = recovery.inspect(disk, DIRECTORY, NOBODY, SEGMENT_BYTES).segments[1].first_index
    disk.flip(path, DATA_START + 2 * RECORD + 30)
    calls = disk.calls
    with pytest.raises(JournalCorrupt) as caught:
        open_journal(disk)
    assert disk.calls == calls + 1  # make_directory, and nothing else was changed
    damage = caught.value.damage
    assert (damage.path, damage.offset, damage.index, damage.term, damage.through) == (path, DATA_START + 2 * RECORD, first + 2, 1, 80)
    text = str(caught.value)
    assert str(path) in text
    assert f"at offset {damage.offset}: expected record {first + 2}, found a record of 100 bytes with CRC" in text
    assert f"records {first + 2} to 80 cannot be read" in text
    assert f"raftmeta server --accept-data-loss-from {first + 2}" in text


# D10: torn or damaged


def unmarked(disk: MemoryDisk) -> list[tuple[int, int, bytes]]:
    """Nine synced records, the last three of which no mark speaks of yet."""
    return everything(written(disk))


def test_d10_a_zeroed_tail_above_the_mark_is_cut() -> None:
    for torn in range(1, 3 * RECORD, 2):
        disk = MemoryDisk()
        records = unmarked(disk)
        disk.put(segment_paths(disk)[0], bytes(torn), DATA_START + 9 * RECORD - torn)
        journal = open_journal(disk)
        assert everything(journal) == records[: 9 - -(-torn // RECORD)]


@pytest.mark.parametrize("records", [4, 5, 9])
def test_d10_a_zeroed_tail_from_at_or_below_the_mark_is_corruption(records: int) -> None:
    disk = MemoryDisk()
    unmarked(disk)
    disk.put(segment_paths(disk)[0], bytes(records * RECORD), DATA_START + (9 - records) * RECORD)
    with pytest.raises(JournalCorrupt) as caught:
        open_journal(disk)
    assert (caught.value.index, caught.value.damage.through) == (10 - records, max(6, 10 - records))


def settle(disk: MemoryDisk) -> None:
    """Let the quiet time pass."""
    journal = open_journal(disk)
    journal.close()


@pytest.mark.parametrize("lost", [1, 2, 8, 9])
def test_d10_a_journal_that_ends_cleanly_at_an_earlier_record_is_corruption(lost: int) -> None:
    disk = MemoryDisk()
    unmarked(disk)
    settle(disk)
    whole = disk.clone()
    disk.put(segment_paths(disk)[0], bytes(lost * RECORD), DATA_START + (9 - lost) * RECORD)
    whole.cut(segment_paths(whole)[0], DATA_START + (9 - lost) * RECORD)
    for broken in (disk, whole):
        with pytest.raises(JournalCorrupt) as caught:
            open_journal(broken)
        assert (caught.value.index, caught.value.damage.through) == (10 - lost, 9)


def test_d10_damage_in_the_last_acknowledged_record_is_corruption_once_marked() -> None:
    for mark in ("quiet", "next commit"):
        disk = MemoryDisk()
        journal = written(disk)
        if mark == "quiet":
            journal.idle(0.0)
            journal.idle(1.0)
        else:
            fill(journal, 10, 10)
            journal.sync()
        disk.flip(segment_paths(disk)[0], DATA_START + 9 * RECORD - 1)
        with pytest.raises(JournalCorrupt) as caught:
            open_journal(disk)
        assert caught.value.index == 9


def without_marks(disk: MemoryDisk) -> None:
    """Both marks as they were when the segment began, and nothing in the hard state: what a journal without this protection has."""
    hard = HardStateFile.load(disk, DIRECTORY)
    rows = [SegmentRow(row.serial, row.first_index, row.previous_term, row.previous_crc) for row in hard.state.segments]
    hard.write_settled(hard.state.promise, tuple(rows))
    for slot in (0, 1):
        disk.put(segment_paths(disk)[-1], encode_mark(Mark(slot, Cursor(DATA_START, 0, 0, 0))), BLOCK_BYTES * (1 + slot))


def test_d10_with_the_marks_off_the_same_damage_silently_loses_acknowledged_records() -> None:
    damages: list[Callable[[MemoryDisk, Path], None]] = [
        lambda disk, path: disk.put(path, bytes(5 * RECORD), DATA_START + 4 * RECORD),
        lambda disk, path: disk.cut(path, DATA_START + 4 * RECORD),
        lambda disk, path: disk.flip(path, DATA_START + 5 * RECORD - 1),
    ]
    for damage in damages:
        disk = MemoryDisk()
        unmarked(disk)
        settle(disk)
        damage(disk, segment_paths(disk)[0])
        assert inspected(disk) == "damage"
        without_marks(disk)
        assert inspected(disk) == "reads to 4"


def test_d10_both_marks_bad_is_corruption_although_every_record_reads() -> None:
    disk = MemoryDisk()
    unmarked(disk)
    path = segment_paths(disk)[0]
    disk.flip(path, BLOCK_BYTES + 20)
    assert inspected(disk) == "reads to 9"
    disk.flip(path, 2 * BLOCK_BYTES + 20)
    with pytest.raises(JournalCorrupt, match="two damaged marks"):
        open_journal(disk)


def begun_twice() -> tuple[MemoryDisk, Path]:
    """A segment that was opened again while it was empty, then three records in one sync, then quiet."""
    disk = MemoryDisk()
    open_journal(disk).close()
    journal = open_journal(disk)
    fill(journal, 1, 3)
    journal.sync()
    journal.close()
    return disk, segment_paths(disk)[0]


@pytest.mark.parametrize("begin", range(0, DATA_START + 3 * RECORD, 50))
def test_d10_a_zeroed_or_missing_tail_of_a_segment_that_was_begun_twice_is_corruption(begin: int) -> None:
    """Opening an empty segment wrote a mark that says nothing; it was the one left when the tail took the other with the records."""
    for lost in (lambda disk, path: disk.put(path, bytes(SEGMENT_BYTES - begin), begin), lambda disk, path: disk.cut(path, begin)):
        disk, path = begun_twice()
        lost(disk, path)
        assert inspected(disk) == "damage"


def test_d10_a_file_that_ends_before_its_first_record_is_corruption_whatever_its_marks_say() -> None:
    disk, path = begun_twice()
    for slot, cursor in enumerate((Cursor(DATA_START, 0, 0, 0), Cursor(DATA_START + 3 * RECORD, 3, 1, 0))):
        disk.put(path, encode_mark(Mark(2 + slot, cursor)), BLOCK_BYTES * (1 + slot))
    disk.cut(path, 2 * BLOCK_BYTES)
    assert inspected(disk) == "damage"


@pytest.mark.parametrize("cleared", [True, False])
def test_d10_what_was_torn_can_never_chain_again(cleared: bool) -> None:
    """Record 8 is torn, 9 whole behind it: written again, 8 would bring 9 back unasked if opening had not cleared it."""
    disk = MemoryDisk()
    records = unmarked(disk)
    path = segment_paths(disk)[0]
    ninth = disk.contents(path)[DATA_START + 8 * RECORD : DATA_START + 9 * RECORD]
    disk.flip(path, DATA_START + 8 * RECORD - 1)
    journal = open_journal(disk)
    assert journal.last_index == 7
    if not cleared:
        disk.put(path, ninth, DATA_START + 8 * RECORD)
    journal.append(8, 1, records[7][2])
    journal.sync()
    assert open_journal(disk).last_index == (8 if cleared else 9)


# accepting the loss


def accept(disk: MemoryDisk, index: int) -> tuple[int, int]:
    return recovery.accept_loss(disk, DIRECTORY, index, owner=NOBODY, segment_bytes=SEGMENT_BYTES)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("where", ["header", "first", "later", "missing"])
def test_d10_an_accepted_loss_keeps_what_precedes_the_damage_and_goes_on(number: int, where: str) -> None:
    disk, records = many_segments()
    path = segment_paths(disk)[number]
    damaged = {"header": 10, "first": DATA_START + 30, "later": DATA_START + 3 * RECORD + 30}
    if where == "missing":
        disk.unlink(path)
    else:
        disk.flip(path, damaged[where])
    with pytest.raises(JournalCorrupt) as caught:
        open_journal(disk)
    index = caught.value.index
    assert accept(disk, index) == (index, 80)
    disk.crash(keep=0.0)
    journal = open_journal(disk)
    assert everything(journal) == records[: index - 1]
    assert (journal.term, journal.voted_for) == (1, "a")
    fill(journal, index, index + 5)
    journal.sync()
    assert open_journal(disk).last_index == index + 5


def test_an_accepted_loss_keeps_the_damaged_files_for_the_operator() -> None:
    disk, _ = many_segments()
    first, second, third = segment_paths(disk)
    whole = disk.contents(third)
    disk.flip(second, 10)
    with pytest.raises(JournalCorrupt) as caught:
        open_journal(disk)
    accept(disk, caught.value.index)
    open_journal(disk).close()
    assert disk.contents(third.with_name(f"lost-{third.name}")) == whole
    assert disk.exists(second.with_name(f"lost-{second.name}"))
    assert disk.exists(first)


def test_both_marks_bad_can_be_accepted_without_losing_a_record() -> None:
    disk = MemoryDisk()
    records = unmarked(disk)
    path = segment_paths(disk)[0]
    disk.flip(path, BLOCK_BYTES + 20)
    disk.flip(path, 2 * BLOCK_BYTES + 20)
    assert accept(disk, 10) == (10, 10)
    disk.crash(keep=0.0)
    assert everything(open_journal(disk)) == records


def test_a_loss_is_accepted_only_for_the_record_that_is_damaged() -> None:
    disk, _ = many_segments()
    for damaged in (False, True):
        if damaged:
            disk.flip(segment_paths(disk)[1], DATA_START + 30)
        calls = disk.calls
        with pytest.raises(RaftmetaError, match="nothing was changed") as caught:
            accept(disk, 5)
        assert caught.value.code == "bad_field"
        assert disk.calls == calls
