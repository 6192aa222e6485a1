"""Three or five simulated members, clients that retry, and faults, on one thread under one seed.

Virtual time jumps from event to event: a member is stepped when a message arrives and at its own next deadline. A step occupies the member
for as long as its sync takes; what it sends leaves after that. The trace of a run is a digest of everything that happened, in order.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from random import Random

import msgspec
import pysyncobj.syncobj

from raftmeta.log.configuration import MemberSpec, configuration_of
from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.guard import Rules
from raftmeta.log.peers import PeerEvent
from raftmeta.log.setup import Timing
from tests.simulation.clients import Clients
from tests.simulation.faults import Faults
from tests.simulation.invariants import Invariants, Violation
from tests.simulation.member import SimMember, World
from tests.simulation.network import Flight, SimNetwork

WALL_START_MS = 1_700_000_000_000


class Plan(msgspec.Struct, frozen=True):
    """What one run is made of; everything else follows from the seed."""

    seed: int
    members: int = 3
    stormy_s: float = 30.0  # virtual seconds with faults
    calm_s: float = 30.0  # and without, in which everything must converge
    rate: float = 20.0  # client operations per virtual second
    rules: Rules = Rules()


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
        self.clock = lambda: self.now
        self.wall_ms = lambda: WALL_START_MS + int(self.now * 1000)
        self.invariants = Invariants()
        self.exchange_settings = ExchangeSettings(entries=self.random.choice((20, 100, 1000)), keep_entries=self.random.choice((0, 5, 50)))
        self.segment_bytes = self.random.choice((64 << 10, 1 << 20))
        self.tail_bytes = self.random.choice((4 << 10, 1 << 20))
        pysyncobj.syncobj.monotonicTime = self.clock  # the one place that may replace the library's clock
        ids = [f"m{number}" for number in range(1, plan.members + 1)]
        marker = configuration_of(tuple(MemberSpec(name, f"zone-{name}", "", "") for name in ids))
        self.members = {name: SimMember(name, plan.seed, marker, self) for name in ids}
        self.network = SimNetwork(Random(f"{plan.seed} network"))
        self.clients = Clients(self, Random(f"{plan.seed} clients"), plan.rate)
        self.faults = Faults(self, Random(f"{plan.seed} faults"))
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._wakes: dict[str, float] = {}
        self._trace = hashlib.sha256()
        self.steps = 0

    # ------------------------------------------------------------------ what clients and faults use

    def at(self, time: float, kind: str, data: object = None) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, data))

    def note(self, *what: object) -> None:
        self._trace.update(repr((round(self.now, 6), *what)).encode())

    def boot(self, member: SimMember) -> None:
        member.boot()
        self.note("boot", member.id, member.alive)
        if member.alive:
            self.network.up(member.id, member.incarnation)
            self.refresh_links()
            self.wake(member, self.now)
        else:
            self.at(self.now + 1.0, "restart", member)

    def crash(self, member: SimMember, restart_after_s: float) -> None:
        """The member's process is gone already, or goes now; it starts again later."""
        if member.alive:
            member.power_off()
        self.note("crash", member.id)
        self._see(self.network.down(member.id))
        self.clients.crashed(member.id)
        self.at(self.now + restart_after_s, "restart", member)

    def refresh_links(self) -> None:
        self._see(self.network.refresh())

    def wake(self, member: SimMember, time: float) -> None:
        time = max(time, member.busy_until, member.paused_until)
        if time < self._wakes.get(member.id, float("inf")):
            self._wakes[member.id] = time
            self.at(time, "wake", member)

    def _see(self, seen: list[tuple[str, PeerEvent]]) -> None:
        for name, event in seen:
            member = self.members[name]
            if member.alive:
                member.inbox.append(event)
                self.wake(member, self.now)

    # ------------------------------------------------------------------ the run

    def run(self) -> Report:
        end_of_storm = self.now + self.plan.stormy_s
        end = end_of_storm + self.plan.calm_s
        for member in self.members.values():
            self.at(self.now, "restart", member)
        self.clients.start()
        self.faults.start(end_of_storm)
        calm = False
        while self._events and self._events[0][0] <= end:
            self.now, _, kind, data = heapq.heappop(self._events)
            if self.now >= end_of_storm and not calm:
                calm = True
                self.faults.stop()
            self._handle(kind, data)
        self.now = end
        self.clients.check()
        self._check_converged()
        operations, acknowledged = self.clients.counts()
        return Report(
            self.plan.seed, self._trace.hexdigest(), self.plan.stormy_s + self.plan.calm_s, operations, acknowledged, self.steps,
            self.invariants.leader_changes, dict(sorted(self.faults.counts.items())),
        )  # fmt: skip

    def _handle(self, kind: str, data: object) -> None:
        match kind, data:
            case "wake", SimMember():
                self._step(data)
            case "restart", SimMember():
                if not data.alive:
                    self.boot(data)
            case "flight", Flight():
                self._deliver(data)
            case "client", _:
                self.clients.act(data)
            case "fault", _:
                self.faults.act()
            case "depart", (str() as sender, list() as outbox):
                self._depart(sender, outbox)
            case _:
                raise AssertionError(kind)

    def _deliver(self, flight: Flight) -> None:
        member = self.members[flight.receiver]
        event = self.network.deliver(flight)
        if event is not None and member.alive:
            member.inbox.append(event)
            self.wake(member, self.now)

    def _step(self, member: SimMember) -> None:
        if self._wakes.get(member.id) == self.now:
            del self._wakes[member.id]
        if not member.alive or self.now < max(member.busy_until, member.paused_until):
            if member.alive:
                self.wake(member, self.now)
            return
        self.steps += 1
        received = len(member.inbox)
        outbox = member.step()
        if member.halted:
            raise Violation(f"{member.id} halted: {member.halted}")
        if not member.alive:
            self.faults.counts["crash inside a step"] += 1
            self.crash(member, self.faults.random.uniform(0.1, 3.0))
            return
        self.note("step", member.id, received, len(outbox), member.replica and member.replica.engine.commit_index)
        member.busy_until = self.now + self.faults.sync_s(member)
        self.at(member.busy_until, "depart", (member.id, [(member.incarnation, peer, message) for peer, message in outbox]))
        assert member.replica is not None
        self.wake(member, member.replica.next_deadline())

    def _depart(self, sender: str, outbox: list[tuple[int, str, object]]) -> None:
        for incarnation, peer, message in outbox:
            if self.members[sender].alive and self.members[sender].incarnation == incarnation:
                for delay, flight in self.network.send(sender, peer, message):  # type: ignore[arg-type]
                    self.at(self.now + delay, "flight", flight)

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
