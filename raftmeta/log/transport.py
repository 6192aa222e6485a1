"""Member-to-member links for the engine's thread: mutually authenticated, bounded, never waiting except in `poll`.

Everything but `wake` is called from one thread. A peer has at most one live link. Whatever a stranger or a broken peer does ends its own
connection, is counted and logged, and touches nobody else. A link that dies loses what was queued on it; the log's protocol repeats.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Mapping

import msgspec

from raftmeta.addresses import is_loopback, join_address, split_address
from raftmeta.log import hello as rules
from raftmeta.log import messages
from raftmeta.log.acceptor import ACCEPTS_PER_ROUND, PAUSE_S, Acceptor, Exhausted, victim
from raftmeta.log.board import Board
from raftmeta.log.connection import Connection, Origin, Stage
from raftmeta.log.frames import HEADER_BYTES, FrameTooLarge
from raftmeta.log.hello import Refusal, Refused
from raftmeta.log.links import Links
from raftmeta.log.messages import AnyMessage
from raftmeta.log.notices import Notices
from raftmeta.log.peers import Connected, Disconnected, PeerEvent, Received
from raftmeta.log.settings import TransportPorts, TransportSettings
from raftmeta.log.streams import WOULD_BLOCK, PlainStream, Stream, TlsStream
from raftmeta.security.tls import PeerTls

__all__ = ["Connected", "Disconnected", "PeerEvent", "Received", "TlsTransport", "TransportPorts", "TransportSettings"]

ROUNDS_PER_POLL = 4  # looks at the sockets per poll while they have news; joins what arrives close together
EVENTS_PER_POLL = 4096
READ_BYTES_PER_TURN = 1 << 20  # of one connection before the others get their turn
HANDSHAKES_PER_POLL = 8  # a step costs up to a millisecond; strangers must not own the thread


class TlsTransport:
    def __init__(self, settings: TransportSettings, tls: PeerTls | None, ports: TransportPorts | None = None) -> None:
        """`tls` None: plain connections without proof of identity, refused unless everything is on loopback."""
        if settings.queue_bytes < messages.MAX_FRAME_BYTES + HEADER_BYTES:
            raise ValueError(f"queue_bytes must hold one frame of {messages.MAX_FRAME_BYTES} bytes, found {settings.queue_bytes}")
        self._settings = settings
        self._tls = tls
        self._ports = ports or TransportPorts()
        self._clock = self._ports.clock
        self._notices = Notices(self._clock, settings.member_id)
        if tls is None and not is_loopback(split_address(settings.listen)[0]):
            raise ValueError(f"plain connections between members are for loopback only, found {settings.listen!r}; configure TLS")
        self._board = Board(self._clock, self._notices)
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._board.selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._links = Links(self._board, settings, self._ports, self.wake, plain=tls is None)
        self._acceptor: Acceptor | None = None
        self._handshakes_left = 0
        self._last_sent: tuple[AnyMessage | None, bytes] = (None, b"")
        self._closed = False

    def start(self) -> None:
        """Bind and listen. Raises RaftmetaError when the address cannot be used."""
        host, port = split_address(self._settings.listen)
        self._acceptor = Acceptor(host, port, self._settings.member_id)
        self._board.selector.register(self._acceptor.fileno(), selectors.EVENT_READ, self._acceptor)

    def address(self) -> str:
        """Where it listens, with the real port."""
        assert self._acceptor is not None, "start first"
        return join_address(*self._acceptor.address())

    def set_peers(self, peers: Mapping[str, str]) -> None:
        """Exactly these members may be linked from now on; the own id is ignored.

        Total, for addresses come from the replicated configuration: one that cannot be used is counted, logged and not dialled.
        """
        self._links.set_peers(peers)

    def require_feature(self, level: int) -> None:
        """From now on a member whose build cannot run this level gets no link."""
        self._links.required_feature = level

    def send(self, peer: str, message: AnyMessage) -> bool:
        """Queue it; False when there is no link or its queue is full. It leaves with `flush` or `poll`."""
        connection = self._board.live.get(peer)
        if connection is None:
            return False
        payload = self._encoded(message)
        if connection.queue.size + len(payload) + HEADER_BYTES > self._settings.queue_bytes:
            self._notices.count("queue_full")
            return False
        self._board.push(connection, payload, self._clock())
        return True

    def poll(self, timeout_s: float) -> list[PeerEvent]:
        """News of the links. Waits for sockets, `wake` or the timeout; may return early with nothing."""
        board = self._board
        self.flush()
        wait = 0.0 if board.events or board.unfinished else max(0.0, min(timeout_s, board.next_timer - self._clock()))
        self._handshakes_left = HANDSHAKES_PER_POLL
        for _ in range(ROUNDS_PER_POLL):
            ready = board.selector.select(wait)
            if not ready and not board.unfinished:
                break
            self._round(ready)
            if len(board.events) >= EVENTS_PER_POLL:
                break
            wait = 0.0
        now = self._clock()
        if now >= board.next_timer:
            self._run_timers(now)
        events, board.events = board.events, []
        return events

    def flush(self) -> None:
        """Write what is queued as far as the sockets take it."""
        if self._board.queued:
            now = self._clock()
            for connection in list(self._board.queued):
                self._board.flush(connection, now)

    def wake(self) -> None:
        """Make `poll` return; from any thread, also after `close`."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def queued_bytes(self, peer: str) -> int:
        connection = self._board.live.get(peer)
        return connection.queue.size if connection else 0

    def connected(self) -> frozenset[str]:
        return frozenset(self._board.live)

    def counters(self) -> Mapping[str, int]:
        """Since the start, by name; refusals as `refused_<reason>`."""
        return self._notices.counters()

    def close(self) -> None:
        """Write what can be written at once, then end everything. May be called twice."""
        if self._closed:
            return
        board = self._board
        self.flush()
        for peer in list(board.peers.values()):
            board.forget(peer)
        for connection in list(board.pending):
            board.drop(connection)
        if self._acceptor is not None:
            self._acceptor.close()
        board.selector.close()
        with self._wake_lock:
            self._closed = True
            os.close(self._wake_fd)

    def _round(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        board = self._board
        now = self._clock()
        unfinished, board.unfinished = board.unfinished, {}
        for connection in unfinished:
            self._service(connection, 0, now)
        for key, mask in ready:
            if isinstance(key.data, Connection):
                self._service(key.data, mask, now)
            elif key.data is None:
                os.eventfd_read(self._wake_fd)
                self._links.take_resolved(now)
            else:
                self._accept(key.data, now)

    def _accept(self, acceptor: Acceptor, now: float) -> None:
        board = self._board
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted = acceptor.accept()
            except Exhausted as error:
                board.selector.unregister(acceptor.fileno())
                acceptor.paused_until = now + PAUSE_S
                board.due(acceptor.paused_until)
                self._notices.warn("accept_paused", self._settings.listen, str(error))
                return
            if accepted is None:
                return
            sock, host, port = accepted
            oldest = victim(board.pending) if len(board.pending) >= self._settings.pending_connections else None
            if oldest is not None:
                board.refuse(oldest, Refused(Refusal.TOO_MANY_PENDING, f"limit {self._settings.pending_connections}"))
            origin = Origin(address=join_address(host, port), host=host, dialled=None, dial=0)
            connection = Connection(sock, origin, rules.MAX_HELLO_BYTES, now)
            board.pending[connection] = None
            board.watch(connection)
            board.due(now + self._settings.handshake_s)

    def _run_timers(self, now: float) -> None:
        board, acceptor = self._board, self._acceptor
        board.next_timer = float("inf")
        if acceptor is not None and acceptor.paused_until:
            if now >= acceptor.paused_until:
                acceptor.paused_until = 0.0
                board.selector.register(acceptor.fileno(), selectors.EVENT_READ, acceptor)
            else:
                board.due(acceptor.paused_until)
        self._links.run_timers(now)

    def _service(self, connection: Connection, mask: int, now: float) -> None:
        """Go on with one connection; whatever goes wrong ends only this one."""
        if connection.closed:
            return
        try:
            if connection.stage < Stage.HELLO and not self._advance(connection, now):
                return
            if mask & selectors.EVENT_WRITE:
                self._board.flush(connection, now)
            self._read(connection, now)
        except Refused as error:
            self._board.refuse(connection, error)
        except FrameTooLarge as error:
            self._board.refuse(connection, Refused(Refusal.FRAME_TOO_LARGE, str(error)))
        except OSError as error:
            self._board.lost(connection, str(error))
        self._board.watch(connection)

    def _advance(self, connection: Connection, now: float) -> bool:
        """One step of the handshake; True once it is done."""
        if self._handshakes_left <= 0:
            return False  # the selector reports it again
        self._handshakes_left -= 1
        inbound = connection.origin.inbound
        if connection.advance(lambda sock: self._stream(sock, server_side=inbound)):
            self._links.handshake_done(connection, now)
            return True
        self._board.watch(connection)
        return False

    def _stream(self, sock: socket.socket, *, server_side: bool) -> Stream:
        if self._tls is None:
            return PlainStream(sock)
        context = self._tls.server_context() if server_side else self._tls.client_context()
        return TlsStream(sock, context, server_side=server_side)

    def _read(self, connection: Connection, now: float) -> None:
        budget = READ_BYTES_PER_TURN
        while self._take_frames(connection, now):
            if budget <= 0:
                self._board.unfinished[connection] = None
                return
            count = connection.fill(now)
            if count == WOULD_BLOCK:
                return
            budget -= count
            if not connection.more_waits(count):
                self._take_frames(connection, now)
                return

    def _take_frames(self, connection: Connection, now: float) -> bool:
        """Hand on complete frames; False when the connection ended or the poll's share is used up."""
        events, reader = self._board.events, connection.reader
        while not connection.closed:
            if len(events) >= EVENTS_PER_POLL:
                self._board.unfinished[connection] = None
                return False
            frame = reader.next_frame()
            if frame is None:
                return True
            if connection.stage is not Stage.READY:
                self._links.take_hello(connection, frame, now)
            elif len(frame):
                self._message(connection, frame)
        return False

    def _message(self, connection: Connection, frame: memoryview) -> None:
        try:
            message = messages.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(Refusal.BAD_MESSAGE, str(error)) from error
        if self._ports.allowed(connection.peer, type(message)):
            self._board.events.append(Received(connection.peer, message))
        else:
            self._notices.warn("message_not_allowed", connection.peer, type(message).__name__)

    def _encoded(self, message: AnyMessage) -> bytes:
        """Encoded once when the same message goes to several peers in a row."""
        last, payload = self._last_sent
        if last is message:
            return payload
        payload = messages.encode(message)
        if len(payload) > messages.MAX_FRAME_BYTES:
            raise ValueError(f"{type(message).__name__} of {len(payload)} bytes, limit {messages.MAX_FRAME_BYTES}")
        self._last_sent = (message, payload)
        return payload
