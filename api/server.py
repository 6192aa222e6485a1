"""uvicorn, run for one application in the main thread: guarded connections, an orderly end.

On SIGTERM or SIGINT the member turns not ready and stops listening, watches end, requests in flight get a bounded time, and `serve`
returns, so that whoever called it can stop the rest in order; a second signal ends the waiting. uvicorn itself would raise the signal
again, and would let a TLS handshake take a minute.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import msgspec
import structlog
import uvicorn

from api.guard import HttpLimits, guarded, sweep
from api.listener import Listener
from raftmeta.addresses import join_address
from raftmeta.core.errors import RaftmetaError
from raftmeta.security.server_tls import ServerTls

log = structlog.get_logger(__name__)

BACKLOG = 1_024
TOLD_AWAY = 64  # connections above their limit, which hear that they are too many
TURN_AWAY_S = 0.05  # between two looks for connections that were made after the server was asked to end


class Listen(msgspec.Struct, frozen=True):
    host: str
    port: int  # 0: any free one
    tls: ServerTls | None = None  # None: plain HTTP
    grace_s: int = 10  # for requests in flight when the process is asked to end


class Server(uvicorn.Server):
    """`on_stop` is called on the event loop once, before connections are asked to end."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits, listener: socket.socket, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._limits = limits
        self._listener = listener
        self._on_stop = on_stop
        self.port = int(listener.getsockname()[1])
        self.helpers: list[Callable[[], Coroutine[Any, Any, None]]] = []  # run beside the server until it ends
        self._helping: list[asyncio.Task[None]] = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        bound = self._limits.max_connections + TOLD_AWAY
        host = self._listener.getsockname()[0]
        self.servers = [Listener(self._listener, bound, self.server_state.connections, self._take, shakes=self.config.is_ssl)]  # type: ignore[list-item] # what uvicorn uses of one
        self.started = True
        self._helping = [asyncio.ensure_future(helper()) for helper in self.helpers]
        log.info("listening", address=join_address(host, self.port), tls=self.config.is_ssl)

    async def _take(self, sock: socket.socket) -> object:
        config = self.config
        handshake_s = self._limits.handshake_s if config.is_ssl else None
        return await asyncio.get_running_loop().connect_accepted_socket(
            self._connection, sock, ssl=config.ssl, ssl_handshake_timeout=handshake_s, ssl_shutdown_timeout=handshake_s
        )

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[no-any-return]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        self._helping.append(asyncio.ensure_future(self._turn_away()))
        await super().shutdown(sockets)
        for task in self._helping:
            task.cancel()

    async def _turn_away(self) -> None:
        """uvicorn asks those to end that are there at one moment. One whose handshake is under way would be served until the grace ends."""
        while True:
            await asyncio.sleep(TURN_AWAY_S)
            for connection in list(self.server_state.connections):
                connection.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def make_server(app: Any, listen: Listen, limits: HttpLimits, on_stop: Callable[[], None]) -> Server:
    """A server that holds its port already. Raises RaftmetaError when the port cannot be had."""
    tls = listen.tls
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=guarded(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=listen.grace_s,
        backlog=BACKLOG,
        ssl_context_factory=(lambda _config, _make: _context_of(tls)) if tls else None,
    )
    server = Server(config, limits, _bind(listen.host, listen.port), on_stop)
    server.helpers.append(lambda: sweep(server.server_state.connections, limits))
    if tls is not None:
        server.helpers.append(tls.follow)
    return server


def _context_of(tls: ServerTls) -> ssl.SSLContext:
    return tls.context


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as cause:
        raise RaftmetaError("bad_field", f"the API cannot listen on {join_address(host, port)}: {cause}") from cause
