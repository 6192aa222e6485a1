"""Three replicas over journals in memory, with the messages between them in the test's hands. For scripts of a few steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pysyncobj.syncobj

from raftmeta.core.commands import Body, Publish
from raftmeta.core.events import Event
from raftmeta.core.state import State
from raftmeta.core.types import VersionSummary
from raftmeta.log import quarantine
from raftmeta.log.boot import StateLoader, recover
from raftmeta.log.configuration import Configuration, MemberSpec, configuration_of
from raftmeta.log.exchange import ExchangeSettings, SnapshotExchange
from raftmeta.log.guard import Rules
from raftmeta.log.hard_state import Owner
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.messages import AnyMessage, Proposal
from raftmeta.log.opening import Openers, Whose, open_log
from raftmeta.log.peers import Connected, Disconnected, PeerEvent, Received
from raftmeta.log.proposals import Result, encode_body
from raftmeta.log.quarantine import Quarantine, Quarantined
from raftmeta.log.replica import Replica, ReplicaSetup
from raftmeta.log.setup import LEADER, Ports, Timing
from raftmeta.log.snapshots import SnapshotStore
from raftmeta.log.spares import InlineWorker
from tests.support.memory_disk import MemoryDisk

STEP_S = 0.01


def publish(label: str, model: str = "m") -> Publish:
    digest = hashlib.sha256(label.encode()).hexdigest()
    packed = label.encode() * 20
    return Publish(model, label, VersionSummary(digest, digest, digest, digest, hashlib.sha256(packed).hexdigest(), 9, 9, 1, 1), packed)


class Box:
    """One replica and what its observer was told."""

    def __init__(self, name: str, disk: MemoryDisk, world: Trio, marker: Configuration | None) -> None:
        self.name, self.disk, self.world = name, disk, world
        self.inbox: list[PeerEvent] = []
        self.incarnation = 0
        self.feature = world.features.get(name, 1)
        self.told: list[str] = []
        owner = Owner("trio", name)
        tuning = Tuning(owner=owner, joining=True)
        store = SnapshotStore(disk, Path("/data/snapshots"), "trio")
        openers = Openers(
            lambda: Journal.open(disk, Path("/data/journal"), segment_bytes=world.segment_bytes, tuning=tuning),
            lambda journal: recover(journal, StateLoader(store), marker),
        )
        self.journal, recovered = open_log(disk, Path("/data"), openers, Whose(owner, has_peers=True))
        exchange = SnapshotExchange(store, InlineWorker(), self.journal, world.exchange)
        ports = Ports(lambda: world.now, lambda: world.jitter[name])
        setup = ReplicaSetup(name, Timing(), ports, lambda: world.wall_ms(name), world.authorize, world.rules, self.feature)
        self.replica = Replica(setup, recovered, self.journal, exchange, self)

    def applied(self, state: State, events: Sequence[Event]) -> None:
        self.told.append("applied")

    def replaced(self, state: State) -> None:
        self.told.append("replaced")

    def contradicted(self) -> None:
        self.told.append("contradicted")

    def caught_up(self) -> None:
        self.told.append("caught up")

    def bootstrapped(self) -> None:
        self.told.append("bootstrapped")

    def peers_changed(self, configuration: Configuration) -> None:
        self.told.append("peers")

    def heard(self, peer: str, topic: str, data: bytes) -> None:
        self.told.append(f"heard {topic}")

    def alarm(self, code: str, detail: str) -> None:
        self.told.append(f"alarm {code}")

    def alarm_over(self, code: str) -> None:
        self.told.append(f"alarm over {code}")

    def slow_disk(self, count: int, longest_s: float) -> None:
        self.told.append("slow disk")

    def set_aside(self, why: Quarantine) -> None:
        self.told.append("set aside")
        quarantine.mark(self.disk, Path("/data"), why)


class Trio:
    def __init__(
        self,
        *,
        rules: Rules | None = None,
        exchange: ExchangeSettings | None = None,
        authorize: Callable[[str, Body], bool] = lambda principal, body: True,
        names: tuple[str, ...] = ("m1", "m2", "m3"),
        segment_bytes: int = 1 << 20,
        capacities: Mapping[str, int] = MappingProxyType({}),
        features: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.now = 100.0
        self.segment_bytes = segment_bytes
        self.jitter = {name: 0.2 * number for number, name in enumerate(names)}  # m1 stands first
        self.rules, self.exchange, self.authorize = rules or Rules(), exchange or ExchangeSettings(), authorize
        self.features = dict(features)  # highest level that a member's build can run, else 1
        self.cut: set[tuple[str, str]] = set()  # ordered pairs that carry nothing
        self.stuck: set[str] = set()  # members that are not stepped; what they are sent waits
        self.drop: Callable[[str, str, AnyMessage], bool] = lambda sender, receiver, message: False
        self.marker = configuration_of(tuple(MemberSpec(name, f"zone-{name}", "", "") for name in names))
        self.boxes: dict[str, Box] = {}
        self._boots = 0
        self.wall_offset_ms = 0  # of every member's wall clock
        self.wall_offsets_ms: dict[str, int] = {}  # and of one
        pysyncobj.syncobj.monotonicTime = lambda: self.now
        for name in names:
            self.boot(name, MemoryDisk(1, capacity_bytes=capacities.get(name)), self.marker)

    def wall_ms(self, name: str = "") -> int:
        return 1_700_000_000_000 + self.wall_offset_ms + self.wall_offsets_ms.get(name, 0) + int(self.now * 1000)

    def boot(self, name: str, disk: MemoryDisk, marker: Configuration | None = None) -> Box:
        """(Re)start a member on this disk; the others see the old link close and a new one open."""
        for other in self.boxes.values():
            if other.name != name:
                other.inbox.append(Disconnected(name))
        box = Box(name, disk, self, marker)
        self.boxes[name] = box
        self._boots += 1
        box.incarnation = self._boots
        for other in self.boxes.values():
            if other.name != name:
                other.inbox.append(Connected(name, box.incarnation, box.feature))
                box.inbox.append(Connected(other.name, other.incarnation, other.feature))
        return box

    def stop(self, name: str) -> MemoryDisk:
        """Kill the process; its disk stays."""
        disk = self.boxes.pop(name).disk
        for other in self.boxes.values():
            other.inbox.append(Disconnected(name))
        disk.kill()
        return disk

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Step everyone every STEP_S of virtual time. Whether `until` came true."""
        for _ in range(int(seconds / STEP_S)):
            if until():
                return True
            self.now += STEP_S
            for name in sorted(set(self.boxes) - self.stuck):
                box = self.boxes[name]
                events, box.inbox = box.inbox, []
                outbox: list[tuple[str, AnyMessage]] = []
                try:
                    box.replica.step(events, outbox.extend)
                except Quarantined:
                    told = box.told
                    self.boot(name, self.stop(name)).told[:0] = told
                    continue
                for peer, message in outbox:
                    if peer in self.boxes and (name, peer) not in self.cut and not self.drop(name, peer, message):
                        self.boxes[peer].inbox.append(Received(name, message))
        return until()

    def rest(self, seconds: float) -> None:
        """Nothing is written; the journals get their quiet moments, as from the thread that owns them."""
        for _ in range(int(seconds * 10)):
            self.run(0.1)
            for box in self.boxes.values():
                box.journal.idle(self.now)

    def leader(self) -> Box:
        """The one leader, elected if there is none yet."""
        assert self.run(10.0, lambda: len(self._leaders()) == 1), "no leader"
        return self._leaders()[0]

    def follower(self) -> Box:
        leader = self.leader()
        return next(box for name, box in sorted(self.boxes.items()) if box is not leader)

    def propose(self, box: Box, body: Body, key: str, *, principal: str = "me", timeout_s: float = 3.0) -> list[Result]:
        """The list into which the result will come."""
        results: list[Result] = []
        box.replica.propose(Proposal(0, key, principal, box.name, encode_body(body)), timeout_s, results.append)
        return results

    def write(self, box: Box, label: str) -> Result:
        results = self.propose(box, publish(label), f"key-{label}")
        assert self.run(5.0, lambda: bool(results)), f"no result for {label}"
        return results[0]

    def labels(self, name: str) -> set[str]:
        """Of all versions in a member's state."""
        return {version.label for version in self.boxes[name].replica.state.versions.values()}

    def _leaders(self) -> list[Box]:
        found = [box for box in self.boxes.values() if box.replica.engine.role == LEADER]
        newest = max((box.replica.engine.term for box in found), default=0)
        return [box for box in found if box.replica.engine.term == newest and box.replica.engine.may_serve_reads]
