"""One simulated member: the real replica, engine, journal and snapshots over a disk in memory, restarted as often as it crashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from raftmeta.core.commands import Body
from raftmeta.core.events import Event
from raftmeta.core.state import State
from raftmeta.durable import DiskFailed
from raftmeta.log import joining
from raftmeta.log.boot import recover
from raftmeta.log.configuration import Configuration
from raftmeta.log.exchange import ExchangeSettings, SnapshotExchange
from raftmeta.log.guard import Rules
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.messages import AnyMessage
from raftmeta.log.peers import PeerEvent
from raftmeta.log.replica import Replica, ReplicaSetup
from raftmeta.log.setup import Halted, Ports, Timing
from raftmeta.log.snapshots import SnapshotStore
from raftmeta.log.spares import InlineWorker
from tests.simulation.invariants import Invariants
from tests.support.memory_disk import MemoryDisk, PowerLost

DIRECTORY = Path("/data")
CLUSTER_ID = "sim"


class SimReplica(Replica):
    """Shows the invariants what was applied and who leads."""

    witness: Invariants

    def apply(self, index: int, term: int, payload: bytes) -> None:
        super().apply(index, term, payload)
        self.witness.applied(self._setup.member_id, (index, term, self.engine.term), payload, self.state)

    def on_role(self, role: int) -> None:
        super().on_role(role)
        self.witness.role(self._setup.member_id, role, self.engine.term, self._journal)


class SimMember:
    def __init__(self, member_id: str, seed: int, marker: Configuration | None, world: World) -> None:
        self.id, self._world = member_id, world
        self._marker = marker
        self.random = Random(f"{seed} {member_id}")
        self.disk = MemoryDisk(self.random.getrandbits(32))
        self.incarnation = 0
        self.replica: SimReplica | None = None
        self.journal: Journal | None = None
        self.inbox: list[PeerEvent] = []
        self.busy_until = 0.0
        self.paused_until = 0.0
        self.halted = ""

    @property
    def alive(self) -> bool:
        return self.replica is not None

    def boot(self) -> None:
        """Start the process. A crash in the middle of booting leaves it down."""
        self.incarnation += 1
        self.inbox = []
        try:
            joins = joining.mark_if_new(self.disk, DIRECTORY, self._marker is not None)
            self.journal = Journal.open(
                self.disk,
                DIRECTORY / "journal",
                segment_bytes=self._world.segment_bytes,
                tuning=Tuning(cluster_id=CLUSTER_ID, tail_bytes=self._world.tail_bytes, clock=self._world.clock),
            )
            store = SnapshotStore(self.disk, DIRECTORY / "snapshots")
            recovered = recover(self.journal, store, self._marker, joining=joins, boot_from_log=self._world.rules.boot_from_log)
            exchange = SnapshotExchange(store, InlineWorker(), self.journal, self._world.exchange_settings)
            setup = ReplicaSetup(
                member_id=self.id,
                timing=self._world.timing,
                ports=Ports(self._world.clock, self.random.random),
                wall_ms=self._world.wall_ms,
                authorize=_everyone,
                rules=self._world.rules,
            )
            SimReplica.witness = self._world.invariants
            self.replica = SimReplica(setup, recovered, self.journal, exchange, self)
            self._world.invariants.booted(self.id, self.replica, self.journal)
        except (PowerLost, DiskFailed):
            self.power_off()

    def step(self) -> list[tuple[str, AnyMessage]]:
        """One step with everything that arrived. Empty when the member ended in it."""
        assert self.replica is not None and self.journal is not None
        events, self.inbox = self.inbox, []
        try:
            outbox: list[tuple[str, AnyMessage]] = []
            self.replica.step(events, outbox.extend)
            self.journal.idle(self._world.clock())
            self._world.invariants.stepped(self.id, self.replica)
            return outbox
        except (PowerLost, DiskFailed):
            self.power_off()
        except Halted as fault:
            self.halted = str(fault)
            self.power_off()
        return []

    def power_off(self) -> None:
        """The power went: callers never hear again, un-synced writes are lost, torn or kept."""
        self.replica = None
        self.journal = None
        self.disk.crash()

    # the replica's observer

    def applied(self, state: State, events: Sequence[Event]) -> None:
        """The simulation looks at the replica itself."""

    def replaced(self, state: State) -> None:
        self._world.invariants.installed(self.id, state)

    def caught_up(self) -> None:
        joining.clear(self.disk, DIRECTORY)

    def bootstrapped(self) -> None:
        self._marker = None

    def peers_changed(self, configuration: Configuration) -> None:
        """The simulated network connects everyone."""

    def heard(self, peer: str, topic: str, data: bytes) -> None:
        """No agents here."""

    def alarm(self, code: str, detail: str) -> None:
        self._world.invariants.alarm(self.id, code, detail)


class World:
    """What all members share."""

    timing: Timing
    rules: Rules
    clock: Callable[[], float]
    wall_ms: Callable[[], int]
    invariants: Invariants
    exchange_settings: ExchangeSettings
    segment_bytes: int
    tail_bytes: int


def _everyone(principal: str, body: Body) -> bool:
    return True
