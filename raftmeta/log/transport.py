"""Member-to-member links for the engine's thread: mutually authenticated, bounded, never waiting except in `poll`.

Everything but `wake` is called from one thread. A peer has at most one live link. Whatever a stranger or a broken peer does ends its own
connection, is counted and logged, and touches nobody else. A link that dies loses what was queued on it; the log's protocol repeats.
"""

from __future__ import annotations

import os
import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from raftmeta.log import hello as rules
from raftmeta.log import messages
from raftmeta.log.acceptor import ACCEPTS_PER_ROUND, PAUSE_S, Acceptor, Exhausted, join_address, split_address, victim
from raftmeta.log.connection import Connection, Origin, Stage
from raftmeta.log.dialer import Backoff, Resolve, Resolver, Target, begin_connect, literal, resolve
from raftmeta.log.frames import HEADER_BYTES, FrameTooLarge
from raftmeta.log.hello import Expectation, Hello, Link, Pair, PeerMemory, Refusal, Refused
from raftmeta.log.messages import AnyMessage
from raftmeta.log.notices import Notices
from raftmeta.log.peers import Connected, Disconnected, PeerEvent, Received
from raftmeta.log.streams import WOULD_BLOCK, PlainStream, Stream, TlsStream
from raftmeta.security.tls import PeerTls

__all__ = ["Connected", "Disconnected", "PeerEvent", "Received", "TlsTransport", "TransportPorts", "TransportSettings"]

ROUNDS_PER_POLL = 4  # looks at the sockets per poll while they have news; joins what arrives close together
EVENTS_PER_POLL = 4096
READ_BYTES_PER_TURN = 1 << 20  # of one connection before the others get their turn
HANDSHAKES_PER_POLL = 8  # a step costs up to a millisecond; strangers must not own the thread
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class TransportSettings(msgspec.Struct, frozen=True):
    """Times in seconds. `incarnation` is the process's random number; another one tells the peers that this member restarted."""

    cluster_id: str
    member_id: str
    listen: str  # host:port; port 0 takes a free one
    feature: int = 1  # highest feature level this build can run
    incarnation: int = msgspec.field(default_factory=lambda: secrets.randbelow((1 << 64) - 1) + 1)
    queue_bytes: int = 32 << 20  # waiting to be sent to one peer; must hold one message of MAX_FRAME_BYTES
    pending_connections: int = 64  # accepted, without a valid hello yet
    handshake_s: float = 5.0  # from accept to a valid hello
    connect_s: float = 1.0  # TCP connect of a dial; short, so that a healed path is tried again soon
    keepalive_s: float = 0.3  # silence before a keepalive is sent
    idle_s: float = 1.5  # silence of the peer that ends a link; about the election timeout
    stall_s: float = 10.0  # a peer that takes nothing of what is queued for so long is dropped


def _allow_all(peer: str, message_type: type[AnyMessage]) -> bool:
    return True


@dataclass(frozen=True)
class TransportPorts:
    """What the transport needs of the world beside sockets."""

    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)
    resolve: Resolve = resolve
    allowed: Callable[[str, type[AnyMessage]], bool] = _allow_all  # by role of the peer; refused messages are dropped and counted


class _Peer:
    """What the transport knows of one configured peer."""

    def __init__(self, member_id: str, address: str, rng: random.Random) -> None:
        self.id = member_id
        self.memory = PeerMemory()
        self.backoff = Backoff(rng)
        self.live: Connection | None = None
        self.dialling: Connection | None = None
        self.next_dial = 0.0
        self.attempt = 0
        self.set_address(address)

    def set_address(self, address: str) -> None:
        self.address = address
        self.host, self.port = split_address(address)


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
        self._require_proof(settings.listen)
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._resolver = Resolver(self._ports.resolve, self.wake)
        self._acceptor: Acceptor | None = None
        self._peers: dict[str, _Peer] = {}
        self._live: dict[str, Connection] = {}
        self._pending: dict[Connection, None] = {}  # accepted, without a hello; in order of arrival
        self._unfinished: dict[Connection, None] = {}  # hold bytes that the selector will not report again
        self._queued: dict[Connection, None] = {}
        self._events: list[PeerEvent] = []
        self._dials = 0
        self._handshakes_left = 0
        self._next_timer = 0.0
        self._last_sent: tuple[AnyMessage | None, bytes] = (None, b"")
        self._closed = False

    # --- the engine's calls -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and listen. Raises RaftmetaError when the address cannot be used."""
        host, port = split_address(self._settings.listen)
        self._acceptor = Acceptor(host, port, self._settings.member_id)
        self._selector.register(self._acceptor.fileno(), selectors.EVENT_READ, self._acceptor)

    def address(self) -> str:
        """Where it listens, with the real port."""
        assert self._acceptor is not None, "start first"
        return join_address(*self._acceptor.address())

    def set_peers(self, peers: Mapping[str, str]) -> None:
        """Exactly these members may be linked from now on; own id is ignored. Raises ValueError for a bad address, changing nothing."""
        for address in peers.values():
            split_address(address)
            self._require_proof(address)
        for gone in [peer for peer in self._peers.values() if peer.id not in peers]:
            self._forget(gone)
        for member_id, address in sorted(peers.items()):
            known = self._peers.get(member_id)
            if member_id == self._settings.member_id:
                continue
            if known is None:
                self._peers[member_id] = _Peer(member_id, address, self._ports.rng)
            elif known.address != address:
                known.set_address(address)
                known.next_dial = 0.0
        self._next_timer = 0.0

    def send(self, peer: str, message: AnyMessage) -> bool:
        connection = self._live.get(peer)
        if connection is None:
            return False
        payload = self._encoded(message)
        if connection.queue.size + len(payload) + HEADER_BYTES > self._settings.queue_bytes:
            self._notices.count("queue_full")
            return False
        connection.push(payload, self._clock())
        self._queued[connection] = None
        return True

    def poll(self, timeout_s: float) -> list[PeerEvent]:
        """News of the links. Waits for sockets, `wake` or the timeout; may return early with nothing."""
        self.flush()
        now = self._clock()
        wait = 0.0 if self._events or self._unfinished else max(0.0, min(timeout_s, self._next_timer - now))
        self._handshakes_left = HANDSHAKES_PER_POLL
        for _ in range(ROUNDS_PER_POLL):
            ready = self._selector.select(wait)
            if not ready and not self._unfinished:
                break
            self._round(ready)
            if len(self._events) >= EVENTS_PER_POLL:
                break
            wait = 0.0
        now = self._clock()
        if now >= self._next_timer:
            self._run_timers(now)
        events, self._events = self._events, []
        return events

    def flush(self) -> None:
        """Write what is queued as far as the sockets take it."""
        now = self._clock()
        for connection in list(self._queued):
            self._flush(connection, now)

    def wake(self) -> None:
        """Make `poll` return; from any thread."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def queued_bytes(self, peer: str) -> int:
        connection = self._live.get(peer)
        return connection.queue.size if connection else 0

    def connected(self) -> frozenset[str]:
        return frozenset(self._live)

    def counters(self) -> Mapping[str, int]:
        """Since the start, by name; refusals as `refused_<reason>`."""
        return self._notices.counters()

    def close(self) -> None:
        """Write what can be written at once, then end everything. May be called twice."""
        if self._closed:
            return
        self.flush()
        for peer in list(self._peers.values()):
            self._forget(peer)
        for connection in list(self._pending):
            self._drop(connection)
        if self._acceptor is not None:
            self._acceptor.close()
        self._selector.close()
        with self._wake_lock:
            self._closed = True
            os.close(self._wake_fd)

    # --- sockets ------------------------------------------------------------------------------------------------------------------

    def _round(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        now = self._clock()
        unfinished, self._unfinished = list(self._unfinished), {}
        for connection in unfinished:
            self._service(connection, 0, now)
        for key, mask in ready:
            if isinstance(key.data, Connection):
                self._service(key.data, mask, now)
            elif key.data is None:
                os.eventfd_read(self._wake_fd)
                self._take_resolved(now)
            else:
                self._accept(now)

    def _accept(self, now: float) -> None:
        acceptor = self._acceptor
        assert acceptor is not None
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted = acceptor.accept()
            except Exhausted as error:
                self._selector.unregister(acceptor.fileno())
                acceptor.paused_until = now + PAUSE_S
                self._at(acceptor.paused_until)
                self._notices.warn("accept_paused", self._settings.listen, str(error))
                return
            if accepted is None:
                return
            sock, host, port = accepted
            if len(self._pending) >= self._settings.pending_connections:
                oldest = victim(self._pending)
                if oldest is not None:
                    self._refuse(oldest, Refused(Refusal.TOO_MANY_PENDING, f"limit {self._settings.pending_connections}"))
            origin = Origin(address=join_address(host, port), host=host, dialled=None, dial=0)
            connection = Connection(sock, origin, rules.MAX_HELLO_BYTES, now)
            self._pending[connection] = None
            self._watch(connection)
            self._at(now + self._settings.handshake_s)

    def _service(self, connection: Connection, mask: int, now: float) -> None:
        """Go on with one connection; whatever goes wrong ends only this one."""
        if connection.closed:
            return
        try:
            if connection.stage < Stage.HELLO and not self._advance(connection, now):
                return
            if mask & selectors.EVENT_WRITE:
                connection.write_blocked = False
                self._flush(connection, now)
            self._read(connection, now)
        except Refused as error:
            self._refuse(connection, error)
        except FrameTooLarge as error:
            self._refuse(connection, Refused(Refusal.FRAME_TOO_LARGE, str(error)))
        except OSError as error:
            self._lost(connection, str(error))
        self._watch(connection)

    def _advance(self, connection: Connection, now: float) -> bool:
        if self._handshakes_left <= 0:
            return False  # the selector reports it again
        self._handshakes_left -= 1
        inbound = connection.origin.inbound
        if not connection.advance(lambda sock: self._stream(sock, server_side=inbound)):
            self._watch(connection)
            return False
        if connection.identity is not None:
            rules.check_identity(connection.identity, self._expectation(connection))
        if not inbound:
            peer = self._peers[connection.origin.dialled or ""]
            self._push_hello(connection, peer, connection.origin.dial, now)
        return True

    def _stream(self, sock: socket.socket, *, server_side: bool) -> Stream:
        if self._tls is None:
            return PlainStream(sock)
        context = self._tls.server_context() if server_side else self._tls.client_context()
        return TlsStream(sock, context, server_side=server_side)

    def _read(self, connection: Connection, now: float) -> None:
        budget = READ_BYTES_PER_TURN
        while self._take_frames(connection, now):
            if budget <= 0:
                self._unfinished[connection] = None
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
        reader = connection.reader
        while not connection.closed:
            if len(self._events) >= EVENTS_PER_POLL:
                self._unfinished[connection] = None
                return False
            frame = reader.next_frame()
            if frame is None:
                return True
            if connection.stage is Stage.READY:
                if len(frame):
                    self._message(connection, frame)
            else:
                self._hello(connection, frame, now)
        return False

    def _message(self, connection: Connection, frame: memoryview) -> None:
        try:
            message = messages.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(Refusal.BAD_MESSAGE, str(error)) from error
        if self._ports.allowed(connection.peer, type(message)):
            self._events.append(Received(connection.peer, message))
        else:
            self._notices.warn("message_not_allowed", connection.peer, type(message).__name__)

    def _flush(self, connection: Connection, now: float) -> None:
        try:
            if connection.flush(now):
                self._queued.pop(connection, None)
        except Refused as error:
            self._refuse(connection, error)
        except OSError as error:
            self._lost(connection, str(error))
        self._watch(connection)

    # --- hellos -------------------------------------------------------------------------------------------------------------------

    def _push_hello(self, connection: Connection, peer: _Peer, dial: int, now: float) -> None:
        own = Hello(
            protocol=rules.PROTOCOL,
            cluster_id=self._settings.cluster_id,
            member_id=self._settings.member_id,
            incarnation=self._settings.incarnation,
            feature=self._settings.feature,
            dial=dial,
            seen_incarnation=peer.memory.seen_incarnation,
            seen_dial=peer.memory.seen_dial,
        )
        connection.push(rules.encode(own), now)
        self._queued[connection] = None
        self._flush(connection, now)

    def _hello(self, connection: Connection, frame: memoryview, now: float) -> None:
        """Judge the other end's hello; on success this connection is the peer's link."""
        try:
            hello = rules.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(Refusal.BAD_HELLO, str(error)) from error
        rules.check_hello(hello, connection.identity, self._expectation(connection))
        peer = self._peers[hello.member_id]
        inbound = connection.origin.inbound
        if inbound:
            rules.check_replay(hello, peer.memory)
        elif hello.dial != connection.origin.dial:
            raise Refused(Refusal.BAD_HELLO, f"expected an answer to dial {connection.origin.dial}, found {hello.dial}")
        link = Link(inbound=inbound, incarnation=hello.incarnation, dial=hello.dial)
        pair = Pair(self._settings.member_id, self._settings.incarnation, peer.id)
        self._make_room(peer, link, hello, pair)
        if inbound:
            peer.memory.note(hello, inbound)
            self._settle_dial(peer, link, hello, pair)
            self._push_hello(connection, peer, hello.dial, now)
            if connection.closed:
                return
        self._establish(connection, peer, link)

    def _make_room(self, peer: _Peer, link: Link, hello: Hello, pair: Pair) -> None:
        """The older link ends, or the candidate is refused."""
        held = peer.live
        if held is None:
            return
        assert held.link is not None
        restarted = link.incarnation != held.link.incarnation
        if restarted and link.incarnation in peer.memory.retired:
            raise Refused(Refusal.STALE_INCARNATION, f"member {peer.id!r} restarted since; incarnation {link.incarnation:016x}")
        if not rules.replaces(held.link, link, hello, pair):
            peer.memory.note(hello, link.inbound)
            raise Refused(Refusal.DUPLICATE, f"the other connection with member {peer.id!r} lives")
        if restarted:
            peer.memory.retired.append(held.link.incarnation)
        self._notices.info("link_replaced", peer=peer.id, restarted=int(restarted))
        self._drop(held)

    def _settle_dial(self, peer: _Peer, link: Link, hello: Hello, pair: Pair) -> None:
        """The peer reached us while we dial it. A dial whose hello is out counts as a link; an earlier one is given up."""
        dialling = peer.dialling
        if dialling is None:
            return
        ours = Link(inbound=False, incarnation=link.incarnation, dial=dialling.origin.dial)
        if dialling.stage is Stage.HELLO and not rules.replaces(ours, link, hello, pair):
            raise Refused(Refusal.DUPLICATE, f"the dial of member {peer.id!r} that is under way lives")
        self._drop(dialling)

    def _establish(self, connection: Connection, peer: _Peer, link: Link) -> None:
        connection.stage = Stage.READY
        connection.peer, connection.link = peer.id, link
        connection.reader.raise_limit(messages.MAX_FRAME_BYTES)
        self._pending.pop(connection, None)
        if peer.dialling is connection:
            peer.dialling = None
        peer.live = connection
        peer.backoff.reset()
        self._live[peer.id] = connection
        self._events.append(Connected(peer.id, link.incarnation))
        self._notices.info("link_up", peer=peer.id, remote=connection.origin.address, inbound=int(link.inbound))
        self._at(0.0)

    def _expectation(self, connection: Connection) -> Expectation:
        own = self._settings
        return Expectation(own.cluster_id, own.member_id, frozenset(self._peers), connection.origin.dialled)

    # --- dials and times ----------------------------------------------------------------------------------------------------------

    def _dial(self, peer: _Peer, now: float) -> None:
        peer.next_dial = now + peer.backoff.next_delay()
        target = literal(peer.host, peer.port)
        if target is None:
            self._resolver.request(peer.id, peer.host, peer.port)
        else:
            self._connect(peer, target, now)

    def _take_resolved(self, now: float) -> None:
        for found in self._resolver.take():
            peer = self._peers.get(found.peer)
            if peer is None or (peer.host, peer.port) != (found.host, found.port) or peer.live or peer.dialling:
                continue
            if not found.targets:
                self._notices.warn("dial_failed", peer.id, f"{peer.address}: {found.error}")
                continue
            self._connect(peer, found.targets[peer.attempt % len(found.targets)], now)

    def _connect(self, peer: _Peer, target: Target, now: float) -> None:
        peer.attempt += 1
        try:
            sock = begin_connect(target)
        except OSError as error:
            self._notices.warn("dial_failed", peer.id, f"{peer.address}: {error}")
            return
        self._dials += 1
        origin = Origin(address=peer.address, host=peer.host, dialled=peer.id, dial=self._dials)
        peer.dialling = Connection(sock, origin, rules.MAX_HELLO_BYTES, now)
        self._watch(peer.dialling)

    def _run_timers(self, now: float) -> None:
        self._next_timer = now + 1.0
        acceptor = self._acceptor
        if acceptor is not None and acceptor.paused_until:
            if now >= acceptor.paused_until:
                acceptor.paused_until = 0.0
                self._selector.register(acceptor.fileno(), selectors.EVENT_READ, acceptor)
            else:
                self._at(acceptor.paused_until)
        for connection in list(self._pending):
            self._check_handshake(connection, now)
        for peer in list(self._peers.values()):
            if peer.live is not None:
                self._check_link(peer.live, now)
            elif peer.dialling is not None:
                self._check_handshake(peer.dialling, now)
            elif now >= peer.next_dial:
                self._dial(peer, now)
            if peer.live is None and peer.dialling is None:
                self._at(max(peer.next_dial, now + 0.001))

    def _check_handshake(self, connection: Connection, now: float) -> None:
        own = self._settings
        limit = own.connect_s if connection.stage is Stage.CONNECTING and not connection.origin.inbound else own.handshake_s
        if now >= connection.opened + limit:
            self._refuse(connection, Refused(Refusal.HANDSHAKE_TIMEOUT, f"{connection.stage.name.lower()} took longer than {limit} s"))
        else:
            self._at(connection.opened + limit)

    def _check_link(self, connection: Connection, now: float) -> None:
        own = self._settings
        unread = connection in self._unfinished
        if not unread and now >= connection.last_received + own.idle_s:
            self._lost(connection, f"nothing received for {own.idle_s} s")
            return
        if connection.queue.size and now >= connection.last_progress + own.stall_s:
            self._lost(connection, f"took nothing of {connection.queue.size} queued bytes for {own.stall_s} s")
            return
        if not connection.queue.size and now >= connection.last_sent + own.keepalive_s:
            connection.push(b"", now)
            self._queued[connection] = None
            self._flush(connection, now)
        self._at(now + own.keepalive_s if connection.queue.size else connection.last_sent + own.keepalive_s)
        self._at(now + own.idle_s if unread else connection.last_received + own.idle_s)

    def _at(self, when: float) -> None:
        self._next_timer = min(self._next_timer, when)

    # --- ends ---------------------------------------------------------------------------------------------------------------------

    def _refuse(self, connection: Connection, refused: Refused) -> None:
        if connection.closed:
            return
        if refused.reason is Refusal.DUPLICATE:
            self._notices.count("refused_duplicate")
        else:
            place = connection.peer or (connection.origin.dialled or connection.origin.host)
            self._notices.warn(f"refused_{refused.reason}", place, f"{connection.origin.address}: {refused.detail}")
        self._drop(connection)

    def _lost(self, connection: Connection, detail: str) -> None:
        if connection.stage is Stage.READY:
            self._notices.info("link_down", peer=connection.peer, detail=detail)
        elif connection.origin.inbound:
            self._notices.count("pending_closed")
        else:
            self._notices.warn("dial_failed", connection.origin.dialled or "", f"{connection.origin.address}: {detail}")
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close it and forget it everywhere; a live link's end becomes an event."""
        if connection.closed:
            return
        if connection.registered_mask:
            self._selector.unregister(connection.descriptor)
        connection.close()
        for table in (self._pending, self._unfinished, self._queued):
            table.pop(connection, None)
        peer = self._peers.get(connection.peer or connection.origin.dialled or "")
        if peer is None:
            return
        now = self._clock()
        if peer.live is connection:
            peer.live = None
            del self._live[peer.id]
            self._events.append(Disconnected(peer.id))
            peer.next_dial = now + peer.backoff.next_delay()
        elif peer.dialling is connection:
            peer.dialling = None
        self._at(max(peer.next_dial, now))

    def _forget(self, peer: _Peer) -> None:
        for connection in (peer.dialling, peer.live):
            if connection is not None:
                self._drop(connection)
        del self._peers[peer.id]

    def _watch(self, connection: Connection) -> None:
        """Tell the selector what the connection waits for, when that changed."""
        if connection.closed:
            return
        mask = connection.interest()
        if mask == connection.registered_mask:
            return
        if connection.registered_mask:
            self._selector.modify(connection.descriptor, mask, connection)
        else:
            self._selector.register(connection.descriptor, mask, connection)
        connection.registered_mask = mask

    def _require_proof(self, address: str) -> None:
        if self._tls is None and split_address(address)[0] not in LOOPBACK:
            raise ValueError(f"plain connections between members are for loopback only, found {address!r}; configure TLS")

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
