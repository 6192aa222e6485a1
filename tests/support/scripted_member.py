"""A member over a disk in memory, and what it promised.

Everything between its messages and its disk is the real thing: marker, opening, journal, snapshots, replica. `Promises` remembers what it
let out of its hands and holds that against what a restart finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Protocol

from raftmeta.core.events import Event
from raftmeta.core.state import State
from raftmeta.log import quarantine
from raftmeta.log.boot import Recovered, StateLoader, recover
from raftmeta.log.configuration import Configuration
from raftmeta.log.exchange import ExchangeSettings, SnapshotExchange
from raftmeta.log.hard_state import Owner
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.marker import consume_marker, read_marker
from raftmeta.log.messages import AnyMessage, RequestVote, VoteReply
from raftmeta.log.opening import Openers, Whose, open_log
from raftmeta.log.peers import PeerEvent
from raftmeta.log.quarantine import Quarantine
from raftmeta.log.replica import Replica, ReplicaSetup
from raftmeta.log.setup import Ports, Timing
from raftmeta.log.snapshots import SnapshotStore
from raftmeta.log.spares import InlineWorker
from tests.support.memory_disk import MemoryDisk

DATA = Path("/data")
CLUSTER_ID = "scripted"
OWNER = Owner(CLUSTER_ID, "any")  # every member has a disk of its own
SEGMENT_BYTES = 17 << 10  # 5 KiB of it for records: a leader wants room for one of 4 KiB


def open_member(
    disk: MemoryDisk, *, has_peers: bool, look_first: bool = True, segment_bytes: int = SEGMENT_BYTES
) -> tuple[Journal, Recovered]:
    """Open a member's directory as parts.py does. Raises what opening raises.

    Without `look_first` snapshots are judged only after the journal was opened.
    """
    snapshots = StateLoader(SnapshotStore(disk, DATA / "snapshots", CLUSTER_ID))

    def recovered_from(journal: Journal) -> Recovered:
        marker = read_marker(disk, DATA)
        return recover(journal, snapshots, marker.configuration if marker else None)

    tuning = Tuning(owner=OWNER, joining=has_peers, tail_bytes=2 << 10)
    if look_first:
        tuning = replace(tuning, accept=snapshots.check)
    openers = Openers(lambda: Journal.open(disk, DATA / "journal", segment_bytes=segment_bytes, tuning=tuning), recovered_from)
    return open_log(disk, DATA, openers, Whose(OWNER, has_peers))


class Promises:
    """What one member let others rely on. A restart must find it again, unless the member was set aside, which keeps term and vote only."""

    def __init__(self) -> None:
        self.term = 0
        self.votes: dict[int, str] = {}  # by term
        self.commit_index = 0
        self.synced = (0, 0)  # index and term of the last synced record
        self.set_aside = True  # is new or was asked to; until it has caught up it may begin again with nothing
        self.overruled = 0  # times that a synced suffix was replaced by another leader's

    def sent(self, name: str, peer: str, message: AnyMessage) -> None:
        if isinstance(message, VoteReply) and message.granted:
            assert self.votes.setdefault(message.term, peer) == peer, f"{name} votes twice in term {message.term}"
        elif isinstance(message, RequestVote):
            assert self.votes.setdefault(message.term, name) == name, f"{name} votes twice in term {message.term}"

    def stepped(self, replica: Replica, journal: Journal) -> None:
        """After a step everything that it decided is synced and was sent."""
        assert replica.engine.term >= self.term, f"term {self.term} went back to {replica.engine.term}"
        self.term = replica.engine.term
        index, term = self.synced
        self.overruled += journal.term_at(index) not in (None, term)
        self.commit_index = replica.engine.commit_index
        self.synced = journal.last_index, journal.last_term

    def died(self, journal: Journal | None) -> None:
        """In the middle of a step, which may have given up a suffix that a leader contradicted, and may have synced another."""
        if journal is not None:
            self.synced = journal.synced_index, journal.term_at(journal.synced_index) or 0

    def kept(self, journal: Journal, recovered: Recovered) -> None:
        assert journal.term >= self.term, f"term {self.term} went back to {journal.term}"
        vote = self.votes.get(journal.term)
        assert vote is None or journal.voted_for == vote, f"the vote for {vote} in term {journal.term} became {journal.voted_for!r}"
        if recovered.joining:
            assert self.set_aside, "it begins again with nothing although nobody asked it to"
            self.commit_index, self.synced = 0, (0, 0)
            return
        index, term = self.synced
        if recovered.snapshot is not None and journal.last_index == recovered.snapshot.index:
            index = min(index, recovered.snapshot.index)  # a snapshot stands in for the log, a longer suffix was never committed
        assert journal.last_index >= max(index, self.commit_index), f"record {index} was synced, the journal ends at {journal.last_index}"
        if index == self.synced[0] and term:
            assert journal.term_at(index) in (None, term), f"record {index} had term {term}, found {journal.term_at(index)}"


class World(Protocol):
    """What a member needs of those around it."""

    now: float  # monotonic s
    names: tuple[str, ...]  # of all members
    exchange: ExchangeSettings
    segment_bytes: int

    def wall_ms(self) -> int: ...
    def deliver(self, sender: str, receiver: str, message: AnyMessage) -> None: ...


class ScriptedMember:
    """One member: a process that comes and goes, and its disk."""

    def __init__(self, name: str, world: World, disk: MemoryDisk) -> None:
        self.name, self._world, self.disk = name, world, disk
        self.promises = Promises()
        self.incarnation = 0
        self.told: Counter[str] = Counter()  # by all incarnations
        self.inbox: list[PeerEvent] = []
        self.replica: Replica | None = None
        self.journal: Journal | None = None
        self._idle_at = 0.0

    def boot(self) -> None:
        """Start the process, as parts.py does. Raises PowerLost, and whatever opening raises."""
        disk, world = self.disk, self._world
        self.incarnation += 1
        self.inbox = []
        random = Random(f"{self.name} {self.incarnation}")
        journal, recovered = open_member(disk, has_peers=len(world.names) > 1, segment_bytes=world.segment_bytes)
        self.promises.kept(journal, recovered)
        exchange = SnapshotExchange(SnapshotStore(disk, DATA / "snapshots", CLUSTER_ID), InlineWorker(), journal, world.exchange)
        ports = Ports(lambda: world.now, lambda: (world.names.index(self.name) + random.random()) / 4)
        setup = ReplicaSetup(self.name, Timing(), ports, world.wall_ms, lambda principal, body: True)
        self.journal = journal
        self.replica = Replica(setup, recovered, journal, exchange, self)
        self._idle_at = 0.0

    def due(self) -> float:
        """Time of its next step, infinity while it is down."""
        if self.replica is None:
            return float("inf")
        return 0.0 if self.inbox else min(self.replica.next_deadline(), self._idle_at)

    def step(self) -> None:
        """One turn of the log's thread. Raises PowerLost, Quarantined."""
        assert self.replica is not None and self.journal is not None
        events, self.inbox = self.inbox, []
        self.replica.step(events, self._transmit)
        self.promises.stepped(self.replica, self.journal)
        self._idle_at = self.journal.idle(self._world.now)

    def down(self) -> None:
        """The process is gone. What it was asked is never answered."""
        self.promises.died(self.journal)
        self.replica = self.journal = None

    def _transmit(self, outbox: list[tuple[str, AnyMessage]]) -> None:
        for peer, message in outbox:
            self.promises.sent(self.name, peer, message)
            self._world.deliver(self.name, peer, message)

    # the replica's observer

    def applied(self, state: State, events: Sequence[Event]) -> None:
        self.told["applied"] += 1

    def replaced(self, state: State) -> None:
        self.told["snapshot installed"] += 1

    def contradicted(self) -> None:
        self.told["contradicted"] += 1

    def caught_up(self) -> None:
        self.told["caught up"] += 1
        self.promises.set_aside = False

    def bootstrapped(self) -> None:
        self.told["bootstrapped"] += 1
        consume_marker(self.disk, DATA)

    def peers_changed(self, configuration: Configuration) -> None:
        """Everyone knows everyone here."""

    def heard(self, peer: str, topic: str, data: bytes) -> None:
        """No agents here."""

    def alarm(self, code: str, detail: str) -> None:
        self.told[f"alarm {code}"] += 1

    def alarm_over(self, code: str) -> None:
        self.told[f"alarm over {code}"] += 1

    def slow_disk(self, count: int, longest_s: float) -> None:
        self.told["slow disk"] += count

    def set_aside(self, why: Quarantine) -> None:
        self.promises.set_aside = True
        quarantine.mark(self.disk, DATA, why)
        self.told["set aside"] += 1
