"""The front's listener: uvicorn on a socket that the supervisor holds, with the limits that uvicorn leaves out.

The supervisor keeps the listening socket, so while a front restarts new connections wait instead of being refused. A connection that does
not bring a whole request head in time is closed, and one whose body comes too slowly: otherwise a few slow senders could hold every
connection, also of requests that were answered before their body ended. Bytes that begin no request keep no connection open, and what the
parser collects is bounded in heads, trailers and between chunks alike. At the limit of connections those that wait for a request give way
to new ones; where none does, health is still answered over a few more. Stopping means: not ready for `drain_s`, then no new connections,
then the requests in flight end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from node_agent.front import CROWDED, Front
from node_agent.runtime import Runtime, log
from node_agent.tls import server_tls
from raftmeta.descriptors import raised_limit

BACKLOG = 1024
PROBE_ROOM = 32  # connections beyond the limit, over which health alone is answered
OWN_FILES = 160  # that are no connection of a stranger: libraries, sockets, links to 64 workers
KEEP_ALIVE_S = 75  # longer than clients and proxies keep an idle connection: one that we end meets a request that is on its way


class ReadLimits(NamedTuple):
    handshake_s: float = 10.0  # of TLS
    head_s: float = 10.0  # from connecting, or from the first byte of a later request, to the end of its head
    head_bytes: int = 64 << 10  # of a head, of the trailers of a body, of what stands between two of its chunks
    body_s: float = 10.0  # grace for a body, to which its bytes add time
    body_bytes_per_s: int = 16 << 10  # slower than this is no client
    certificate_look_s: float = 5.0  # between looks at the certificate's files


class Crowd:
    """The connections of one front: how many there may be, and which of them wait for a request, longest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[LimitedProtocol] = set()
        self._waiting: dict[LimitedProtocol, None] = {}

    @property
    def is_full(self) -> bool:
        return len(self._open) > self.limit

    def enter(self, connection: LimitedProtocol) -> None:
        """A new one: another that waits for a request ends for it, or it does itself when even the room for probes is taken."""
        self._open.add(connection)
        if self.is_full:
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                oldest.end()
            elif len(self._open) > self.limit + PROBE_ROOM:
                connection.end()
                return
        self._waiting[connection] = None

    def wait(self, connection: LimitedProtocol) -> None:
        if connection in self._open:
            self._waiting.setdefault(connection)

    def work(self, connection: LimitedProtocol) -> None:
        self._waiting.pop(connection, None)

    def leave(self, connection: LimitedProtocol) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose head is late or large, or whose body is late. Idle ones after an answer are uvicorn's own business."""

    limits = ReadLimits()
    crowd = Crowd(1)  # of the server that makes the connections
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    _body_since = 0.0
    _body_bytes = 0
    _collected = 0  # bytes since the parser handed out a head or a part of a body: it may hold all of them

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()
        self.crowd.enter(self)

    def data_received(self, data: bytes) -> None:
        """In pieces no larger than a head may be, so that what arrives at once is bounded like what comes bit by bit."""
        if self._is_between:
            self._arm()
        limit = self.limits.head_bytes
        for begin in range(0, len(data), limit):
            if self.transport.is_closing():
                return
            piece = data[begin : begin + limit]
            self._collected += len(piece)
            super().data_received(piece)
            if self._collected > limit:
                self.end()
        self._settle()

    @property
    def _is_between(self) -> bool:
        """No request has begun that is not answered and read to its end."""
        return self._body_timer is None and not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    def _settle(self) -> None:
        """The rest of a body that came after its answer leaves an idle connection like any other."""
        if self.transport.is_closing() or not self._is_between:
            return
        self.crowd.wait(self)
        if self._head_timer is None and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field behind the body is nobody's: the request was admitted by its head."""
        if self._body_timer is None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        self.crowd.work(self)
        self._collected = 0
        self._body_since, self._body_bytes = self.loop.time(), 0
        self._arm_body(self.limits.body_s)
        self.scope["state"][CROWDED] = self.crowd.is_full or len(self.tasks) >= self.crowd.limit
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._collected = 0

    def on_body(self, body: bytes) -> None:
        self._collected = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._collected = 0
        self._disarm_body()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        self._disarm()
        self._disarm_body()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def end(self) -> None:
        """At once, whatever waits to be sent."""
        self.crowd.leave(self)
        if not self.transport.is_closing():
            self.transport.abort()

    def _arm(self) -> None:
        """From the first byte: nothing that comes later moves the end."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_s, self._head_is_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.end()

    def _arm_body(self, seconds: float) -> None:
        self._disarm_body()
        self._body_timer = self.loop.call_later(seconds, self._look_at_body)

    def _disarm_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _look_at_body(self) -> None:
        """At the end of the time that the body's bytes have earned so far."""
        self._body_timer = None
        if self.transport.is_closing():
            return
        earned_s = self._body_bytes / self.limits.body_bytes_per_s
        if self.flow.read_paused:  # it is we who do not read
            self._body_since = self.loop.time() - earned_s
        rest_s = self._body_since + self.limits.body_s + earned_s - self.loop.time()
        if rest_s > 0:
            self._arm_body(rest_s)
        else:
            self.end()


class _Server(uvicorn.Server):
    """uvicorn's, but for signals and TLS handshakes, for which it allows a minute."""

    def __init__(self, config: uvicorn.Config, handshake_s: float) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        config, limit_s = self.config, self._handshake_s if self.config.is_ssl else None
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._connection, sock=sock, ssl=config.ssl, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=limit_s, backlog=BACKLOG
            )
            for sock in sockets or ()
        ]
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the runtime's."""
        yield


def connections_allowed(wanted: int) -> int:
    """At most `wanted`: as many as this process may open files for, beside those of its own. Lifts the soft limit as far as that takes."""
    beside = PROBE_ROOM + OWN_FILES
    soft = raised_limit(wanted + beside)
    allowed = max(1, min(wanted, soft - beside))
    if allowed < wanted:
        log.warning("fewer_connections", allowed=allowed, configured=wanted, descriptors=soft)
    return allowed


async def run(runtime: Runtime, listener: socket.socket, limits: ReadLimits | None = None) -> None:
    """Serve until the runtime stops, then drain."""
    config, limits = runtime.config, limits or ReadLimits()
    tls = server_tls(config, limits.certificate_look_s)
    front = Front(runtime)
    crowd = Crowd(connections_allowed(config.connection_limit))
    server = _Server(
        uvicorn.Config(
            front,
            http=type("Protocol", (LimitedProtocol,), {"limits": limits, "crowd": crowd}),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(config.request_deadline_s) + 1,
            ssl_context_factory=None if tls is None else lambda _config, _make: tls.context,
        ),
        limits.handshake_s,
    )
    await front.start()
    following = [] if tls is None else [asyncio.create_task(tls.follow())]
    serving = asyncio.create_task(server.serve([listener]))
    log.info("front_serves", url=runtime.url)
    stopping = asyncio.create_task(runtime.stopping.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        front.draining = True
        log.info("draining", seconds=config.drain_s)
        await asyncio.sleep(config.drain_s)
        server.should_exit = True
    stopping.cancel()
    await serving
    for task in following:
        task.cancel()
    await front.stop()
