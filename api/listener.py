"""The listening socket of the API: what it takes in is bounded before anybody has said a word.

asyncio takes every connection that comes, and one whose TLS handshake goes on is in nobody's count: a stranger who opens connections and is
silent would get every descriptor of the process, until the log finds none for its next segment. Here the handshakes count too. At the bound
the oldest handshake of the address that has most of them gives way, so that one address that floods the port pushes out its own. A process
that has no descriptor left pauses, and the listener stays.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Sized
from typing import Any

import structlog

log = structlog.get_logger(__name__)

ACCEPTS_PER_TURN = 32  # of the event loop
PAUSE_S = 0.05  # at the bound with no handshake to give up, and without descriptors

Take = Callable[[socket.socket], Coroutine[Any, Any, object]]

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Belongs to the running event loop. `take` makes a connection of a socket and returns when its handshake is done or has failed."""

    def __init__(
        self,
        sock: socket.socket,
        bound: int,
        connections: Sized,
        take: Callable[[socket.socket], Coroutine[Any, Any, object]],
        *,
        shakes: bool,
    ) -> None:
        """`bound`: of `connections` and handshakes together. `shakes`: whether there are any, or each socket is a connection at once."""
        self._sock, self._bound, self._connections, self._take, self._shakes = sock, bound, connections, take, shakes
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[object], str] = {}  # by age; with the address of the other end
        self._serving = True
        self._dry = False  # the last try found no descriptor
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def is_serving(self) -> bool:
        return self._serving

    def close(self) -> None:
        """Take no more. Handshakes go on; who ends the connections ends what comes of them."""
        if self._serving:
            self._serving = False
            self._loop.remove_reader(self._sock)
            self._sock.close()

    async def wait_closed(self) -> None:
        """End the handshakes that are left when all else has ended."""
        for task in self._handshakes:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if len(self._handshakes) + len(self._connections) >= self._bound:
                self._give_way()
                return
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    if not self._dry:
                        log.warning("accept_paused", detail=str(error))
                    self._dry = True
                    self._pause()
                    return
                continue  # a network error of the waiting connection, see accept(2)
            self._dry = False
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so only for sockets whose protocol it was told
            task = self._loop.create_task(self._take(sock))
            self._handshakes[task] = str(address[0])
            task.add_done_callback(self._done)

    def _give_way(self) -> None:
        """The selector reports again what waits, when the one that gave way has left."""
        if not self._shakes or not self._handshakes:
            self._pause()
            return
        busiest = Counter(self._handshakes.values()).most_common(1)[0][0]
        oldest = next(task for task, host in self._handshakes.items() if host == busiest)
        if not oldest.cancelling():
            oldest.cancel()

    def _done(self, task: asyncio.Task[object]) -> None:
        del self._handshakes[task]
        fault = None if task.cancelled() else task.exception()
        if fault is not None and not isinstance(fault, OSError):  # an OSError is the other end's doing, ssl.SSLError is one
            log.error("a connection failed", exc_info=fault)

    def _pause(self) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._serving:
            self._loop.add_reader(self._sock, self._accept)
