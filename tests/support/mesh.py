"""Transports of several members on loopback, driven from one thread with bounded loops, and raw connections that misbehave.

Nobody sleeps: `pump` polls every transport in turn until a condition holds or its bound is used up. Each member has a clock of its own
that a test moves forward, so deadlines pass without waiting.
"""

from __future__ import annotations

import random
import socket
import ssl
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from raftmeta.addresses import split_address
from raftmeta.log import hello as rules
from raftmeta.log.hello import Hello
from raftmeta.log.messages import AnyMessage, ReadIndex
from raftmeta.log.transport import PeerEvent, Received, TlsTransport, TransportPorts, TransportSettings
from raftmeta.security.tls import PeerTls, TlsFiles, peer_context
from tests.support.certificates import TestAuthority

BOUND_S = 20.0  # generous: the machine may be busy; nothing waits for it when all is well
CALM = {"idle_s": 1e6, "keepalive_s": 0.2, "stall_s": 1e6, "handshake_s": 1e6, "connect_s": 1e6}


class Clock:
    """The machine's clock plus what the test added."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


class Member:
    def __init__(self, transport: TlsTransport, clock: Clock, files: TlsFiles | None, settings: TransportSettings) -> None:
        self.transport = transport
        self.clock = clock
        self.files = files
        self.settings = settings
        self.events: list[PeerEvent] = []
        self.polled = True  # False: the member hangs

    def received(self) -> list[tuple[str, AnyMessage]]:
        return [(event.peer, event.message) for event in self.events if isinstance(event, Received)]

    def links(self) -> list[PeerEvent]:
        return [event for event in self.events if not isinstance(event, Received)]

    def count(self, name: str) -> int:
        return self.transport.counters().get(name, 0)


class Mesh:
    """Use as a context manager; closes what it opened."""

    def __init__(self, directory: Path, cluster_id: str = "c1") -> None:
        self.authority = TestAuthority(directory / "pki", cluster_id)
        self.members: dict[str, Member] = {}
        self._opened: list[TlsTransport] = []
        self._raw: list[socket.socket] = []

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._raw:
            sock.close()
        for transport in self._opened:
            transport.close()

    def add(self, member_id: str, *, files: TlsFiles | None = None, ports: TransportPorts | None = None, **settings: object) -> Member:
        """A started member without peers; a second one of the same id takes the first one's place in `members`."""
        files = files or self.authority.member(member_id)
        return self._add(member_id, files, ports, settings)

    def add_plain(self, member_id: str) -> Member:
        return self._add(member_id, None, None, {})

    def _add(self, member_id: str, files: TlsFiles | None, ports: TransportPorts | None, changes: dict[str, object]) -> Member:
        base = TransportSettings(cluster_id=self.authority.cluster_id, member_id=member_id, listen="127.0.0.1:0")
        settings: TransportSettings = msgspec.structs.replace(base, **{**CALM, **changes})
        clock = Clock()
        ports = ports or TransportPorts(clock=clock, rng=random.Random(member_id))
        transport = TlsTransport(settings, PeerTls(files) if files else None, ports)
        transport.start()
        self._opened.append(transport)
        member = Member(transport, clock, files, settings)
        self.members[member_id] = member
        return member

    def addresses(self) -> dict[str, str]:
        return {member_id: member.transport.address() for member_id, member in self.members.items()}

    def introduce(self) -> None:
        """Everybody gets everybody's address."""
        for member in self.members.values():
            member.transport.set_peers(self.addresses())

    def trio(self, **settings: object) -> tuple[Member, Member, Member]:
        """Members a, b, c, linked."""
        for member_id in "abc":
            self.add(member_id, **settings)  # type: ignore[arg-type]
        self.introduce()
        self.pump(self.linked)
        return self.members["a"], self.members["b"], self.members["c"]

    def linked(self) -> bool:
        return all(member.transport.connected() == self.members.keys() - {name} for name, member in self.members.items())

    def turn(self) -> None:
        """Every member looks at its sockets once; the last one waits a moment, so that the loop does not spin."""
        polled = [member for member in self.members.values() if member.polled]
        for number, member in enumerate(polled, 1):
            member.events += member.transport.poll(0.001 if number == len(polled) else 0.0)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def pump(self, until: Callable[[], object]) -> None:
        end = time.monotonic() + BOUND_S
        while not until():
            if time.monotonic() > end:
                raise AssertionError({name: (member.events, member.transport.counters()) for name, member in self.members.items()})
            self.turn()

    def talk(self, sender: str, receiver: str) -> None:
        """One message gets through."""
        message = ReadIndex(id=random.getrandbits(60))
        target = self.members[receiver]
        self.pump(lambda: self.members[sender].transport.send(receiver, message))
        self.pump(lambda: (sender, message) in target.received())

    def everybody_talks(self) -> None:
        for sender in self.members:
            for receiver in self.members:
                if sender != receiver:
                    self.talk(sender, receiver)

    def dial(self, member_id: str) -> RawConnection:
        """A bare TCP connection to a member's port."""
        sock = socket.create_connection(split_address(self.members[member_id].transport.address()))
        sock.setblocking(False)
        self._raw.append(sock)
        return RawConnection(self, sock)

    def dial_tls(self, member_id: str, files: TlsFiles | None) -> RawConnection:
        """A TLS connection by hand; its handshake is done on this end. `files` None: without a certificate."""
        raw = self.dial(member_id)
        raw.start_tls(client_context(files, self.authority))
        self._raw.append(raw.sock)
        return raw

    def take(self, listener: socket.socket, files: TlsFiles) -> RawConnection:
        """The next connection to a listener of the test, with the handshake of a member done."""
        sock, _ = listener.accept()
        sock.setblocking(False)
        raw = RawConnection(self, sock)
        raw.start_tls(peer_context(files, server=True), server_side=True)
        self._raw.append(raw.sock)
        return raw


def client_context(files: TlsFiles | None, authority: TestAuthority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.directory / "ca.pem")
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


class RawConnection:
    """The other end of a member's connection, in the hands of a test."""

    def __init__(self, mesh: Mesh, sock: socket.socket) -> None:
        self.mesh = mesh
        self.sock = sock
        self.received = b""
        self.ended = False

    def start_tls(self, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        sock = context.wrap_socket(self.sock, server_side=server_side, do_handshake_on_connect=False)
        self.sock = sock

        def step() -> bool:
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                return False
            return True

        self.mesh.pump(step)

    def send(self, data: bytes) -> None:
        """As much as goes; a connection that the member ended is no error."""
        try:
            self.sock.sendall(data)
        except OSError:
            self.ended = True

    def hello(self, claimed: str, /, **changes: object) -> None:
        base = Hello(rules.PROTOCOL, self.mesh.authority.cluster_id, claimed, 7, 1, 1, 0, 0)
        self.send(frame(rules.encode(msgspec.structs.replace(base, **changes))))

    def read(self) -> bytes:
        """What has arrived so far."""
        while not self.ended:
            try:
                data = self.sock.recv(1 << 16)
            except (BlockingIOError, ssl.SSLWantReadError):
                break
            except OSError:
                data = b""
            self.ended = not data
            self.received += data
        return self.received

    def is_closed(self) -> bool:
        self.read()
        return self.ended

    def close(self) -> None:
        self.sock.close()
