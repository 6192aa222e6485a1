"""One member's log and state, as a machine that is stepped: no thread, no socket, no clock of its own.

A step takes what arrived, ticks the engine, applies, and syncs the journal once; only then does what the engine wanted to send leave.
Nothing that depends on a journal write leaves before its sync. What a follower owes the leader leaves before it applies, so that its
acknowledgement does not wait for the entry before. The thread that owns a replica (runner.py) and the simulation drive it the same way.
Everything in here belongs to that one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from raftmeta.core.apply import apply_batch, known_outcome
from raftmeta.core.events import Event
from raftmeta.core.state import State
from raftmeta.core.types import Outcome
from raftmeta.durable import DiskFull
from raftmeta.log import clocks
from raftmeta.log import setup as ops
from raftmeta.log.boot import Recovered
from raftmeta.log.clocks import Clocks
from raftmeta.log.configuration import Configuration
from raftmeta.log.engine import Engine
from raftmeta.log.exchange import SnapshotExchange
from raftmeta.log.forwarding import Authorize, Forwarding
from raftmeta.log.guard import Rules
from raftmeta.log.journal import Journal
from raftmeta.log.levels import Levels
from raftmeta.log.messages import (
    AnyMessage,
    Forward,
    ForwardReply,
    Gossip,
    Proposal,
    ReadIndex,
    ReadIndexReply,
    SnapshotChunk,
    SnapshotReply,
    StateReport,
)
from raftmeta.log.passing import PassingAlarm
from raftmeta.log.peers import Connected, Disconnected, PeerEvent, Received
from raftmeta.log.progress import Progress
from raftmeta.log.proposals import Pending, Proposals, Sink, commands_of
from raftmeta.log.quarantine import Quarantine, Quarantined
from raftmeta.log.reads import Reads, ReadSink
from raftmeta.log.reports import Reports
from raftmeta.log.setup import LEADER, Halted, Ports, Setup, Timing
from raftmeta.log.shortage import Shortage
from raftmeta.log.stamping import Stamping
from raftmeta.log.syncs import Syncs

EXPIRY_S = 0.05  # how often deadlines of waiting callers are looked at
BARRIER_S = 0.5  # a member without readers renews its barrier this often, so that its staleness is known


Transmit = Callable[[list[tuple[str, AnyMessage]]], object]


class Observer(Protocol):
    """Who is told what happened. Called from the thread of the replica; must not raise or block."""

    def applied(self, state: State, events: Sequence[Event]) -> None: ...
    def replaced(self, state: State) -> None: ...
    def bootstrapped(self) -> None: ...
    def caught_up(self) -> None: ...
    def contradicted(self) -> None: ...  # from here on nobody may be told anything of the state; may be told several times
    def peers_changed(self, configuration: Configuration) -> None: ...
    def heard(self, peer: str, topic: str, data: bytes) -> None: ...
    def alarm(self, code: str, detail: str) -> None: ...
    def alarm_over(self, code: str) -> None: ...
    def slow_disk(self, count: int, longest_s: float) -> None: ...  # so many syncs took long since the last call
    def set_aside(self, why: Quarantine) -> None: ...  # durable when it returns; the replica ends after it


class ReplicaSetup(msgspec.Struct, frozen=True):
    member_id: str
    timing: Timing
    ports: Ports
    wall_ms: Callable[[], int]
    authorize: Authorize  # the leader's own check of a forwarded command
    rules: Rules = Rules()
    feature: int = 1  # highest feature level that this build can run
    forward_timeout_s: float = 10.0


class Replica:
    def __init__(self, setup: ReplicaSetup, recovered: Recovered, journal: Journal, exchange: SnapshotExchange, observer: Observer) -> None:
        self._setup, self._ports, self._observer = setup, setup.ports, observer
        self._journal, self._exchange = journal, exchange
        self.state = recovered.state
        first_id = int(setup.ports.random() * (1 << 32)) << 24
        self.proposals, self.reads = Proposals(first_id), Reads(first_id)
        self._outbox: list[tuple[str, AnyMessage]] = []
        self._connected: set[str] = set()
        self._leader = ""
        self.levels = Levels(self, setup.member_id, setup.feature)
        self._forwarding = Forwarding(self, setup.authorize, setup.forward_timeout_s)
        self._reports = Reports(setup.member_id, self, setup.rules)
        self._shortage = Shortage(journal, exchange, self)
        self._refused, self._unusable = PassingAlarm("leader_refused", self), PassingAlarm("snapshot_unusable", self)
        self._expire_at = 0.0
        self._stamping = Stamping(setup.ports.clock, setup.wall_ms)
        self._stamping.applied(recovered.state.cluster_ms)
        self._clocks = Clocks(self, self._stamping, setup.wall_ms)
        self._syncs = Syncs(observer)
        self._bootstrap_pending = recovered.bootstrap
        engine_setup = Setup(
            member_id=setup.member_id,
            applied_index=recovered.applied_index,
            configurations=recovered.configurations,
            bootstrap=recovered.bootstrap,
            joining=recovered.joining,
            timing=setup.timing,
            ports=setup.ports,
            rules=setup.rules,
        )
        self.engine = Engine(engine_setup, journal, self)
        exchange.recovered(recovered.snapshot)

    # ------------------------------------------------------------------ the callers' side

    def propose(self, proposal: Proposal, timeout_s: float, sink: Sink) -> None:
        self.proposals.submit(Pending(proposal, self._ports.clock() + timeout_s, sink))

    def read(self, timeout_s: float, sink: ReadSink) -> None:
        if self.engine.joining:
            sink("starting", 0)  # what it has applied so far is not what was acknowledged
            return
        if self.contradiction:
            sink("integrity", 0)
            return
        self.reads.submit(self._ports.clock() + timeout_s, sink)

    def transfer(self, target: str) -> bool:
        """Hand leadership over, see the engine's. False when this member does not lead the target."""
        return target in self._connected and self.engine.transfer(target)

    def gossip(self, topic: str, data: bytes) -> None:
        for peer in sorted(self._connected):
            self._outbox.append((peer, Gossip(topic, data)))

    def is_connected(self, peer: str) -> bool:
        return peer in self._connected

    @property
    def linked(self) -> frozenset[str]:
        return frozenset(self._connected)

    @property
    def contradiction(self) -> str:
        """What a majority says against this member's state, "" while none does."""
        return self._reports.contradiction

    @property
    def compared(self) -> bool:
        """Whether a majority had this member's state at some revision since it started or got its state; alone there is nobody."""
        return self._reports.compared or self.engine.configuration.ids == (self._setup.member_id,)

    @property
    def sync_s(self) -> float:
        return self._syncs.last_s

    @property
    def snapshot_index(self) -> int:
        return self._exchange.index

    def clock_offset_ms(self) -> int:
        """By how much this member's wall clock is ahead of what most members say."""
        return self._stamping.own_offset_ms()

    def staleness_s(self) -> float:
        return self._ports.clock() - self.reads.barrier_started_at

    # ------------------------------------------------------------------ the loop

    def step(self, events: Sequence[PeerEvent], transmit: Transmit) -> None:
        """Handle what arrived, tick, sync, and hand over what may leave. Raises Halted, DiskFailed: the member must stop."""
        self.engine.begin_step()
        for event in events:
            self._on_event(event)
        self._watch_leader()
        self._start_reads()
        if self.engine.role != LEADER and self._leader in self._connected:
            self._forwarding.pass_on(self._leader)
        if self._outbox:
            self._ship(transmit)
        self.engine.tick()
        self._watch_leader()
        self._finish_reads()
        if self.engine.has_caught_up():
            self._journal.grant_vote()
            self.engine.joining = False
            self._observer.caught_up()
            self._reports.caught_up()
        self._reports.step(self._ports.clock())
        if not self.contradiction:  # a snapshot would outlive what is wrong only in memory
            self._exchange.poll(self.engine, self.state, self._ports.clock())
        self._shortage.step(self._ports.clock(), (self.state.size_bytes, self.engine.applied_index), self._majority_without_room)
        self._look_after_alarms(self._ports.clock())
        self._clocks.step(self._ports.clock())
        self._expire()
        self._ship(transmit)

    def _look_after_alarms(self, now: float) -> None:
        finding = self._exchange.take_finding()
        if finding:
            self._unusable.sound(finding, now)
        self._unusable.step(now)
        self._refused.step(now)

    def _ship(self, transmit: Transmit) -> None:
        """Sync what is pending, then let go of what waited for it."""
        self._journal.note_committed(self.engine.commit_index)
        self._syncs.took(self._journal.sync(), self._ports.clock())
        self._forwarding.flush()
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            transmit(outbox)

    def next_deadline(self) -> float:
        """Monotonic time of the next step that is due although nothing arrives."""
        due = self.engine.next_deadline()
        if self.proposals.queue or self.proposals.forwarded or self.proposals.inflight or not self.reads.idle:
            due = min(due, self._expire_at)
        if self._leader:
            due = min(due, self.reads.barrier_started_at + BARRIER_S) if self.reads.idle else due
        return due

    def stop(self) -> None:
        """End every waiting caller; the journal stays open for its owner to close."""
        self.proposals.lost_leadership()
        self.proposals.end_forwarded("unknown_outcome")
        self.proposals.end_queued("shutting_down")
        self.reads.end("shutting_down")

    def _on_event(self, event: PeerEvent) -> None:
        match event:
            case Connected():
                self._connected.add(event.peer)
                self.engine.connected(event.peer, event.incarnation)
                self.levels.connected(event.peer, event.feature)
                self._reports.connected(event.peer)
                self._clocks.connected(event.peer)
            case Disconnected():
                self._connected.discard(event.peer)
                self.engine.disconnected(event.peer)
                self._reports.disconnected(event.peer, self._ports.clock())
                if event.peer == self._leader:
                    self.proposals.lost_leader()
                    self.reads.lost_leader()
            case Received():
                self._on_message(event.peer, event.message)

    def _on_message(self, peer: str, message: AnyMessage) -> None:
        match message:
            case Forward():
                self._forwarding.on_forward(peer, message)
            case ForwardReply():
                self._forwarding.on_reply(message)
            case ReadIndex():
                self._on_read_index(peer, message)
            case ReadIndexReply():
                if peer == self.engine.leader_id:
                    self.reads.answered(message.id, message.index)
            case Gossip(topic=clocks.TOPIC):
                self._clocks.heard(peer, message.data, self.engine.configuration.ids)
            case Gossip():
                self._observer.heard(peer, message.topic, message.data)
            case StateReport():
                self._reports.heard(peer, message)
            case _:
                self.engine.receive(peer, message)

    def _watch_leader(self) -> None:
        leader = self.engine.leader_id
        if leader != self._leader:
            self._leader = leader
            self.proposals.lost_leader()
            self.reads.lost_leader()

    def _expire(self) -> None:
        now = self._ports.clock()
        if now >= self._expire_at:
            self._expire_at = now + EXPIRY_S
            self.proposals.expire(now)
            self.reads.expire(now, "no_quorum" if self._leader else "no_leader")

    # ------------------------------------------------------------------ reads

    def _start_reads(self) -> None:
        now = self._ports.clock()
        if self.reads.idle and self._leader and now - self.reads.barrier_started_at >= BARRIER_S:
            self.reads.submit(now + self._setup.timing.election_min_s, _nobody)
        if self.engine.role == LEADER:
            number = self.engine.replication.round + 1 if self._setup.rules.confirm_reads else 0
            if self.engine.may_serve_reads and self.reads.start_round(number, self.engine.commit_index, now):
                self.engine.replication.round_wanted = True
        elif self._leader in self._connected:
            question = self.reads.ask(now, self._setup.timing.heartbeat_s * 2)
            if question is not None:
                self._outbox.append((self._leader, ReadIndex(question)))

    def _finish_reads(self) -> None:
        if self.engine.role == LEADER:
            self.reads.confirmed(self.engine.confirmed_round)
        self.reads.settle(self.engine.applied_index)

    def _on_read_index(self, peer: str, message: ReadIndex) -> None:
        if self.engine.role != LEADER:
            self._outbox.append((peer, ReadIndexReply(message.id, -1)))
            return

        def sink(code: str, index: int) -> None:
            self._outbox.append((peer, ReadIndexReply(message.id, index if code == "ok" else -1)))

        self.read(self._setup.timing.election_min_s, sink)

    # ------------------------------------------------------------------ the engine's hooks

    def send(self, peer: str, message: AnyMessage) -> None:
        self._outbox.append((peer, message))

    def next_payload(self) -> bytes | None:
        self.levels.begin(self._ports.clock())
        if not self.proposals.queue:
            return None
        if self._reports.hold:
            self.proposals.end_queued("integrity")
            return None
        if not self._journal.has_room(self.proposals.queue_bytes):
            self._without_room()
            return None
        lacking = self._majority_without_room()
        if lacking:
            self._shortage.peers_lack(lacking)
            self._end_without_room()
            return None
        batch = self.proposals.next_batch(self._stamping.stamp_ms(self.engine.term))
        assert batch is not None
        self.proposals.appended(self.engine.last_index + 1, self.engine.term, batch.waiting)
        return bytes([ops.OP_COMMANDS]) + batch.payload

    def _without_room(self) -> None:
        """D4: refuse what waits, stay up, and let a member that has room lead."""
        self._shortage.entry_refused(self.proposals.queue_bytes)
        self._end_without_room()
        successor = self.engine.replication.successor()
        if successor is not None and successor in self._connected:
            self.engine.transfer(successor)

    def _end_without_room(self) -> None:
        """A retry of what was applied is answered so; while states differ (`integrity`) nothing is answered from this one's."""
        self.proposals.answer_known(lambda pending: known_outcome(self.state, pending.request_id, pending.principal, pending.body))
        self.proposals.end_queued("disk_full")

    def _majority_without_room(self) -> list[str]:
        """Followers that told this leader that they have none, if nothing can be committed without them."""
        lacking = self.engine.replication.without_room() if self.engine.role == LEADER else []
        configuration = self.engine.configuration
        return lacking if len(configuration.ids) - len(lacking) < configuration.quorum else []

    def apply(self, index: int, term: int, payload: bytes) -> None:
        """One committed entry. Apply is total, so whatever is raised in here stops the member (R5)."""
        outcomes: Sequence[Outcome] = ()
        match payload[0]:
            case ops.OP_COMMANDS:
                before = self.state.revision
                applied = apply_batch(self.state, commands_of(memoryview(payload)[1:]))
                self.state, outcomes = applied.state, applied.outcomes
                self._stamping.applied(applied.state.cluster_ms)
                self._observer.applied(applied.state, applied.events)
                self._reports.applied(before)
            case ops.OP_NOOP:
                pass
            case ops.OP_MEMBERSHIP:
                if self._bootstrap_pending:
                    self._bootstrap_pending = False
                    self._observer.bootstrapped()
            case opcode:
                raise Halted(f"entry {index} has opcode {opcode}, which this build does not know")
        self.proposals.applied(index, term, outcomes)

    def refused(self, peer: str, detail: str) -> None:
        self._refused.sound(f"{peer} leads and sent what cannot be taken: {detail}", self._ports.clock())

    def on_role(self, role: int) -> None:
        self.reads.lost_leader()
        if role != LEADER:
            self.proposals.lost_leadership()

    def without_room(self, n_bytes: int) -> None:
        """Entries of the leader found no room here."""
        self._shortage.entry_refused(n_bytes)

    def on_configuration(self, configuration: Configuration) -> None:
        self._stamping.keep(configuration.ids)
        self._observer.peers_changed(configuration)

    def on_chunk(self, peer: str, chunk: SnapshotChunk) -> SnapshotReply | None:
        reply, installed = self._exchange.on_chunk(chunk, self.engine)
        if installed is not None:
            self.state = installed.state
            self.engine.installed(installed.meta.index, installed.meta.term, installed.configuration)
            self._observer.replaced(self.state)
            self._bootstrap_pending = False
            self._observer.bootstrapped()
            self._reports.replaced()
        return reply

    def next_chunk(self, peer: str, progress: Progress) -> SnapshotChunk | None:
        return self._exchange.next_chunk(peer, progress, self.engine, self._ports.clock())

    def snapshot_refused(self, peer: str) -> None:
        self._exchange.refused(peer)

    # ------------------------------------------------------------------ what its parts tell the member

    def alarm(self, code: str, detail: str) -> None:
        self._observer.alarm(code, detail)

    def alarm_over(self, code: str) -> None:
        self._observer.alarm_over(code)

    def contradicted(self) -> None:
        self.reads.end("integrity")
        self._observer.contradicted()

    def set_aside(self, cause: str, detail: str) -> None:
        try:
            self._observer.set_aside(Quarantine(cause, detail, self._journal.term, self._journal.voted_for))
        except DiskFull as full:  # what its disk says may still be right, and is more than this member has now
            raise Quarantined(f"{detail}; it begins again from its disk, which has no room to set anything aside: {full.detail}") from full


def _nobody(code: str, index: int) -> None:
    """The sink of a barrier that only renews the staleness bound."""
