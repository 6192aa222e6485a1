"""Three or five simulated members, clients that retry, and faults, on one thread under one seed.

Virtual time jumps from event to event: a member is stepped when a message arrives and at its own next deadline. A step occupies the member
for as long as its sync takes; what it sends leaves after that. The trace of a run is a digest of everything that happened, in order.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pysyncobj.syncobj

from raftmeta.log.configuration import MemberSpec, configuration_of
from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.guard import Rules
from raftmeta.log.messages import MAX_CHUNK_BYTES, AnyMessage
from raftmeta.log.peers import Connected, PeerEvent
from raftmeta.log.setup import Timing
from tests.simulation.clients import Clients
from tests.simulation.faults import Faults
from tests.simulation.invariants import Invariants, Violation
from tests.simulation.member import SimMember, World
from tests.simulation.network import Flight, SimNetwork

WALL_START_MS = 1_700_000_000_000
NEVER = float("inf")
KEPT_NOTES = 200  # at least so many of the last notes are shown of a run that fails


class Plan(msgspec.Struct, frozen=True):
    """What one run is made of; everything else follows from the seed."""

    seed: int
    members: int = 3
    stormy_s: float = 30.0  # virtual seconds with faults
    calm_s: float = 30.0  # and without, in which everything must converge
    rate: float = 20.0  # client operations per virtual second
    reads: float = 0.3  # share of them that read
    rules: Rules = Rules()
    kinds: tuple[str, ...] = ()  # of faults, by the names in faults.py; none: all of them
    gap_s: float = 0.0  # mean time between faults; 0: drawn from the seed
    feature: int = 1  # highest feature level that the members' builds can run: a new cluster begins there


class Report(msgspec.Struct):
    seed: int
    trace: str
    virtual_s: float
    operations: int
    acknowledged: int
    steps: int
    leader_changes: int
    faults: dict[str, int]


class Cluster(World):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = Random(plan.seed)
        self.now = 1_000.0
        self.rules = plan.rules
        self.timing = Timing()
        self.feature = plan.feature
        self.clock = lambda: self.now
        self.wall_ms = lambda: WALL_START_MS + int(self.now * 1000)
        self.invariants = Invariants()
        self.exchange_settings = ExchangeSettings(
            entries=self.random.choice((50, 200, 1000)),
            keep_entries=self.random.choice((0, 5, 50)),
            chunk_bytes=4 << 10 if plan.seed % 2 else MAX_CHUNK_BYTES,
        )
        self.segment_bytes = self.random.choice((64 << 10, 256 << 10))
        self.tail_bytes = self.random.choice((4 << 10, 1 << 20))
        pysyncobj.syncobj.monotonicTime = self.clock  # the one place that may replace the library's clock
        ids = [f"m{number}" for number in range(1, plan.members + 1)]
        self.specs = {name: MemberSpec(name, f"zone-{name}", "", "") for name in ids}
        marker = configuration_of(tuple(self.specs.values()))
        self.members = {name: SimMember(name, plan.seed, marker, self) for name in ids}
        self.network = SimNetwork(Random(f"{plan.seed} network"), plan.feature)
        self.clients = Clients(self, Random(f"{plan.seed} clients"), plan.rate)
        self.faults = Faults(self, Random(f"{plan.seed} faults"), plan.kinds, plan.gap_s)
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()
        self._trace = hashlib.sha256()
        self._noted: list[tuple[object, ...]] = []
        self._remembered: set[tuple[str, str]] = set()  # (who, of whom): heard while that one was damaged, and not since
        self.steps = 0

    # ------------------------------------------------------------------ what clients and faults use

    def at(self, time: float, act: Callable[[Any], None], data: object = None) -> None:
        heapq.heappush(self._events, (time, next(self._order), act, data))

    def note(self, *what: object) -> None:
        """Into the trace, and into what is printed of a run that fails."""
        self._noted.append((self.now, *what))
        if len(self._noted) >= 2 * KEPT_NOTES:
            self._trace.update(repr(self._noted[:KEPT_NOTES]).encode())
            del self._noted[:KEPT_NOTES]

    def last_notes(self) -> list[str]:
        """What happened last, a line each."""
        return [f"{time:11.6f}  {' '.join(map(str, what))}" for time, *what in self._noted]

    def boot(self, member: SimMember) -> None:
        member.boot()
        self._remembered = {(who, whom) for who, whom in self._remembered if who != member.id}
        self.note("boot", member.id, member.alive)
        if member.alive:
            self.network.up(member.id, member.incarnation)
            self.refresh_links()
            self.wake(member, self.now)
        else:
            self.at(self.now + 1.0, self._restart, member)

    def crash(self, member: SimMember, restart_after_s: float, before: Callable[[], None] = lambda: None) -> None:
        """The member's process is gone already, or goes now; it starts again later, after what happens `before` that."""
        if member.alive:
            member.power_off()
        before()
        self.note("crash", member.id)
        self._see(self.network.down(member.id))
        self.at(self.now + restart_after_s, self._restart, member)

    def caught_up(self, member: SimMember) -> None:
        self.faults.damage.over(member)

    def booted(self, member: SimMember) -> None:
        """One that starts as if nothing were wrong was damaged where it does not matter, or goes on with the state of its log."""
        replica = member.replica
        if replica is not None and not replica.engine.joining and self.is_damaged(member):
            self.faults.damage.over(member)
            self._remember(member)

    def _remember(self, member: SimMember) -> None:
        """What it said while it was damaged: others know it until they look at its new link, which takes as long as they are paused."""
        self._remembered.update((other, member.id) for other in self.members if other != member.id)

    def is_damaged(self, member: SimMember) -> bool:
        return member.id in self.faults.damage.members

    def set_aside(self, member: SimMember) -> None:
        """It begins again with nothing, which only a damaged member may."""
        self.note("set aside", member.id)
        self.count("set aside")
        if not self.is_damaged(member):
            raise Violation(f"{member.id} was set aside although nobody had damaged it")
        others = [m.id for m in self.members.values() if m is not member and m.replica is not None and m.replica.engine.joining]
        if others and self.network.weather.is_clear():
            raise Violation(f"{member.id} was set aside while {' and '.join(others)} had not caught up")
        self._remember(member)

    def count(self, kind: str) -> None:
        self.faults.count(kind)

    def sync_s(self, member: SimMember) -> float:
        """How long a step of this member takes now."""
        return self.faults.sync_s(member)

    def alarm(self, member: str, code: str, detail: str) -> None:
        """Members may say that states differ only while one was changed behind its back, or of one that they have not heard again since."""
        self.note("alarm", member, code)
        unheard = any(who == member and f"{whom}: " in detail.replace(" and ", ": ") for who, whom in self._remembered)
        if code == "integrity" and not self.faults.damage.members and not unheard:
            raise Violation(f"{member} raised {code}: {detail}")

    def refresh_links(self) -> None:
        self._see(self.network.refresh())

    def wake(self, member: SimMember, time: float) -> None:
        if time < member.busy_until:
            time = member.busy_until
        if time < member.paused_until:
            time = member.paused_until
        if time < member.wakes_at:
            member.wakes_at = time
            heapq.heappush(self._events, (time, next(self._order), self._step, member))

    def _see(self, seen: list[tuple[str, PeerEvent]]) -> None:
        for name, event in seen:
            member = self.members[name]
            if member.alive:
                if isinstance(event, Connected):
                    self.invariants.linked(name, event.peer)
                member.inbox.append(event)
                self.wake(member, self.now)

    # ------------------------------------------------------------------ the run

    def run(self) -> Report:
        end_of_storm = self.now + self.plan.stormy_s
        end = end_of_storm + self.plan.calm_s
        for member in self.members.values():
            self.at(self.now, self._restart, member)
        self.clients.start()
        self.faults.start(end_of_storm)
        self.at(end_of_storm, self.faults.stop)
        events = self._events
        while events[0][0] <= end:
            self.now, _, act, data = heapq.heappop(events)
            act(data)
        self.now = end
        self.clients.check()
        self._check_converged()
        self._trace.update(repr(self._noted).encode())
        operations, acknowledged = self.clients.counts()
        return Report(
            self.plan.seed, self._trace.hexdigest(), self.plan.stormy_s + self.plan.calm_s, operations, acknowledged, self.steps,
            self.invariants.leader_changes, dict(sorted((self.faults.counts + self.network.counts).items())),
        )  # fmt: skip

    def _restart(self, member: SimMember) -> None:
        if not member.alive:
            self.boot(member)

    def _deliver(self, flight: Flight) -> None:
        member = self.members[flight.receiver]
        event = self.network.deliver(flight)
        if event is not None and member.alive:
            self.invariants.heard(member.id, event.peer, event.message)
            member.inbox.append(event)
            self.wake(member, self.now)

    def _step(self, member: SimMember) -> None:
        if member.wakes_at != self.now:
            return  # an earlier one took its place
        member.wakes_at = NEVER
        replica = member.replica
        if replica is None:
            return
        if self.now < member.busy_until or self.now < member.paused_until:
            self.wake(member, self.now)
            return
        self.steps += 1
        received = len(member.inbox)
        relinked = [event.peer for event in member.inbox if isinstance(event, Connected)] if self._remembered else []
        outbox = member.step()
        self._remembered.difference_update((member.id, peer) for peer in relinked)
        if member.replica is None:
            self._ended(member, outbox)
            return
        self.note("step", member.id, received, len(outbox), replica.engine.commit_index)
        member.busy_until = self.now + self.sync_s(member)
        if outbox:
            self.at(member.busy_until, self._depart, (member, member.incarnation, outbox))
        self.wake(member, replica.next_deadline())

    def _ended(self, member: SimMember, outbox: list[tuple[str, AnyMessage]]) -> None:
        """The process is gone: the power went, its disk failed, or it ended by itself. What it had sent before may have left."""
        if member.halted:
            raise Violation(f"{member.id} halted: {member.halted}")
        for peer, message in outbox if self.faults.random.random() < 0.7 else ():
            for _, flight in self.network.send(member.id, peer, message):
                self._deliver(flight)
        self.faults.ended(member)
        self.crash(member, self.faults.random.uniform(0.1, 3.0))

    def _depart(self, data: tuple[SimMember, int, list[tuple[str, AnyMessage]]]) -> None:
        member, incarnation, outbox = data
        if member.replica is None or member.incarnation != incarnation:
            return
        for peer, message in outbox:
            self.invariants.sent(member.id, incarnation, peer, message)
            for delay, flight in self.network.send(member.id, peer, message):
                self.at(self.now + delay, self._deliver, flight)

    def _check_converged(self) -> None:
        """After the calm: one leader, everyone applied the same, no write of a client unanswered."""
        replicas = [member.replica for member in self.members.values()]
        if any(replica is None for replica in replicas):
            raise Violation("a member is down after the calm phase")
        hashes = {replica.state.state_hash for replica in replicas if replica}
        applied = {replica.engine.applied_index for replica in replicas if replica}
        leaders = {replica.engine.leader_id for replica in replicas if replica}
        if len(hashes) != 1 or len(applied) != 1 or len(leaders) != 1 or "" in leaders:
            raise Violation(f"no convergence: leaders {sorted(leaders)}, applied {sorted(applied)}, {len(hashes)} different states")
