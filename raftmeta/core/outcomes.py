"""The outcomes of commands by idempotency key, in order of arrival: an immutable value, like everything else in the state.

Every command needs a look-up, an insertion and, once the store is full, an eviction, each far cheaper than a persistent map gives them. So
the records live in persistent chunks, and look-ups go through an index of plain dictionaries that belongs to the newest value only: whoever
makes the next value takes the index out of the old one, which from then on finds keys by walking its chunks. Nothing but speed shows from
outside: apply states one after the other, each on the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rpds import HashTrieMap

CHUNK = 128
SHARDS = 256  # one dictionary of a million keys would hold the interpreter lock for tens of milliseconds whenever it grows

Chunk = tuple[tuple[str, ...], tuple[bytes, ...]]  # keys and their encoded records
Index = tuple[dict[str, bytes], ...]


class Outcomes:
    """Every chunk but the first and the last is full; `_head` counts what was ever dropped, `_tail` what was ever added."""

    __slots__ = ("_cell", "_chunks", "_head", "_tail")

    def __init__(self, chunks: HashTrieMap[int, Chunk], head: int, tail: int, index: Index | None) -> None:
        self._chunks = chunks
        self._head = head
        self._tail = tail
        self._cell: list[Index] = [] if index is None else [index]  # holds the index while this is the newest value

    @classmethod
    def of(cls, records: Iterable[tuple[str, bytes]] = ()) -> Outcomes:
        """Outcomes of these keys, the oldest first."""
        draft = Draft(cls(HashTrieMap(), 0, 0, None))
        for key, record in records:
            draft.add(key, record)
        return draft.finish()

    def __len__(self) -> int:
        return self._tail - self._head

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Keys with their encoded records, the oldest first."""
        head, tail = self._head, self._tail
        for number in range(head // CHUNK, -(-tail // CHUNK)):
            keys, records = self._chunks[number]
            begin = max(head - number * CHUNK, 0)
            yield from zip(keys[begin:], records[begin:], strict=True)

    def at(self, position: int) -> tuple[str, bytes]:
        """Key and encoded record at this position, 0 being the oldest."""
        number, place = divmod(self._head + position, CHUNK)
        keys, records = self._chunks[number]
        return keys[place], records[place]

    def get(self, key: str) -> bytes | None:
        """The encoded record of a key. May be called from any thread."""
        cell = self._cell
        if cell:
            try:
                index = cell[0]
                found = index[hash(key) % SHARDS].get(key)
            except IndexError:  # taken since the line before
                return self._walk(key)
            if cell:  # still ours, so nobody had changed it when we looked
                return found
        return self._walk(key)

    def take(self) -> Index:
        """The index, now the caller's. `give` returns it when nothing came of it."""
        try:
            return self._cell.pop()
        except IndexError:
            index: Index = tuple({} for _ in range(SHARDS))
            for key, record in self.items():
                index[hash(key) % SHARDS][key] = record
            return index

    def give(self, index: Index) -> None:
        self._cell.append(index)

    def changed(self, dropped: int, keys: list[str], records: list[bytes], index: Index) -> Outcomes:
        """Without the `dropped` oldest, with these at the end; `index` already says so."""
        chunks, tail, place = self._chunks, self._tail, 0
        while place < len(keys):
            number, used = divmod(tail + place, CHUNK)
            end = place + CHUNK - used
            old = chunks[number] if used else ((), ())
            chunks = chunks.insert(number, (old[0] + tuple(keys[place:end]), old[1] + tuple(records[place:end])))
            place = end
        head, tail = self._head + dropped, tail + len(keys)
        for number in range(self._head // CHUNK, head // CHUNK):
            chunks = chunks.discard(number)
        return Outcomes(chunks, head, tail, index)

    def _walk(self, key: str) -> bytes | None:
        return next((record for found, record in self.items() if found == key), None)


class Draft:
    """The next outcomes in the making. Ends with `finish`, or with `abandon` when nothing was added."""

    __slots__ = ("_base", "_dropped", "_index", "_keys", "_records", "count")

    def __init__(self, base: Outcomes) -> None:
        self._base = base
        self.count = len(base)
        self._index = base.take()
        self._dropped = 0
        self._keys: list[str] = []
        self._records: list[bytes] = []

    def get(self, key: str) -> bytes | None:
        return self._index[hash(key) % SHARDS].get(key)

    def add(self, key: str, record: bytes) -> None:
        """Append a key that is not there."""
        self._index[hash(key) % SHARDS][key] = record
        self._keys.append(key)
        self._records.append(record)
        self.count += 1

    def oldest(self) -> tuple[str, bytes]:
        """Key and encoded record of the oldest; there must be one."""
        place = self._dropped - len(self._base)
        return self._base.at(self._dropped) if place < 0 else (self._keys[place], self._records[place])

    def drop_oldest(self, key: str) -> bool:
        """`key` is that of the oldest. Whether it was there before this draft."""
        del self._index[hash(key) % SHARDS][key]
        self._dropped += 1
        self.count -= 1
        return self._dropped <= len(self._base)

    def fresh(self) -> Iterator[tuple[str, bytes]]:
        """What was added and not dropped again."""
        begin = max(self._dropped - len(self._base), 0)
        return zip(self._keys[begin:], self._records[begin:], strict=True)

    def abandon(self) -> None:
        """Leave the base as it was."""
        self._base.give(self._index)

    def finish(self) -> Outcomes:
        return self._base.changed(self._dropped, self._keys, self._records, self._index)
