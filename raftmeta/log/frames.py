"""Frames on a byte stream: a u32 little-endian length, then that many bytes.

A frame of length zero is a keepalive and says only "I am here". The reader keeps one growing buffer per connection, hands out complete
frames as views into it, and refuses a length above its limit before it reserves memory for it. It knows nothing of what is inside.
"""

from __future__ import annotations

import struct

KEEPALIVE = b"\x00\x00\x00\x00"
HEADER_BYTES = 4
START_BYTES = 16 << 10  # capacity of a fresh reader: one TLS record
READ_BYTES = 256 << 10  # capacity once authenticated; returned to after a larger frame

_length = struct.Struct("<I")


class FrameTooLarge(Exception):
    """The peer announced more than the limit in force."""

    def __init__(self, found: int, limit: int) -> None:
        super().__init__(f"frame of {found} bytes, limit {limit}")
        self.found = found
        self.limit = limit


def header(length: int) -> bytes:
    return _length.pack(length)


class FrameReader:
    """Bytes in, frames out. A view from `next_frame` is valid until the next call of `space`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._base = START_BYTES
        self._buffer = bytearray(START_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0  # first byte not handed out
        self._end = 0  # first free byte

    def raise_limit(self, limit: int) -> None:
        """After authentication: larger frames, larger reads."""
        self._limit = limit
        self._base = READ_BYTES

    def space(self) -> memoryview:
        """Where to receive into; never empty, and large enough in the end for the frame that is under way."""
        held = self._end - self._start
        frame = self._frame_bytes()
        wanted = max(self._base, frame)
        if held == 0:
            self._start = self._end = 0
            if len(self._buffer) != wanted:
                self._replace(wanted)
        elif self._start + max(frame, HEADER_BYTES) > len(self._buffer):
            self._replace(wanted)
        return self._view[self._end :]

    def received(self, count: int) -> None:
        self._end += count

    def next_frame(self) -> memoryview | None:
        """The next complete frame without its length, or None. Raises FrameTooLarge."""
        size = self._frame_bytes()
        if size == 0 or self._end - self._start < size:
            return None
        begin = self._start + HEADER_BYTES
        self._start += size
        return self._view[begin : self._start]

    def _frame_bytes(self) -> int:
        """Size of the frame under way with its header; 0 while the header is incomplete."""
        if self._end - self._start < HEADER_BYTES:
            return 0
        length: int = _length.unpack_from(self._buffer, self._start)[0]
        if length > self._limit:
            raise FrameTooLarge(length, self._limit)
        return length + HEADER_BYTES

    def _replace(self, capacity: int) -> None:
        """Move what is held to the front, into a buffer of this capacity."""
        held = self._end - self._start
        fresh = bytearray(capacity)
        fresh[:held] = self._view[self._start : self._end]
        self._buffer = fresh
        self._view = memoryview(fresh)
        self._start, self._end = 0, held
