"""Reaching a peer: name look-ups off the engine's thread, and when to try again.

A look-up may block for half a minute; each runs in a daemon thread of its own, at most one per peer, so a dead name server delays nobody
else and never the engine. Numeric addresses need no thread.
"""

from __future__ import annotations

import errno
import ipaddress
import queue
import random
import socket
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 1.0
USER_TIMEOUT_MS = 15_000  # unacknowledged bytes older than this break the connection (tcp(7)); above the transport's own stall time
KEEPALIVE_S = 5  # idle time and interval of TCP's own probes; the transport's keepalive is faster


class Target(NamedTuple):
    family: int
    address: tuple[str, int]


Resolve = Callable[[str, int], Sequence[Target]]


def resolve(host: str, port: int) -> Sequence[Target]:
    """Blocking look-up. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(Target(family, (str(sockaddr[0]), int(sockaddr[1]))) for family, _, _, _, sockaddr in found)


def literal(host: str, port: int) -> Target | None:
    """The address of a numeric host, without a look-up."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return Target(socket.AF_INET6 if version == 6 else socket.AF_INET, (host, port))


class Resolved(NamedTuple):
    peer: str
    host: str
    port: int
    targets: Sequence[Target]  # empty when the look-up failed
    error: str


class Resolver:
    """Look-ups under way; results wait until the engine's thread takes them."""

    def __init__(self, resolve_name: Resolve, wake: Callable[[], None]) -> None:
        self._resolve = resolve_name
        self._wake = wake
        self._busy: set[str] = set()
        self._results: queue.SimpleQueue[Resolved] = queue.SimpleQueue()

    def request(self, peer: str, host: str, port: int) -> None:
        """Nothing happens while a look-up for this peer is under way."""
        if peer in self._busy:
            return
        thread = threading.Thread(target=self._look_up, args=(peer, host, port), name=f"resolve-{peer}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process has no room for another thread
            self._results.put(Resolved(peer, host, port, (), str(error)))
        self._busy.add(peer)

    def take(self) -> list[Resolved]:
        taken: list[Resolved] = []
        while True:
            try:
                result = self._results.get_nowait()
            except queue.Empty:
                return taken
            self._busy.discard(result.peer)
            taken.append(result)

    def _look_up(self, peer: str, host: str, port: int) -> None:
        try:
            result = Resolved(peer, host, port, tuple(self._resolve(host, port)), "")
        except (OSError, UnicodeError) as error:
            result = Resolved(peer, host, port, (), str(error) or type(error).__name__)
        self._results.put(result)
        self._wake()


class Backoff:
    """Jittered delays from FIRST_DELAY_S, doubling up to LAST_DELAY_S."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._delay = FIRST_DELAY_S

    def next_delay(self) -> float:
        delay = self._delay * self._rng.uniform(0.5, 1.0)
        self._delay = min(self._delay * 2, LAST_DELAY_S)
        return delay

    def reset(self) -> None:
        self._delay = FIRST_DELAY_S


def tune(sock: socket.socket) -> None:
    """Small messages leave at once; a dead path is noticed by the kernel too."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def begin_connect(target: Target) -> socket.socket:
    """A socket on its way to the target. Raises OSError."""
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        tune(sock)
        code = sock.connect_ex(target.address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, errno.errorcode.get(code, "connect failed"))
    except OSError:
        sock.close()
        raise
    return sock
