"""The front's listener: uvicorn on a socket that the supervisor holds, with the limits that uvicorn leaves out.

The supervisor keeps the listening socket, so while a front restarts new connections wait instead of being refused. A connection that does
not bring a whole request head in time is closed, and one whose body comes too slowly: otherwise a few slow senders could hold every
connection, also of requests that were answered before their body ended. Stopping means: not ready for `drain_s`, then no new connections,
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

from node_agent.front import Front
from node_agent.runtime import Runtime, log
from node_agent.tls import server_tls

BACKLOG = 1024
KEEP_ALIVE_S = 75  # longer than clients and proxies keep an idle connection: one that we end meets a request that is on its way


class ReadLimits(NamedTuple):
    handshake_s: float = 10.0  # of TLS
    head_s: float = 10.0  # from connecting, or from the first byte of a later request, to the end of its head
    head_bytes: int = 64 << 10
    body_s: float = 10.0  # grace for a body, to which its bytes add time
    body_bytes_per_s: int = 16 << 10  # slower than this is no client
    certificate_look_s: float = 5.0  # between looks at the certificate's files


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose head is late or large, or whose body is late. Idle ones after an answer are uvicorn's own business."""

    limits = ReadLimits()
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _body_timer: asyncio.TimerHandle | None = None
    _body_since = 0.0
    _body_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > self.limits.head_bytes and not self.transport.is_closing():
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        self._head_bytes = 0
        self._body_since, self._body_bytes = self.loop.time(), 0
        self._arm_body(self.limits.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm_body()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_body()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._disarm()
        self._head_timer = self.loop.call_later(self.limits.head_s, self._head_is_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.abort()

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
            self.transport.abort()


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


async def run(runtime: Runtime, listener: socket.socket, limits: ReadLimits | None = None) -> None:
    """Serve until the runtime stops, then drain."""
    config, limits = runtime.config, limits or ReadLimits()
    tls = server_tls(config, limits.certificate_look_s)
    front = Front(runtime)
    server = _Server(
        uvicorn.Config(
            front,
            http=type("Protocol", (LimitedProtocol,), {"limits": limits}),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=config.connection_limit,
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
