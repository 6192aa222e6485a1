"""The keeper: a small process that owns memory and hands out descriptors of it, so that memory outlives whoever computes with it.

It knows names and sizes, and neither slots nor versions. It never maps what it holds: nothing in it can be brought down by the bytes. One
thread, one socket that only this user may reach, a bound on connections, allocations and their bytes together. Whoever sends what is no
request, or does not take his answer, loses his connection and nobody else's is touched; of too many the oldest gives way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from node_agent.device import keeper_messages as messages
from node_agent.device.keeper_messages import (
    MAX_HELD,
    Answer,
    Given,
    Held,
    Hold,
    Listing,
    NotHeld,
    Open,
    Refused,
    Release,
    Released,
    Request,
)
from node_agent.device.memory_maker import Memory, MemoryMaker
from node_agent.refusal import Refusal

MAX_CONNECTIONS: Final = 256  # 64 workers, control and prober of a node, and those that have just been started again
_BACKLOG: Final = 64
_POLL_S: Final = 1.0  # between looks whether to end

log = structlog.get_logger()


class Holdings:
    """Names and the memory behind them."""

    def __init__(self, maker: MemoryMaker, limit_bytes: int) -> None:
        self._maker = maker
        self._limit_bytes = limit_bytes
        self._held: dict[str, tuple[Held, Memory]] = {}

    def answer(self, request: Request) -> tuple[Answer, int | None]:
        """With the descriptor that belongs to it. Never raises a Refusal: it is an answer."""
        try:
            return self._answer(request)
        except Refusal as refusal:
            return Refused(refusal.kind, refusal.subject, refusal.expected, refusal.found), None

    def let_go(self) -> None:
        """Of everything. What cannot be let go ends with this process."""
        while self._held:
            with suppress(Refusal):
                self._held.popitem()[1][1].let_go()

    def _answer(self, request: Request) -> tuple[Answer, int | None]:
        match request:
            case Hold():
                created = request.name not in self._held
                return self._give(self._hold(request), created)
            case Open():
                found = self._held.get(request.name)
                return (NotHeld(request.name), None) if found is None else self._give(found, created=False)
            case Release():
                gone = self._held.pop(request.name, None)
                if gone is not None:
                    gone[1].let_go()
                return Released(gone is not None), None
            case _:
                return Listing(tuple(item for item, _ in self._held.values()), self._limit_bytes), None

    def _hold(self, request: Hold) -> tuple[Held, Memory]:
        subject, size = f"memory {request.name} of the keeper", self._maker.padded(request.size_bytes)
        found = self._held.get(request.name)
        if found is not None:
            if found[0].size_bytes != size:
                raise Refusal("memory_differs", subject, f"{size} bytes", f"{found[0].size_bytes} bytes, held since earlier")
            return found
        if len(self._held) >= MAX_HELD:
            raise Refusal("no_headroom", subject, f"fewer than {MAX_HELD} allocations", f"{len(self._held)}")
        left = self._limit_bytes - sum(item.size_bytes for item, _ in self._held.values())
        if size > left:
            raise Refusal("no_headroom", subject, f"{size} bytes", f"{left} bytes left of the keeper's {self._limit_bytes}")
        made = Held(request.name, size), self._maker.make(request.name, size)
        self._held[request.name] = made
        return made

    def _give(self, found: tuple[Held, Memory], created: bool) -> tuple[Answer, int]:
        item, memory = found
        return Given(item.name, item.size_bytes, created), memory.descriptor


class Keeper:
    """Serves one socket until told to end."""

    def __init__(self, path: Path, holdings: Holdings, user: int | None = None, max_connections: int = MAX_CONNECTIONS) -> None:
        """Takes the place of a keeper that ended. Raises Refusal keeper_in_use while one lives.

        `user`: whom to serve, this process's own unless a test says otherwise; `max_connections` is smaller in tests alone.
        """
        self._user = os.geteuid() if user is None else user
        self._holdings = holdings
        self._max_connections = max_connections
        self._lock = _locked(path)
        self._path = path
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)  # nobody else's at any moment
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(before)
        self._listener.listen(_BACKLOG)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: dict[socket.socket, None] = {}  # the oldest first

    def run(self, stopping: Callable[[], bool]) -> None:
        while not stopping():
            self.serve_ready(_POLL_S)

    def serve_ready(self, timeout_s: float) -> None:
        """One turn: whoever waits is served."""
        for key, _ in self._selector.select(timeout_s):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            if ready is self._listener:
                self._accept()
            elif ready in self._connections:  # and not dropped a moment ago
                self._serve(ready)

    def close(self) -> None:
        """The socket's name goes first, so nobody finds it; then everything that was held."""
        self._path.unlink(missing_ok=True)
        for connection in tuple(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        self._holdings.let_go()
        os.close(self._lock)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as cause:
            if cause.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_oldest():
                raise  # nobody's descriptor to take: this process cannot serve
            log.warning("keeper_accept_failed", reason=str(cause))
            return
        stranger = messages.user_of(connection)
        if stranger != self._user:
            log.warning("keeper_refused", reason=f"user {stranger}")
            connection.close()
            return
        if len(self._connections) >= self._max_connections:
            self._drop_oldest()
        connection.setblocking(False)
        self._connections[connection] = None
        self._selector.register(connection, selectors.EVENT_READ)

    def _drop_oldest(self) -> bool:
        """A client asks and goes: whoever is connected longest has forgotten to. False when nobody is."""
        oldest = next(iter(self._connections), None)
        if oldest is None:
            return False
        log.warning("keeper_drops_connection", reason="the oldest of too many")
        self._drop(oldest)
        return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            request = messages.receive_request(connection)
            if request is not None:
                answer, descriptor = self._holdings.answer(request)
                messages.send(connection, answer, descriptor)
                return
        except (ValueError, OSError) as cause:
            log.warning("keeper_drops_connection", reason=str(cause))
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._connections.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()


def _locked(path: Path) -> int:
    """A lock beside the socket, held as long as its keeper lives: a socket's name outlives a kill."""
    fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        os.close(fd)
        raise Refusal("keeper_in_use", f"keeper at {path}", "none that lives", "one that holds its lock") from cause
    return fd
