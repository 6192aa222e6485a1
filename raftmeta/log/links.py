"""Links to the configured peers: dial them, judge hellos, keep one live connection each, end those that went silent.

The rules of who may connect and which connection of a pair lives are pure and stand in `hello.py`; here they are carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from raftmeta.addresses import is_loopback, split_address
from raftmeta.log import hello as rules
from raftmeta.log import messages
from raftmeta.log.board import Board, Peer
from raftmeta.log.connection import Connection, Origin, Stage
from raftmeta.log.dialer import Resolver, Target, begin_connect, literal
from raftmeta.log.hello import Expectation, Hello, Link, Pair, Refusal, Refused
from raftmeta.log.peers import Connected
from raftmeta.log.settings import TransportPorts, TransportSettings

ANSWER_S = 0.5  # a hello that was not answered for so long is given up when the peer comes by itself; many round trips between zones


class Links:
    def __init__(self, board: Board, settings: TransportSettings, ports: TransportPorts, wake: Callable[[], None], plain: bool) -> None:
        self._board = board
        self._settings = settings
        self._plain = plain
        self._keepalive_s = min(settings.keepalive_s, settings.idle_s / 4)  # the peers have the same idle time
        self._rng = ports.rng
        self._notices = board.notices
        self._resolver = Resolver(ports.resolve, wake)
        self._dials = 0
        self.required_feature = 0

    def set_peers(self, peers: Mapping[str, str]) -> None:
        """Keep exactly these; an address that cannot be used is reported and not dialled."""
        board = self._board
        for gone in [peer for peer in board.peers.values() if peer.id not in peers]:
            board.forget(gone)
        for member_id, given in sorted(peers.items()):
            if member_id == self._settings.member_id:
                continue
            known, address = board.peers.get(member_id), self._usable(member_id, given)
            if known is None:
                board.peers[member_id] = Peer(member_id, address, self._rng)
            elif known.address != address:
                known.set_address(address)
                known.next_dial = 0.0
        board.next_timer = 0.0

    def _usable(self, member_id: str, address: str) -> str:
        try:
            host, _ = split_address(address)
        except ValueError as error:
            self._notices.warn("bad_peer_address", member_id, str(error))
            return ""
        if self._plain and not is_loopback(host):
            self._notices.warn("bad_peer_address", member_id, f"{address}: plain connections between members are for loopback only")
            return ""
        return address

    def expectation(self, connection: Connection) -> Expectation:
        own = self._settings
        return Expectation(own.cluster_id, own.member_id, frozenset(self._board.peers), connection.origin.dialled, self.required_feature)

    def handshake_done(self, connection: Connection, now: float) -> None:
        """Check the certificate's name; the member that dialled says hello first. Raises Refused."""
        if connection.identity is not None:
            rules.check_identity(connection.identity, self.expectation(connection))
        origin = connection.origin
        if origin.dialled is not None:
            self._push_hello(connection, self._board.peers[origin.dialled], origin.dial, now)

    def _push_hello(self, connection: Connection, peer: Peer, dial: int, now: float) -> None:
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
        self._board.push(connection, rules.encode(own), now)
        self._board.flush(connection, now)

    def take_hello(self, connection: Connection, frame: memoryview, now: float) -> None:
        """Judge the other end's hello; on success this connection is the peer's link."""
        try:
            hello = rules.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(Refusal.BAD_HELLO, str(error)) from error
        rules.check_hello(hello, connection.identity, self.expectation(connection))
        peer = self._board.peers[hello.member_id]
        inbound = connection.origin.inbound
        if inbound:
            rules.check_replay(hello, peer.memory)
        elif hello.dial != connection.origin.dial:
            raise Refused(Refusal.BAD_HELLO, f"expected an answer to dial {connection.origin.dial}, found {hello.dial}")
        rules.check_retired(hello, peer.memory, peer.live is not None, now)
        link = Link(inbound=inbound, incarnation=hello.incarnation, dial=hello.dial)
        pair = Pair(self._settings.member_id, self._settings.incarnation, peer.id)
        self._make_room(peer, link, hello, pair)
        if inbound:
            peer.memory.note(hello, inbound)
            if self._own_dial_lives(peer, link, hello, pair):
                raise Refused(Refusal.DUPLICATE, f"the dial of member {peer.id!r} that is under way lives")
            self._push_hello(connection, peer, hello.dial, now)
            if connection.closed:
                return
        self._establish(connection, peer, link, hello.feature)

    def _make_room(self, peer: Peer, link: Link, hello: Hello, pair: Pair) -> None:
        """The older link ends, or the candidate is refused."""
        held = peer.live
        if held is None:
            return
        assert held.link is not None
        restarted = link.incarnation != held.link.incarnation
        if not rules.replaces(held.link, link, hello, pair):
            peer.memory.note(hello, link.inbound)
            raise Refused(Refusal.DUPLICATE, f"the other connection with member {peer.id!r} lives")
        self._notices.info("link_replaced", peer=peer.id, restarted=int(restarted))
        self._board.drop(held)

    def _own_dial_lives(self, peer: Peer, link: Link, hello: Hello, pair: Pair) -> bool:
        """The peer reached us while we dial it. A dial whose hello went out a moment ago counts as a link; any other is given up."""
        dialling = peer.dialling
        if dialling is None:
            return False
        ours = Link(inbound=False, incarnation=link.incarnation, dial=dialling.origin.dial)
        waited_s = self._board.clock() - dialling.last_sent
        if dialling.stage is Stage.HELLO and waited_s < ANSWER_S and not rules.replaces(ours, link, hello, pair):
            return True
        self._board.drop(dialling)
        return False

    def _establish(self, connection: Connection, peer: Peer, link: Link, feature: int) -> None:
        connection.stage = Stage.READY
        connection.peer, connection.link = peer.id, link
        connection.reader.raise_limit(messages.MAX_FRAME_BYTES)
        self._board.pending.pop(connection, None)
        if peer.dialling is connection:
            peer.dialling = None
        peer.live = connection
        peer.memory.linked(link.incarnation)
        peer.backoff.reset()
        self._board.live[peer.id] = connection
        self._board.events.append(Connected(peer.id, link.incarnation, feature))
        self._notices.info("link_up", peer=peer.id, remote=connection.origin.address, inbound=int(link.inbound))
        self._board.due(0.0)

    def _dial(self, peer: Peer, now: float) -> None:
        peer.next_dial = now + peer.backoff.next_delay()
        target = literal(peer.host, peer.port)
        if target is None:
            self._resolver.request(peer.id, peer.host, peer.port)
        else:
            self._connect(peer, target, now)

    def take_resolved(self, now: float) -> None:
        for found in self._resolver.take():
            peer = self._board.peers.get(found.peer)
            if peer is None or (peer.host, peer.port) != (found.host, found.port) or peer.live or peer.dialling:
                continue
            if not found.targets:
                self._notices.warn("dial_failed", peer.id, f"{peer.address}: {found.error}")
                continue
            self._connect(peer, found.targets[peer.attempt % len(found.targets)], now)

    def _connect(self, peer: Peer, target: Target, now: float) -> None:
        peer.attempt += 1
        try:
            sock = begin_connect(target)
        except OSError as error:
            self._notices.warn("dial_failed", peer.id, f"{peer.address}: {error}")
            return
        self._dials += 1
        origin = Origin(address=peer.address, host=peer.host, dialled=peer.id, dial=self._dials)
        peer.dialling = Connection(sock, origin, rules.MAX_HELLO_BYTES, now)
        self._board.watch(peer.dialling)
        self._board.due(now + self._settings.connect_s)

    def run_timers(self, now: float) -> None:
        """Everything that time brings about; notes when to come again."""
        for connection in list(self._board.pending):
            self._check_handshake(connection, now)
        for peer in list(self._board.peers.values()):
            if peer.live is not None:
                self._check_link(peer.live, now)
            elif peer.dialling is not None:
                self._check_handshake(peer.dialling, now)
            elif peer.host and now >= peer.next_dial:
                self._dial(peer, now)
            if peer.live is None and peer.dialling is None and peer.host:
                self._board.due(max(peer.next_dial, now + 0.001))

    def _check_handshake(self, connection: Connection, now: float) -> None:
        own = self._settings
        connecting = connection.stage is Stage.CONNECTING and not connection.origin.inbound
        limit = own.connect_s if connecting else own.handshake_s
        if now < connection.opened + limit:
            self._board.due(connection.opened + limit)
        elif connecting:
            self._board.lost(connection, f"no connection within {limit} s")
        else:
            detail = f"expected a hello within {limit} s, found {connection.stage.name.lower()}"
            self._board.refuse(connection, Refused(Refusal.HANDSHAKE_TIMEOUT, detail))

    def _check_link(self, connection: Connection, now: float) -> None:
        own = self._settings
        unread = connection in self._board.unfinished
        if not unread and now >= connection.last_received + own.idle_s:
            self._board.lost(connection, f"nothing received for {own.idle_s} s")
            return
        if connection.queue.size and now >= connection.last_progress + own.stall_s:
            self._board.lost(connection, f"took nothing of {connection.queue.size} queued bytes for {own.stall_s} s")
            return
        if not connection.queue.size and now >= connection.last_sent + self._keepalive_s:
            self._board.push(connection, b"", now)
            self._board.flush(connection, now)
        self._board.due(now + self._keepalive_s if connection.queue.size else connection.last_sent + self._keepalive_s)
        self._board.due(now + own.idle_s if unread else connection.last_received + own.idle_s)
