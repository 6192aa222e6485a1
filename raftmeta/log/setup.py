"""What an engine is told when it is built, and what it asks of the replica that owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from raftmeta.log.configuration import Configuration
from raftmeta.log.guard import Rules
from raftmeta.log.messages import AnyMessage, SnapshotChunk, SnapshotReply
from raftmeta.log.progress import Progress

OP_COMMANDS, OP_NOOP, OP_MEMBERSHIP = 0, 1, 2  # first byte of a payload; 0..2 as in the library
FOLLOWER, CANDIDATE, LEADER = 0, 1, 2  # roles, as in the library
ROLE_NAMES = ("follower", "candidate", "leader")


class Halted(Exception):
    """Two truths about committed entries, or a broken invariant: the member stops before it serves either."""


class Timing(msgspec.Struct, frozen=True):
    heartbeat_s: float = 0.1
    election_min_s: float = 1.0
    election_max_s: float = 1.5
    max_uncommitted: int = 2  # entries under way; commands that arrive meanwhile become one entry


class Ports(msgspec.Struct, frozen=True):
    clock: Callable[[], float]  # monotonic seconds
    random: Callable[[], float]  # uniform in [0, 1)


class Setup(msgspec.Struct, frozen=True):
    """`configurations` are those of the snapshot and of every membership entry in the journal, by index; the last one is in force (R13)."""

    member_id: str
    applied_index: int  # covered by the recovered state
    configurations: tuple[tuple[int, Configuration], ...]
    bootstrap: bool  # a first start: the members of the marker form the cluster, and their first leader writes it as an entry
    joining: bool  # started with nothing: no vote before it has caught up
    timing: Timing
    ports: Ports
    rules: Rules


class Hooks(Protocol):
    """What the engine asks of its replica."""

    def send(self, peer: str, message: AnyMessage) -> None:
        """Queue for after the sync."""

    def next_payload(self) -> bytes | None:
        """The payload of one more entry, None when nothing waits or there is no room. It is appended at once."""

    def apply(self, index: int, term: int, payload: bytes) -> None:
        """A committed entry, in order."""

    def without_room(self, n_bytes: int) -> None:
        """The journal has no room for so many bytes of entries that the leader sent."""

    def refused(self, peer: str, detail: str) -> None:
        """Something of a leader that this member cannot take; it falls behind if that goes on."""

    def on_role(self, role: int) -> None: ...

    def on_configuration(self, configuration: Configuration) -> None: ...

    def on_chunk(self, peer: str, chunk: SnapshotChunk) -> SnapshotReply | None:
        """Store a part of a snapshot; the answer, None when it could not be stored."""

    def snapshot_refused(self, peer: str) -> None:
        """A follower asks for its snapshot from the start again."""

    def next_chunk(self, peer: str, progress: Progress) -> SnapshotChunk | None:
        """The part that this follower needs now, None while there is no snapshot yet."""
