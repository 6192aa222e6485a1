"""One connection between two members: connect, handshake, hello, then frames both ways.

It moves bytes and keeps times; who may be on the other end and which of two connections lives is decided by the transport. Nothing here
waits. Small frames are joined before they are written, so that a flush costs one TLS record, not one per message.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from selectors import EVENT_READ, EVENT_WRITE

import msgspec

from raftmeta.log.frames import FrameReader, header
from raftmeta.log.hello import Identity, Link
from raftmeta.log.streams import WOULD_BLOCK, Step, Stream

JOIN_BYTES = 64 << 10  # frames are joined up to this size for one write
TLS_RECORD_BYTES = 16 << 10  # a read this long says that more may be waiting


class Stage(IntEnum):
    CONNECTING = 0
    HANDSHAKE = 1
    HELLO = 2  # encrypted and, with TLS, the certificate's name is known; nothing is accepted but a hello
    READY = 3
    CLOSED = 4


class Origin(msgspec.Struct, frozen=True):
    """How a connection came to be."""

    address: str  # of the other end, for people
    host: str  # of the other end, for limits per address
    dialled: str | None  # the peer that this member dialled; None: accepted
    dial: int  # number of the dial, 0 for an accepted one

    @property
    def inbound(self) -> bool:
        return self.dialled is None


class SendQueue:
    """Frames to be written, in order, with their size in bytes."""

    def __init__(self) -> None:
        self._items: deque[bytes] = deque()
        self._head = memoryview(b"")
        self.size = 0

    def push(self, payload: bytes) -> None:
        """A frame with this payload; large payloads are not copied."""
        length = header(len(payload))
        if len(payload) < JOIN_BYTES:
            self._items.append(length + payload)
        else:
            self._items.append(length)
            self._items.append(payload)
        self.size += len(length) + len(payload)

    def head(self) -> memoryview:
        """What to write next; the same bytes until `written` moves on."""
        if not self._head and self._items:
            self._head = memoryview(self._next_chunk())
        return self._head

    def written(self, count: int) -> None:
        self._head = self._head[count:]
        self.size -= count

    def _next_chunk(self) -> bytes:
        first = self._items.popleft()
        if not self._items or len(first) >= JOIN_BYTES:
            return first
        parts, size = [first], len(first)
        while self._items and size + len(self._items[0]) <= JOIN_BYTES:
            size += len(self._items[0])
            parts.append(self._items.popleft())
        return b"".join(parts)


class Connection:
    """Mutable; owned by the transport's thread."""

    def __init__(self, sock: socket.socket, origin: Origin, frame_limit: int, now: float) -> None:
        self.origin = origin
        self.stage = Stage.CONNECTING
        self.reader = FrameReader(frame_limit)
        self.queue = SendQueue()
        self.identity: Identity | None = None
        self.peer = ""  # once the hello is accepted
        self.link: Link | None = None  # the same
        self.opened = self.last_received = self.last_sent = self.last_progress = now
        self.write_blocked = False
        self.registered_mask = 0  # what the selector was told; the transport's note
        self.descriptor = sock.fileno()
        self._sock: socket.socket | None = sock
        self._stream: Stream | None = None
        self._step = Step.WRITE

    @property
    def closed(self) -> bool:
        return self.stage is Stage.CLOSED

    def interest(self) -> int:
        """What the selector should wait for."""
        if self.stage is Stage.CONNECTING:
            return EVENT_WRITE
        if self.stage is Stage.HANDSHAKE:
            return EVENT_READ if self._step is Step.READ else EVENT_WRITE
        blocked = self.write_blocked or (self._stream is not None and self._stream.wants_write)
        return EVENT_READ | EVENT_WRITE if blocked else EVENT_READ

    def advance(self, make_stream: Callable[[socket.socket], Stream]) -> bool:
        """Go on with connect and handshake; True once hellos may pass. Raises Refused or OSError."""
        if self._sock is not None:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            sock, self._sock = self._sock, None
            try:
                self._stream = make_stream(sock)
            except (OSError, ValueError):
                sock.close()
                raise
            self.stage = Stage.HANDSHAKE
        assert self._stream is not None
        self._step = self._stream.handshake()
        if self._step is not Step.DONE:
            return False
        self.identity = self._stream.identity()
        self.stage = Stage.HELLO
        return True

    def fill(self, now: float) -> int:
        """One read into the reader. Bytes read or WOULD_BLOCK; a closed stream raises ConnectionResetError."""
        assert self._stream is not None
        count = self._stream.read_into(self.reader.space())
        if count > 0:
            self.reader.received(count)
            self.last_received = now
        elif count == 0:
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
        return count

    def more_waits(self, last_count: int) -> bool:
        assert self._stream is not None
        return last_count >= TLS_RECORD_BYTES or self._stream.pending()

    def flush(self, now: float) -> bool:
        """Write what is queued until it is gone (True) or the socket is full (False)."""
        assert self._stream is not None
        queue = self.queue
        while queue.size:
            count = self._stream.write(queue.head())
            if count == WOULD_BLOCK:
                self.write_blocked = True
                return False
            queue.written(count)
            self.last_sent = self.last_progress = now
        self.write_blocked = False
        return True

    def push(self, payload: bytes, now: float) -> None:
        if not self.queue.size:
            self.last_progress = now
        self.queue.push(payload)

    def close(self) -> None:
        self.stage = Stage.CLOSED
        if self._sock is not None:
            self._sock.close()
        if self._stream is not None:
            self._stream.close()
