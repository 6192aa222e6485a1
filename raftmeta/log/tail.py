"""The newest records of the journal, in memory.

Holds every record that is not synced yet and, of the synced ones, as many as a bound of payload bytes allows, so that a follower that keeps
up is served without a read. Always a gap-free run that ends at the journal's last record; knows nothing of files.
"""

from __future__ import annotations

from raftmeta.log.records import Record


class Tail:
    def __init__(self, last_index: int, last_term: int, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: list[Record] = []
        self._bytes = 0
        self.first_index = last_index + 1  # of what is held; last_index + 1 when nothing is
        self.last_index = last_index
        self.last_term = last_term

    def append(self, record: Record) -> None:
        self._records.append(record)
        self._bytes += len(record[2])
        self.last_index, self.last_term = record[0], record[1]

    def term_at(self, index: int) -> int:
        return self._records[index - self.first_index][1]

    def slice(self, lo: int, hi: int, max_bytes: int) -> list[Record]:
        """Held records lo <= index < hi: the first, then no more than max_bytes of payload with it."""
        begin, end = lo - self.first_index, hi - self.first_index
        size = 0
        for at in range(begin, end):
            size += len(self._records[at][2])
            if size > max_bytes and at > begin:
                end = at
                break
        return self._records[begin:end]

    def after(self, index: int) -> list[Record]:
        return self._records[max(0, index + 1 - self.first_index) :]

    def cut(self, index: int, last_term: int) -> None:
        """Forget the records from `index` on; `last_term` is that of the one before."""
        keep = max(0, index - self.first_index)
        self._bytes -= sum(len(record[2]) for record in self._records[keep:])
        del self._records[keep:]
        self.first_index = min(self.first_index, index)
        self.last_index, self.last_term = index - 1, last_term

    def trim(self, synced_index: int) -> None:
        """Keep to the bound, as far as records are synced. Goes to seven eighths of it, so that moving the list stays rare."""
        if self._bytes <= self._max_bytes:
            return
        count = 0
        while count < len(self._records) and self._bytes > self._max_bytes * 7 // 8 and self._records[count][0] <= synced_index:
            self._bytes -= len(self._records[count][2])
            count += 1
        del self._records[:count]
        self.first_index += count

    def reset(self, index: int, term: int) -> None:
        self._records.clear()
        self._bytes = 0
        self.first_index, self.last_index, self.last_term = index + 1, index, term
