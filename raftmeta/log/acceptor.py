"""The listening socket: never lost, and bounded before anybody is authenticated.

When the process has no file descriptor left, accepting pauses and goes on later; the listener stays bound. Connections that have not
shown a valid hello are limited in number; at the limit the oldest one of the busiest address gives way, so one address that floods
the port pushes out its own connections and not those of members.
"""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Iterable

from raftmeta.addresses import join_address
from raftmeta.core.errors import RaftmetaError
from raftmeta.log.connection import Connection
from raftmeta.log.dialer import tune

BACKLOG = 128
ACCEPTS_PER_ROUND = 8
PAUSE_S = 0.2  # after the process ran out of descriptors or memory

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Exhausted(Exception):
    """No descriptor or memory for another connection."""


class Acceptor:
    def __init__(self, host: str, port: int, member_id: str) -> None:
        place = f"peer address {join_address(host, port)} of member {member_id!r}"
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise RaftmetaError("bad_field", f"{place} cannot be used: {error}") from error
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((host, port))
            self._sock.listen(BACKLOG)
        except OSError as error:
            self._sock.close()
            reason = "another process listens there" if error.errno == errno.EADDRINUSE else str(error)
            raise RaftmetaError("bad_field", f"{place} cannot be bound: {reason}") from error
        self._sock.setblocking(False)
        self.paused_until = 0.0

    def fileno(self) -> int:
        return self._sock.fileno()

    def address(self) -> tuple[str, int]:
        bound = self._sock.getsockname()
        return str(bound[0]), int(bound[1])

    def accept(self) -> tuple[socket.socket, str, int] | None:
        """One waiting connection with its host and port, or None. Raises Exhausted."""
        try:
            sock, remote = self._sock.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise Exhausted(str(error)) from error
            return None  # nothing waits, or a network error of the waiting connection, see accept(2)
        sock.setblocking(False)
        tune(sock)
        return sock, str(remote[0]), int(remote[1])

    def close(self) -> None:
        self._sock.close()


def victim(pending: Iterable[Connection]) -> Connection | None:
    """Of the connections without a hello, the oldest one of the address that has most of them."""
    listed = list(pending)
    if not listed:
        return None
    busiest = Counter(connection.origin.host for connection in listed).most_common(1)[0][0]
    return min((c for c in listed if c.origin.host == busiest), key=lambda c: c.opened)
