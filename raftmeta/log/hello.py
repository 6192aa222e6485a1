"""The first frame of a connection, and the rule which of two connections between a pair of members lives.

Pure. A member proves who it is by its certificate; the hello must say the same, name the same cluster and speak the same protocol. Both
members may dial each other at the same moment; both ends then judge with the same facts and keep the same connection. The facts: each
process numbers its dials, and a hello carries the highest dial of the receiver that its sender has already processed. So "you dial me
although you saw mine" means that the other end lost it, and the new one replaces it; otherwise the dial of the smaller member id lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from raftmeta.log.messages import bounded_depth

PROTOCOL = 1
HELLO_TAG = 100  # messages of the log use 1..99
MAX_HELLO_BYTES = 64 << 10  # limit of any frame until the hello is accepted
RETIRED_INCARNATIONS = 16  # remembered per peer
RETURN_S = 10.0  # a member that runs dials again within a second or two

URI_SCHEME = "raftmeta://"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=HELLO_TAG, gc=False):
    protocol: int
    cluster_id: str
    member_id: str
    incarnation: int  # random u64 of the sender's process
    feature: int  # highest feature level the sender can run
    dial: int  # number of this connection, given by the member that opened it; rises within an incarnation
    seen_incarnation: int  # of the receiver, 0 when none
    seen_dial: int  # highest dial of that incarnation that the sender has processed


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello)


def encode(hello: Hello) -> bytes:
    return _encoder.encode(hello)


def decode(data: bytes | memoryview) -> Hello:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return bounded_depth(_decoder, data)


class Refusal(StrEnum):
    """Why a connection was ended before or after its hello; label of the counter and of the log line."""

    HANDSHAKE_TIMEOUT = "handshake_timeout"
    TOO_MANY_PENDING = "too_many_pending"
    BAD_TLS = "bad_tls"
    CERTIFICATE_EXPIRED = "certificate_expired"
    CERTIFICATE_NOT_YET_VALID = "certificate_not_yet_valid"
    CERTIFICATE_UNTRUSTED = "certificate_untrusted"
    CERTIFICATE_MISSING = "certificate_missing"
    CERTIFICATE_NAME = "certificate_name"
    REFUSED_BY_PEER = "refused_by_peer"
    BAD_HELLO = "bad_hello"
    WRONG_PROTOCOL = "wrong_protocol"
    WRONG_CLUSTER = "wrong_cluster"
    WRONG_MEMBER = "wrong_member"
    SELF_CONNECTION = "self_connection"
    UNKNOWN_MEMBER = "unknown_member"
    FEATURE_TOO_LOW = "feature_too_low"
    REPLAYED = "replayed"
    STALE_INCARNATION = "stale_incarnation"
    DUPLICATE = "duplicate"  # the other connection of the pair lives; not a fault
    BAD_MESSAGE = "bad_message"
    FRAME_TOO_LARGE = "frame_too_large"


class Refused(Exception):
    """The connection must end; `detail` says what was expected and what was found."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Identity(msgspec.Struct, frozen=True):
    """Who a certificate says its holder is."""

    cluster_id: str
    member_id: str


def member_uri(cluster_id: str, member_id: str) -> str:
    return f"{URI_SCHEME}{cluster_id}/member/{member_id}"


def identity_of(certificate: Mapping[str, object]) -> Identity:
    """The member of a verified certificate, in the form of `ssl.SSLSocket.getpeercert()`. Exactly one name of ours must be in it."""
    alternative = certificate.get("subjectAltName", ())
    names = [
        str(entry[1])
        for entry in (alternative if isinstance(alternative, Sequence) else ())
        if isinstance(entry, tuple) and len(entry) == 2 and entry[0] == "URI" and str(entry[1]).startswith(URI_SCHEME)
    ]
    if len(names) != 1:
        raise Refused(Refusal.CERTIFICATE_NAME, f"expected one {URI_SCHEME} name in the certificate, found {len(names)}")
    parts = names[0].removeprefix(URI_SCHEME).split("/")
    if len(parts) != 3 or parts[1] != "member" or not parts[0] or not parts[2]:
        raise Refused(Refusal.CERTIFICATE_NAME, f"expected {member_uri('CLUSTER', 'ID')}, found {names[0][:200]!r}")
    return Identity(cluster_id=parts[0], member_id=parts[2])


class Expectation(msgspec.Struct, frozen=True):
    """What this member demands of the other end."""

    cluster_id: str
    local_id: str
    peers: frozenset[str]
    dialled: str | None  # the peer that was dialled, None for an accepted connection
    feature: int = 0  # level of the cluster: what a build must be able to run, or it would make another state of the log


def check_identity(identity: Identity, expected: Expectation) -> None:
    """A certificate or hello names a member of this cluster that may be on the other end. Raises Refused."""
    if identity.cluster_id != expected.cluster_id:
        raise Refused(Refusal.WRONG_CLUSTER, f"expected cluster {expected.cluster_id!r}, found {identity.cluster_id[:128]!r}")
    found = identity.member_id
    if found == expected.local_id:
        raise Refused(Refusal.SELF_CONNECTION, f"member {found!r} is connected to itself")
    if expected.dialled is not None and found != expected.dialled:
        raise Refused(Refusal.WRONG_MEMBER, f"expected member {expected.dialled!r} at the address dialled, found {found[:128]!r}")
    if found not in expected.peers:
        raise Refused(Refusal.UNKNOWN_MEMBER, f"member {found[:128]!r} is not configured here")


def check_hello(hello: Hello, certified: Identity | None, expected: Expectation) -> None:
    """The hello agrees with the certificate (None: a plain connection) and with what is expected. Raises Refused."""
    if hello.protocol != PROTOCOL:
        raise Refused(Refusal.WRONG_PROTOCOL, f"expected protocol {PROTOCOL}, found {hello.protocol}")
    claimed = Identity(cluster_id=hello.cluster_id, member_id=hello.member_id)
    if certified is not None:
        check_identity(certified, expected)
    check_identity(claimed, expected)
    if certified is not None and claimed != certified:
        found = hello.member_id[:128]
        raise Refused(Refusal.WRONG_MEMBER, f"the certificate names member {certified.member_id!r}, the hello {found!r}")
    if hello.feature < expected.feature:
        detail = f"member {hello.member_id!r} runs a build up to feature level {hello.feature}, the cluster is at {expected.feature}"
        raise Refused(Refusal.FEATURE_TOO_LOW, detail)


class Link(msgspec.Struct, frozen=True):
    """One connection of a pair of members, as far as the rule needs it."""

    inbound: bool  # the peer opened it
    incarnation: int  # the peer's
    dial: int  # the opener's number


class PeerMemory(msgspec.Struct):
    """What a member remembers of one peer's connections."""

    seen_incarnation: int = 0
    seen_dial: int = 0
    linked_incarnation: int = 0  # of the newest link
    unlinked_at: float = float("-inf")  # when that ended, monotonic
    retired: deque[int] = msgspec.field(default_factory=lambda: deque(maxlen=RETIRED_INCARNATIONS))

    def note(self, hello: Hello, inbound: bool) -> None:
        """Call for every inbound hello that passed the checks, also when its connection is then dropped."""
        if inbound:
            self.seen_incarnation, self.seen_dial = hello.incarnation, hello.dial

    def linked(self, incarnation: int) -> None:
        """A link to this process of the peer is up; every other one of it is over."""
        if self.linked_incarnation not in (0, incarnation):
            self.retired.append(self.linked_incarnation)
        self.linked_incarnation = incarnation


def check_replay(hello: Hello, memory: PeerMemory) -> None:
    """An inbound hello's dial number rises within its incarnation. Raises Refused."""
    if hello.incarnation == memory.seen_incarnation and hello.dial <= memory.seen_dial:
        raise Refused(Refusal.REPLAYED, f"dial {hello.dial} of member {hello.member_id!r} was used; the last was {memory.seen_dial}")


def check_retired(hello: Hello, memory: PeerMemory, held: bool, now: float) -> None:
    """A process that another one of its member followed stays out. Raises Refused.

    Two that run under one name, a copied disk say, would else take turns whenever a link breaks. Only when the newer one has been away for
    RETURN_S may an older one return: the order in which two hellos were read may have been the wrong one.
    """
    if (
        hello.incarnation in memory.retired
        and hello.incarnation != memory.linked_incarnation
        and (held or now < memory.unlinked_at + RETURN_S)
    ):
        raise Refused(Refusal.STALE_INCARNATION, f"member {hello.member_id!r} restarted since; incarnation {hello.incarnation:016x}")


class Pair(msgspec.Struct, frozen=True):
    local_id: str
    local_incarnation: int
    peer_id: str


def peer_lost(hello: Hello, pair: Pair, dial: int) -> bool:
    """The peer processed our dial of that number before it sent this hello, so it has no such connection any more."""
    return hello.seen_incarnation == pair.local_incarnation and hello.seen_dial >= dial


def replaces(held: Link, candidate: Link, hello: Hello, pair: Pair) -> bool:
    """Whether the candidate takes the place of the live connection; `hello` is the candidate's."""
    if candidate.incarnation != held.incarnation or candidate.inbound == held.inbound:
        return True
    if candidate.inbound and peer_lost(hello, pair, held.dial):
        return True
    opener = pair.peer_id if candidate.inbound else pair.local_id
    return opener == min(pair.local_id, pair.peer_id)
