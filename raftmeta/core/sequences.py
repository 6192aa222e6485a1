"""Two persistent sequences for what the maps cannot give: an order that is cheap to page through and to evict from.

Both are immutable values made of tuples of at most CHUNK elements, so that a change copies a bounded part, and nobody ever has to sort or
walk a whole map. They are derived from the records: neither enters the state hash or a snapshot, and the same elements added and removed in
any order give sequences that iterate alike (their chunks may be cut elsewhere).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from rpds import HashTrieMap

CHUNK = 256

K = TypeVar("K", bound=Any)  # strings, or tuples that start with a unique number


class SortedKeys(Generic[K]):
    """Keys in rising order without repeats. Two levels: 100,000 keys are about 400 chunks."""

    __slots__ = ("_chunks", "_size")

    def __init__(self, chunks: tuple[tuple[K, ...], ...] = (), size: int = 0) -> None:
        self._chunks = chunks  # none is empty
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._chunks)

    def after(self, key: K | None) -> Iterator[K]:
        """Keys greater than `key`, from the first for None; finding the place costs O(log n)."""
        if key is None:
            return iter(self)
        chunks = self._chunks
        number = bisect_right(chunks, key, key=_first) - 1
        if number < 0:
            return iter(self)
        inside = chunks[number]
        rest = (inside[bisect_right(inside, key) :],)
        return chain.from_iterable(chain(rest, (chunks[i] for i in range(number + 1, len(chunks)))))

    def extended(self, keys: Iterable[K]) -> SortedKeys[K]:
        """With keys that rise and are all greater than the last one here: the cheap way to grow."""
        added = tuple(keys)
        if not added:
            return self
        chunks = self._chunks
        size = self._size + len(added)
        if not chunks:
            return SortedKeys(_cut(added), size)
        last = chunks[-1]
        assert last[-1] < added[0], (last[-1], added[0])
        if len(last) + len(added) <= CHUNK:
            return SortedKeys((*chunks[:-1], last + added), size)
        return SortedKeys((*chunks[:-1], *_cut(last + added)), size)

    def added(self, key: K) -> SortedKeys[K]:
        """With one key that is not here yet, anywhere."""
        chunks = self._chunks
        if not chunks or chunks[-1][-1] < key:
            return self.extended((key,))
        number = max(bisect_right(chunks, key, key=_first) - 1, 0)
        inside = list(chunks[number])
        place = bisect_left(inside, key)
        assert inside[place : place + 1] != [key], key
        inside.insert(place, key)
        half = len(inside) // 2 if len(inside) > CHUNK else len(inside)
        parts = tuple(tuple(part) for part in (inside[:half], inside[half:]) if part)
        return SortedKeys(chunks[:number] + parts + chunks[number + 1 :], self._size + 1)

    def removed(self, key: K) -> SortedKeys[K]:
        """Without one key that is here."""
        chunks = self._chunks
        number = bisect_right(chunks, key, key=_first) - 1
        inside = list(chunks[number])
        inside.remove(key)
        begin = number
        if number > 0 and len(chunks[number - 1]) + len(inside) <= CHUNK // 2:
            begin -= 1
            inside[:0] = chunks[begin]
        return SortedKeys(chunks[:begin] + _cut(inside) + chunks[number + 1 :], self._size - 1)


class Fifo:
    """Keys in order of arrival: appended at the end, dropped from the front, read by position.

    Every chunk but the first and the last is full, so position and chunk number are one division apart. `_head` counts the keys that were
    ever dropped, `_tail` those that were ever appended.
    """

    __slots__ = ("_chunks", "_head", "_tail")

    def __init__(self, chunks: HashTrieMap[int, tuple[str, ...]] | None = None, head: int = 0, tail: int = 0) -> None:
        self._chunks: HashTrieMap[int, tuple[str, ...]] = HashTrieMap() if chunks is None else chunks
        self._head = head
        self._tail = tail

    def __len__(self) -> int:
        return self._tail - self._head

    def __iter__(self) -> Iterator[str]:
        return (self.at(position) for position in range(len(self)))

    def at(self, position: int) -> str:
        """The key at this position, 0 being the oldest."""
        number, place = divmod(self._head + position, CHUNK)
        return self._chunks[number][place]

    def changed(self, dropped: int, keys: list[str]) -> Fifo:
        """Without the `dropped` oldest, with `keys` at the end."""
        assert 0 <= dropped <= len(self) + len(keys), (dropped, len(self), len(keys))
        chunks, tail = self._chunks, self._tail
        place = 0
        while place < len(keys):
            number, used = divmod(tail, CHUNK)
            part = keys[place : place + CHUNK - used]
            chunks = chunks.insert(number, chunks.get(number, ()) + tuple(part))
            tail += len(part)
            place += len(part)
        head = self._head + dropped
        for number in range(self._head // CHUNK, head // CHUNK):
            chunks = chunks.discard(number)
        return Fifo(chunks, head, tail)


def _first(chunk: tuple[K, ...]) -> K:
    return chunk[0]


def _cut(keys: Sequence[K]) -> tuple[tuple[K, ...], ...]:
    return tuple(tuple(keys[i : i + CHUNK]) for i in range(0, len(keys), CHUNK))
