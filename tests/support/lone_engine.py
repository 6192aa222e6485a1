"""One engine over a journal in memory, with everything it sends and applies written down. For tests of single rules."""

from __future__ import annotations

from pathlib import Path

import msgspec

from raftmeta.log.configuration import Configuration, MemberSpec, configuration_of
from raftmeta.log.engine import Engine
from raftmeta.log.guard import Rules
from raftmeta.log.hard_state import Owner
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.messages import AnyMessage, AppendEntries, AppendReply, Entry, PreVoteReply, SnapshotChunk, SnapshotReply, VoteReply
from raftmeta.log.progress import Progress
from raftmeta.log.setup import LEADER, OP_COMMANDS, Ports, Setup, Timing
from tests.support.memory_disk import MemoryDisk

DIRECTORY = Path("/data/journal")


def trio(*ids: str) -> Configuration:
    return configuration_of(tuple(MemberSpec(name, f"zone-{name}", "", "") for name in ids or ("m1", "m2", "m3")))


def payload(text: str) -> bytes:
    """An entry with one command, which nobody could read."""
    return bytes([OP_COMMANDS]) + msgspec.msgpack.encode([text.encode()])


def entry(index: int, term: int, text: str = "") -> Entry:
    return Entry(index, term, payload(text or f"{index}@{term}"))


class LoneEngine:
    """`m1` of the configuration; the library's clock is this object's while it is the newest one."""

    def __init__(
        self, *, rules: Rules | None = None, configuration: Configuration | None = None, terms: tuple[int, ...] = (), committed: int = 0
    ) -> None:
        """`terms`: of the entries 1, 2, 3 ... that the journal holds already; `committed`: how many of them an earlier life knew to be."""
        import pysyncobj.syncobj

        self.now = 100.0
        pysyncobj.syncobj.monotonicTime = lambda: self.now
        self.disk = MemoryDisk(1)
        self.journal = Journal.open(self.disk, DIRECTORY, segment_bytes=32 << 20, tuning=Tuning(owner=Owner("test", "m1")))
        if terms:
            self.journal.set_hard_state(terms[-1], "")
        for index, term in enumerate(terms, 1):
            self.journal.append(index, term, payload(f"{index}@{term}"))
        self.journal.note_committed(committed)
        self.journal.sync()
        self.sent: list[tuple[str, AnyMessage]] = []
        self.applied: list[tuple[int, int]] = []
        self.waiting: list[bytes] = []  # payloads to propose
        self.roles: list[int] = []
        self.refusals: list[tuple[str, str]] = []
        setup = Setup(
            member_id="m1",
            applied_index=0,
            configurations=((0, configuration or trio()),),
            bootstrap=False,
            joining=False,
            timing=Timing(),
            ports=Ports(lambda: self.now, lambda: 0.5),
            rules=rules or Rules(),
        )
        self.engine = Engine(setup, self.journal, self)
        for peer in self.engine.configuration.peers_of("m1"):
            self.engine.connected(peer, 1)

    # driving it

    def step(self, *received: tuple[str, AnyMessage], after_s: float = 0.0, sync: bool = True) -> list[tuple[str, AnyMessage]]:
        """What it sends when these arrive, `after_s` later."""
        self.now += after_s
        self.sent = []
        self.engine.begin_step()
        for peer, message in received:
            self.engine.receive(peer, message)
        self.engine.tick()
        if sync:
            self.journal.sync()
        return self.sent

    def elect(self) -> None:
        """Make it the leader of the next term, its first entry committed by m2."""
        self.step(after_s=1.6)
        if self.engine.configuration.quorum > 1:
            self.step(*((peer, PreVoteReply(self.engine.term, self.engine.term, True)) for peer in self._peers()))
            self.step(*((peer, VoteReply(self.engine.term, True)) for peer in self._peers()))
        assert self.engine.role == LEADER
        self.step(*((peer, self.ack(self.engine.last_index)) for peer in self._peers()))
        self.step()

    def ack(self, match: int, term: int | None = None) -> AppendReply:
        return AppendReply(self.engine.term if term is None else term, True, match + 1, self.engine.replication.round)

    def append(self, prev: tuple[int, int], entries: tuple[Entry, ...] = (), *, term: int = 1, commit: int = 0) -> AppendEntries:
        return AppendEntries(term, prev[0], prev[1], commit, 1, entries)

    def sent_to(self, peer: str, kind: type[AnyMessage]) -> list[AnyMessage]:
        return [message for to, message in self.sent if to == peer and isinstance(message, kind)]

    def terms(self) -> list[int | None]:
        return [self.journal.term_at(index) for index in range(1, self.journal.last_index + 1)]

    def _peers(self) -> tuple[str, ...]:
        return self.engine.configuration.peers_of("m1")

    # the engine's hooks

    def send(self, peer: str, message: AnyMessage) -> None:
        self.sent.append((peer, message))

    def next_payload(self) -> bytes | None:
        return self.waiting.pop(0) if self.waiting else None

    def apply(self, index: int, term: int, payload: bytes) -> None:
        self.applied.append((index, term))

    def refused(self, peer: str, detail: str) -> None:
        self.refusals.append((peer, detail))

    def on_role(self, role: int) -> None:
        self.roles.append(role)

    def on_configuration(self, configuration: Configuration) -> None:
        """Nobody to tell."""

    def on_chunk(self, peer: str, chunk: SnapshotChunk) -> SnapshotReply | None:
        return None

    def snapshot_refused(self, peer: str) -> None:
        """No snapshots here."""

    def next_chunk(self, peer: str, progress: Progress) -> SnapshotChunk | None:
        return None
