"""Small journals on a disk in memory, and a plain list that says what one may hold after a crash.

`Expected` follows a journal: what was synced must come back, what was in flight may come back up to any record, and two suffixes never mix.
"""

from __future__ import annotations

from pathlib import Path

from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.records import Record
from tests.support.memory_disk import MemoryDisk

DIRECTORY = Path("/member/journal")
SEGMENT_BYTES = 16 << 10  # 4 KiB of it for records


def open_journal(disk: MemoryDisk, *, tail_bytes: int = 1 << 20, reserve: bool = True, segment_bytes: int = SEGMENT_BYTES) -> Journal:
    return Journal.open(disk, DIRECTORY, segment_bytes=segment_bytes, reserve=reserve, tuning=Tuning(tail_bytes=tail_bytes))


def payload(index: int, term: int, size: int = 100) -> bytes:
    return f"{term}/{index} ".encode().ljust(size, b".")


def fill(journal: Journal, first: int, last: int, term: int = 1, size: int = 100) -> None:
    if term > journal.term:
        journal.set_hard_state(term, "")
    for index in range(first, last + 1):
        journal.append(index, term, payload(index, term, size))


def everything(journal: Journal) -> list[Record]:
    return journal.entries(journal.first_index, journal.last_index + 1, 1 << 40)


def written(disk: MemoryDisk, batches: int = 3, per_batch: int = 3) -> Journal:
    """An open journal with that many synced batches in term 1, voted for "a"."""
    journal = open_journal(disk)
    journal.set_hard_state(1, "a")
    for batch in range(batches):
        fill(journal, batch * per_batch + 1, (batch + 1) * per_batch)
        journal.sync()
    return journal


def segment_paths(disk: MemoryDisk) -> list[Path]:
    return [DIRECTORY / name for name in disk.listdir(DIRECTORY) if name.startswith("segment-")]


class Expected:
    """`now` is what the owner sees, `synced` what must survive; both are (base index, base term, records behind it)."""

    def __init__(self) -> None:
        self.base, self.base_term = 0, 0
        self.log: list[tuple[int, bytes]] = []
        self.hard = (0, "")
        self.compacted = 0
        self._synced: tuple[int, int, list[tuple[int, bytes]]] = (0, 0, [])
        self._synced_hard = (0, "")

    @property
    def last_index(self) -> int:
        return self.base + len(self.log)

    def synced(self) -> None:
        """All that the owner sees is durable."""
        self._synced = (self.base, self.base_term, list(self.log))
        self._synced_hard = self.hard

    def cut(self, index: int) -> None:
        del self.log[index - self.base - 1 :]

    def reset(self, index: int, term: int) -> None:
        self.base, self.base_term, self.log = index, term, []

    def assert_same(self, journal: Journal) -> None:
        assert journal.last_index == self.last_index
        assert (journal.term, journal.voted_for) == self.hard
        assert journal.first_index <= max(self.base, self.compacted) + 1
        assert everything(journal) == self._records(journal.first_index, self.log)
        assert journal.last_term == (self.log[-1][0] if self.log else self.base_term)

    def recovered(self, journal: Journal) -> None:
        """The journal came back: hold it against what it may be, and follow it from here."""
        assert (journal.term, journal.voted_for) in (self.hard, self._synced_hard)
        base, base_term, log = self._synced
        count = journal.last_index - self.base
        same = 0  # records of the old suffix that the new one keeps
        if base == self.base:
            while same < min(len(log), len(self.log)) and log[same] == self.log[same]:
                same += 1
        ahead = same <= count <= len(self.log) and everything(journal) == self._records(journal.first_index, self.log[:count])
        if ahead and journal.last_term == (self.log[count - 1][0] if count else self.base_term):
            del self.log[count:]
        else:
            self.base, self.base_term, self.log = base, base_term, list(log)
        self.hard = (journal.term, journal.voted_for)
        self.assert_same(journal)
        assert journal.synced_index == journal.last_index
        self.synced()

    def _records(self, first_index: int, log: list[tuple[int, bytes]]) -> list[Record]:
        begin = max(first_index - self.base - 1, 0)
        return [(self.base + 1 + at, *log[at]) for at in range(begin, len(log))]
