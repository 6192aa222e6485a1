"""Numbers that outlive the process that counts: a mapping of names to sums in memory that the supervisor holds.

The supervisor makes one memory file for each process of the tree and hands it to every life of that process, and all of them to the
front. So a worker that was killed goes on counting where the one before it stopped, without a moment at which a count is lost or goes back,
and the page of the front shows it while the process is away. One process writes; any may read. Nothing lies on a disk: a count costs no
I/O, and a new start of the agent begins at zero.

A record is a length, a name padded to eight bytes, and a float64; the header says how many bytes of records count. A name is written
before the header counts it, and a sum changes by one aligned store, so a reader and the next life find whole records wherever the writer
was killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator

from raftmeta.core.errors import RaftmetaError

SIZE_BYTES = 1 << 20  # some 8,000 series
_MAGIC = int.from_bytes(b"rmtally1", "little")
_HEAD = struct.Struct("<QQQ")  # magic, bytes of records, counts that found no room
_FIRST = _HEAD.size
_USED, _LOST = 1, 2  # words of the head


def make() -> int:
    """A descriptor of zeroed memory for one process, all of it there: writing to it never fails."""
    fd = os.memfd_create("raftmeta-tally", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, SIZE_BYTES)
        os.pwrite(fd, _HEAD.pack(_MAGIC, 0, 0), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


class Tally:
    """The numbers of one process. May be used from several of its threads."""

    def __init__(self, fd: int) -> None:
        """Takes over what an earlier life counted; the descriptor stays the caller's. Raises RaftmetaError for what no `make` made."""
        size = os.fstat(fd).st_size
        if size != SIZE_BYTES:
            raise RaftmetaError("internal", f"tally of descriptor {fd}: expected {SIZE_BYTES} bytes, found {size}")
        self._map = mmap.mmap(fd, SIZE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._sums = memoryview(self._map).cast("d")
        if self._words[0] != _MAGIC:
            raise RaftmetaError("internal", f"tally of descriptor {fd}: expected its mark, found {self._words[0]:#x}")
        self._lock = threading.Lock()
        self._places = dict(self._records())

    @classmethod
    def private(cls) -> Tally:
        """For a process that nobody handed one: its numbers end with it."""
        fd = make()
        try:
            return cls(fd)
        finally:
            os.close(fd)

    def add(self, name: bytes, amount: float) -> None:
        """A name that finds no room is counted as lost instead."""
        with self._lock:
            place = self._places.get(name)
            if place is None:
                place = self._append(name)
            if place is None:
                self._words[_LOST] += 1
            else:
                self._sums[place] += amount

    def sums(self) -> dict[bytes, float]:
        """What was counted so far, by whichever process writes."""
        return {name: self._sums[place] for name, place in self._records()}

    @property
    def lost(self) -> int:
        return self._words[_LOST]

    def _append(self, name: bytes) -> int | None:
        words = -(-len(name) // 8)
        begin = _FIRST // 8 + self._words[_USED] // 8
        place = begin + 1 + words
        if (place + 1) * 8 > SIZE_BYTES:
            return None
        self._map[(begin + 1) * 8 : (begin + 1 + words) * 8] = name.ljust(words * 8, b"\0")
        self._words[begin] = len(name)
        self._sums[place] = 0.0
        self._words[_USED] += (2 + words) * 8
        self._places[name] = place
        return place

    def _records(self) -> Iterator[tuple[bytes, int]]:
        """Names, and the word at which each sum stands."""
        at, end = _FIRST // 8, (_FIRST + self._words[_USED]) // 8
        while at < end:
            size = self._words[at]
            place = at + 1 + -(-size // 8)
            yield bytes(self._map[(at + 1) * 8 : (at + 1) * 8 + size]), place
            at = place + 1
