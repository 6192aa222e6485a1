"""The closed schema of what members say to each other.

One frame is a u32 little-endian length and one msgpack array whose first element is the tag; anything that does not decode to one of these
types ends the connection. Who sent a message is the authenticated name of the connection, never a field. `round` numbers the leader's
heartbeats within its term: an acknowledgement that repeats it proves that the follower still followed when that round was sent.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")

MAX_COMMAND_BYTES = 4 << 20  # one encoded command
MAX_ENTRY_BYTES = 8 << 20  # one batch of commands; a batch closes at this size
MAX_FRAME_BYTES = 16 << 20  # one message; an append closes at this size
MAX_CHUNK_BYTES = 1 << 20  # data of one snapshot chunk
MAX_GOSSIP_BYTES = 64 << 10


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    index: int
    term: int
    payload: bytes  # first byte is the opcode of the engine


class AppendEntries(Message, frozen=True, tag=1):
    term: int
    prev_index: int
    prev_term: int
    commit_index: int
    round: int
    entries: tuple[Entry, ...]


class AppendReply(Message, frozen=True, tag=2):
    """`matched` tells that the follower holds, synced, what the leader holds up to next_index - 1. A refusal asks for next_index."""

    term: int
    matched: bool
    next_index: int
    round: int
    room: bool = True  # the sender could take another entry (D4); a leader without room looks for such a member


class RequestVote(Message, frozen=True, tag=3):
    term: int
    last_index: int
    last_term: int
    transfer: bool  # sent on the leader's own request; exempt from stickiness


class VoteReply(Message, frozen=True, tag=4):
    term: int
    granted: bool


class PreVote(Message, frozen=True, tag=5):
    term: int  # the sender's current term; it would stand in term + 1
    last_index: int
    last_term: int


class PreVoteReply(Message, frozen=True, tag=6):
    term: int
    asked_term: int
    granted: bool
    empty: bool = False  # the sender's log holds nothing and never did: what a member that would form the cluster must hear of everybody


class SnapshotChunk(Message, frozen=True, tag=7):
    term: int
    index: int
    index_term: int
    size_bytes: int  # of the whole snapshot
    sha256: bytes  # of the whole snapshot
    offset: int
    data: bytes
    round: int


class SnapshotReply(Message, frozen=True, tag=8):
    term: int
    index: int
    next_offset: int  # where the leader goes on; size_bytes once everything is here
    installed: bool
    round: int


class TimeoutNow(Message, frozen=True, tag=9):
    """The leader asks the receiver to stand for election at once."""

    term: int


class Proposal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int  # unique within the sender's incarnation
    request_id: str
    principal: str
    source: str
    body: bytes  # msgpack of a commands.Body


class Forward(Message, frozen=True, tag=10):
    proposals: tuple[Proposal, ...]


class ProposalReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int
    code: str  # "ok": outcome holds a types.Outcome; else not_applied, unknown_outcome, no_leader, overloaded, forbidden
    outcome: bytes
    index: int  # log index of the entry, 0 when there is none


class ForwardReply(Message, frozen=True, tag=11):
    replies: tuple[ProposalReply, ...]


class ReadIndex(Message, frozen=True, tag=12):
    id: int


class ReadIndexReply(Message, frozen=True, tag=13):
    id: int
    index: int  # applied index to wait for; -1: the receiver does not lead


class Gossip(Message, frozen=True, tag=14):
    """Unreplicated, best-effort news, e.g. an agent's heartbeat. The log does not look inside."""

    topic: str
    data: bytes


class StateReport(Message, frozen=True, tag=15):
    """State hash at a revision; equal revisions must have equal hashes."""

    revision: int
    state_hash: bytes
    sound: bool = True  # False: the sender is set aside or has not caught up, its state stands for nothing


AnyMessage = (
    AppendEntries
    | AppendReply
    | RequestVote
    | VoteReply
    | PreVote
    | PreVoteReply
    | SnapshotChunk
    | SnapshotReply
    | TimeoutNow
    | Forward
    | ForwardReply
    | ReadIndex
    | ReadIndexReply
    | Gossip
    | StateReport
)

OfTerm = (
    AppendEntries | AppendReply | RequestVote | VoteReply | PreVote | PreVoteReply | SnapshotChunk | SnapshotReply | TimeoutNow
)  # what members say within a term

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Raises msgspec.DecodeError or msgspec.ValidationError for anything outside the schema."""
    return bounded_depth(_decoder, data)


def bounded_depth(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """Decode what a peer sent. Nesting beyond the interpreter's depth is a fault of the sender like any other: ValidationError."""
    try:
        return decoder.decode(data)
    except RecursionError:
        raise msgspec.ValidationError("the message nests too deeply") from None
