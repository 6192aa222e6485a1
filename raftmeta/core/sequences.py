"""A persistent sorted sequence, for what the maps cannot give: an order that is cheap to page through.

It is an immutable value made of tuples of at most CHUNK keys, so that a change copies a bounded part, and nobody ever has to sort or walk a
whole map. The same keys added and removed in any order give sequences that iterate alike; where their chunks are cut may differ.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

CHUNK = 64

K = TypeVar("K", bound=Any)  # strings, or tuples that begin with a unique number


class SortedKeys(Generic[K]):
    """Keys in rising order without repeats. Two levels: 100,000 keys are about 1,600 chunks."""

    __slots__ = ("_chunks", "_size")

    def __init__(self, chunks: tuple[tuple[K, ...], ...] = (), size: int = 0) -> None:
        self._chunks = chunks  # none is empty
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._chunks)

    @property
    def last(self) -> K:
        """The greatest key; there must be one."""
        return self._chunks[-1][-1]

    def after(self, key: Any) -> Iterator[K]:
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

    def first_after(self, key: Any) -> K:
        """The first key that is greater; there must be one. A tuple is greater than its own beginning."""
        chunks = self._chunks
        number = bisect_right(chunks, key, key=_first) - 1
        inside = chunks[max(number, 0)]
        place = bisect_right(inside, key)
        return inside[place] if place < len(inside) else chunks[number + 1][0]

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


def _first(chunk: tuple[K, ...]) -> K:
    return chunk[0]


def _cut(keys: Sequence[K]) -> tuple[tuple[K, ...], ...]:
    return tuple(tuple(keys[i : i + CHUNK]) for i in range(0, len(keys), CHUNK))
