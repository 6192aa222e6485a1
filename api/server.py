"""uvicorn, run for one application in the main thread: guarded connections, an orderly end.

On SIGTERM or SIGINT the member turns not ready and stops listening, watches end, requests in flight get a bounded time, and `run` returns,
so that whoever called it can stop the rest in order; a second signal ends the waiting. uvicorn itself would raise the signal again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvicorn

from api.guard import HttpLimits, guarded, sweep


class Listen(msgspec.Struct, frozen=True):
    host: str
    port: int  # 0: any free one
    certificate: Path | None = None  # PEM chain; None: plain HTTP
    key: Path | None = None
    grace_s: int = 10  # for requests in flight when the process is asked to end


class Server(uvicorn.Server):
    """`on_stop` is called on the event loop once, before connections are asked to end."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._limits = limits
        self._on_stop = on_stop
        self._sweep: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self._sweep = asyncio.ensure_future(sweep(self.server_state.connections, self._limits))

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)
        if self._sweep is not None:
            self._sweep.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def make_server(app: Any, listen: Listen, limits: HttpLimits, on_stop: Callable[[], None]) -> Server:
    config = uvicorn.Config(
        app,
        host=listen.host,
        port=listen.port,
        loop="uvloop",
        http=guarded(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=30,  # longer than the pause between an agent's heartbeats
        timeout_graceful_shutdown=listen.grace_s,
        backlog=1_024,
        ssl_certfile=listen.certificate,
        ssl_keyfile=listen.key,
        ssl_context_factory=_tls13 if listen.certificate else None,
    )
    return Server(config, limits, on_stop)


def _tls13(config: uvicorn.Config, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    context = make()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
