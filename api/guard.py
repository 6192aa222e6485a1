"""The HTTP connection with the bounds that uvicorn's protocol leaves out. The only file that subclasses it.

uvicorn waits for ever for a request's head, for its body and for a reader of its replies, takes heads of any size and any number of
connections. Here each connection notes since when it waits for what, and one sweep per second cuts those that wait too long: a client that
sends a byte per second, or reads none, ends within its bound while others are served. A connection is cut by an abort, so that nothing
lingers in its send buffer.

A reply that is whole goes out in one write (`REPLY_AT_ONCE`), and the sweep ends idle connections too: uvicorn's two messages, its checks
of every header and its timer per reply are a third of what a read costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from api.errors import PROBLEM_TYPE, problem
from api.operation import REPLY_AT_ONCE, Header

_encode = msgspec.json.Encoder().encode


class HttpLimits(msgspec.Struct, frozen=True):
    max_connections: int = 4_096
    max_head_bytes: int = 32 << 10  # request line and header fields
    head_s: float = 10.0  # from the connection, or the first byte of a later request, to the end of its head
    body_s: float = 10.0  # grace for a body, to which its bytes add time
    body_bytes_per_s: int = 16 << 10  # slower than this is no client
    read_s: float = 15.0  # a reader who takes no byte of a waiting reply
    idle_s: float = 30.0  # between requests; longer than the pause between an agent's heartbeats
    handshake_s: float = 5.0  # of TLS, and of its end
    sweep_s: float = 1.0


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `limits` is set by `guarded`."""

    limits = HttpLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_since: float | None = None  # waits for a head since then
        self._head_bytes = 0
        self._body_since: float | None = None
        self._body_bytes = 0
        self._unread_bytes = 0  # of replies, at the sweep that last saw some being taken
        self._unread_since = 0.0
        self._idle_since: float | None = None  # a reply was given and nothing came since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self.loop.time()
        if len(self.connections) > self.limits.max_connections:
            self._cut_with("overloaded", f"the member serves its limit of {self.limits.max_connections} connections")

    def data_received(self, data: bytes) -> None:
        """Hands on no more at once than a head may have, so that one that arrives whole is bounded like one that comes in pieces.

        A head that begins behind another request is counted from the next piece on: it may have up to twice the limit.
        """
        self._idle_since = None
        if self._head_since is None and (self.cycle is None or self.cycle.response_complete):
            self._head_since = self.loop.time()
        limit = self.limits.max_head_bytes
        if self._head_bytes + len(data) < limit and not self.transport.is_closing():  # as nearly all
            if self._head_since is not None:
                self._head_bytes += len(data)
            super().data_received(data)
            return
        while data and not self.transport.is_closing():
            size = limit
            if self._head_since is not None:
                size -= self._head_bytes
                self._head_bytes += min(size, len(data))
            super().data_received(data[:size])
            data = data[size:]
            if self._head_since is not None and self._head_bytes >= limit:
                self._cut_with("bad_request", f"the request's head exceeds {limit} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_since is None:
            self._head_since = self.loop.time()

    def on_headers_complete(self) -> None:
        self._head_since, self._head_bytes = None, 0
        self._body_since, self._body_bytes = self.loop.time(), 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_since = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._cut_with("bad_request", "the bytes are no HTTP request")

    def on_response_complete(self) -> None:
        """As uvicorn does it, but for the timer of the idle connection."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since = self.loop.time()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.scope["extensions"] = {REPLY_AT_ONCE: partial(self._reply, cycle)}
        super()._start_asgi_task(cycle, app)

    def _reply(self, cycle: Any, status: int, headers: Iterable[Header], body: bytes) -> bool:
        """Send a whole reply. False when it must go the ordinary way: no body may follow, or the client does not take what it got."""
        if self.flow.write_paused or cycle.response_started or cycle.scope["method"] == "HEAD":
            return False
        if cycle.disconnected:
            return True
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        head = b"".join(parts)
        lines = len(parts) // 4 + (2 if cycle.keep_alive else 3)
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            raise ValueError("a header of the reply holds a line break")
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self.transport.write(head + body)
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()
        return True

    def overdue(self, now: float) -> bool:
        """Whether the client has used up its time. Looked at once per sweep."""
        limits = self.limits
        if self._idle_since is not None and now - self._idle_since > limits.idle_s:
            return True
        if self._head_since is not None and now - self._head_since > limits.head_s:
            return True
        if self._body_since is not None:
            if self.flow.read_paused:  # it is we who do not read
                self._body_since = now - self._body_bytes / limits.body_bytes_per_s
            elif now - self._body_since > limits.body_s + self._body_bytes / limits.body_bytes_per_s:
                return True
        return self._is_unread(now)

    def abort(self) -> None:
        self.transport.abort()

    def _is_unread(self, now: float) -> bool:
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread < self._unread_bytes or self._unread_bytes == 0:
            self._unread_bytes, self._unread_since = unread, now
            return False
        return now - self._unread_since > self.limits.read_s

    def _cut_with(self, code: str, detail: str) -> None:
        """Answers outside the application, when nothing is being answered on this connection, and ends it."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = problem(code, detail)
        data = _encode(body)
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (body["status"], body["code"].encode(), PROBLEM_TYPE, len(data)) + data)
        self.transport.close()


def guarded(limits: HttpLimits) -> type[GuardedProtocol]:
    """The protocol class with these limits; uvicorn makes the instances."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})


async def sweep(connections: set[Any], limits: HttpLimits) -> None:
    """Cuts overdue connections until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(limits.sweep_s)
        now = loop.time()
        for connection in list(connections):
            if connection.overdue(now):
                connection.abort()
