"""The journal as its owner sees it: appending, reading, cutting, compacting, one sync for everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmeta.log.journal import Journal, Tuning
from tests.support.memory_disk import MemoryDisk

DIRECTORY = Path("/member/journal")
SEGMENT_BYTES = 16 << 10


def open_journal(disk: MemoryDisk, *, tail_bytes: int = 1 << 20) -> Journal:
    return Journal.open(disk, DIRECTORY, segment_bytes=SEGMENT_BYTES, tuning=Tuning(tail_bytes=tail_bytes))


def fill(journal: Journal, first: int, last: int, term: int = 1, size: int = 100) -> None:
    if term != journal.term:
        journal.set_hard_state(term, "")
    for index in range(first, last + 1):
        journal.append(index, term, f"{term}/{index} ".encode().ljust(size, b"."))


def everything(journal: Journal) -> list[tuple[int, int, bytes]]:
    return journal.entries(journal.first_index, journal.last_index + 1, 1 << 40) if journal.last_index >= journal.first_index else []


def test_a_new_journal_is_empty_in_term_0() -> None:
    journal = open_journal(MemoryDisk())
    assert (journal.first_index, journal.last_index, journal.last_term, journal.synced_index) == (1, 0, 0, 0)
    assert (journal.term, journal.voted_for) == (0, "")
    assert (journal.term_at(0), journal.term_at(1)) == (0, None)


def test_what_was_synced_is_there_after_power_loss_and_what_was_not_is_cut() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk)
    journal.set_hard_state(1, "a")
    fill(journal, 1, 10)
    journal.sync()
    before = everything(journal)
    fill(journal, 11, 12)
    disk.crash(keep=0.0)
    journal = open_journal(disk)
    assert everything(journal) == before
    assert (journal.last_index, journal.last_term, journal.synced_index, journal.term, journal.voted_for) == (10, 1, 10, 1, "a")


@pytest.mark.parametrize("tail_bytes", [0, 500, 1 << 20])
def test_entries_reads_the_same_from_memory_and_from_disk(tail_bytes: int) -> None:
    journal = open_journal(MemoryDisk(), tail_bytes=tail_bytes)
    fill(journal, 1, 400)
    journal.sync()
    found = journal.entries(1, 401, 1 << 30)
    assert [record[0] for record in found] == list(range(1, 401))
    assert found[316] == (317, 1, b"1/317 ".ljust(100, b"."))
    assert [record[0] for record in journal.entries(150, 170, 1000)] == list(range(150, 160))
    assert [record[0] for record in journal.entries(150, 170, 1)] == [150]
    assert journal.entries(401, 500, 100) == []
