"""Eight-byte words in shared memory that two processes read and write without a lock.

Each word has one writer. A load or store must be one access of the machine, or a reader could see half of a value. CPython's memoryview of
format "Q" copies exactly eight bytes with memcpy of constant size, which every optimizing compiler turns into one move, and an aligned
eight-byte move is one access on the machines of `membarrier`. tests/device checks it against torn values. Order between different words is
not given here: that is what the barrier is for.
"""

from __future__ import annotations

import mmap

WORD = 8
CACHE_LINE = 128  # two lines of 64: x86 prefetches them in pairs, and some arm cores have 128


def words(mapping: mmap.mmap, offset: int, count: int) -> memoryview[int]:
    """`count` words from `offset`; a mapping starts on a page, so alignment of the offset is alignment of the word."""
    if offset % WORD or offset + count * WORD > len(mapping):
        raise ValueError(f"words {offset}..{offset + count * WORD} are not aligned or leave the {len(mapping)} bytes mapped")
    return memoryview(mapping)[offset : offset + count * WORD].cast("Q")
