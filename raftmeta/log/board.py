"""The open connections of one transport: what the selector watches, what is queued, what is due, and how a connection ends.

Whoever ends a connection does it here, so that it leaves every table at once and the end of a live link becomes an event exactly once.
"""

from __future__ import annotations

import random
import selectors
from collections.abc import Callable

from raftmeta.addresses import split_address
from raftmeta.log.connection import Connection
from raftmeta.log.dialer import Backoff
from raftmeta.log.hello import PeerMemory, Refusal, Refused
from raftmeta.log.notices import Notices
from raftmeta.log.peers import Disconnected, PeerEvent


class Peer:
    """What the transport knows of one configured peer. At most one of `live` and a useful `dialling` exists."""

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
        """ "" when nothing is known of where the peer is: it may still come to us."""
        self.address = address
        self.host, self.port = split_address(address) if address else ("", 0)


class Board:
    """Mutable; owned by the transport's thread."""

    def __init__(self, clock: Callable[[], float], notices: Notices) -> None:
        self.clock = clock
        self.notices = notices
        self.selector = selectors.DefaultSelector()
        self.events: list[PeerEvent] = []
        self.peers: dict[str, Peer] = {}
        self.live: dict[str, Connection] = {}
        self.pending: dict[Connection, None] = {}  # accepted, without a hello; in order of arrival
        self.unfinished: dict[Connection, None] = {}  # hold bytes that the selector will not report again
        self.queued: dict[Connection, None] = {}  # have something to write
        self.next_timer = 0.0

    def due(self, when: float) -> None:
        """Timers run at this time at the latest."""
        self.next_timer = min(self.next_timer, when)

    def watch(self, connection: Connection) -> None:
        """Tell the selector what the connection waits for, when that changed."""
        if connection.closed:
            return
        mask = connection.interest()
        if mask == connection.registered_mask:
            return
        if connection.registered_mask:
            self.selector.modify(connection.descriptor, mask, connection)
        else:
            self.selector.register(connection.descriptor, mask, connection)
        connection.registered_mask = mask

    def push(self, connection: Connection, payload: bytes, now: float) -> None:
        connection.push(payload, now)
        self.queued[connection] = None

    def flush(self, connection: Connection, now: float) -> None:
        """Write as far as the socket takes it; a broken connection ends."""
        try:
            if connection.flush(now):
                self.queued.pop(connection, None)
        except Refused as error:
            self.refuse(connection, error)
        except OSError as error:
            self.lost(connection, str(error))
        self.watch(connection)

    def refuse(self, connection: Connection, refused: Refused) -> None:
        """End it for a reason that is the other end's doing."""
        if connection.closed:
            return
        if refused.reason is Refusal.DUPLICATE:
            self.notices.count("refused_duplicate")
        else:
            place = connection.peer or (connection.origin.dialled or connection.origin.host)
            self.notices.warn(f"refused_{refused.reason}", place, f"{connection.origin.address}: {refused.detail}")
        self.drop(connection)

    def lost(self, connection: Connection, detail: str) -> None:
        """End it because it broke or went silent."""
        if connection.closed:
            return
        if connection.peer:
            self.notices.info("link_down", peer=connection.peer, detail=detail)
        elif connection.origin.inbound:
            self.notices.count("pending_closed")
        else:
            self.notices.warn("dial_failed", connection.origin.dialled or "", f"{connection.origin.address}: {detail}")
        self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close it and forget it everywhere."""
        if connection.closed:
            return
        if connection.registered_mask:
            self.selector.unregister(connection.descriptor)
        connection.close()
        for table in (self.pending, self.unfinished, self.queued):
            table.pop(connection, None)
        peer = self.peers.get(connection.peer or connection.origin.dialled or "")
        if peer is None:
            return
        now = self.clock()
        if peer.live is connection:
            peer.live, peer.memory.unlinked_at = None, now
            del self.live[peer.id]
            self.events.append(Disconnected(peer.id))
            peer.next_dial = now + peer.backoff.next_delay()
        elif peer.dialling is connection:
            peer.dialling = None
        self.due(max(peer.next_dial, now))

    def forget(self, peer: Peer) -> None:
        """The peer is no longer configured."""
        for connection in (peer.dialling, peer.live):
            if connection is not None:
                self.drop(connection)
        del self.peers[peer.id]
