"""One simulated member: the real replica, engine, journal and snapshots over a disk in memory, restarted as often as it crashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from raftmeta.core.commands import Body
from raftmeta.core.events import Event
from raftmeta.core.state import State
from raftmeta.durable import DiskFailed, DiskFull
from raftmeta.log import quarantine
from raftmeta.log.boot import Recovered, StateLoader, recover
from raftmeta.log.configuration import Configuration
from raftmeta.log.exchange import ExchangeSettings, SnapshotExchange
from raftmeta.log.faults import HardStateCorrupt
from raftmeta.log.guard import Rules
from raftmeta.log.hard_state import NAME, HardStateFile, Owner
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.messages import AnyMessage
from raftmeta.log.opening import Openers, Whose, open_log
from raftmeta.log.peers import PeerEvent
from raftmeta.log.quarantine import Quarantine, Quarantined
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
    owner: SimMember

    def apply(self, index: int, term: int, payload: bytes) -> None:
        super().apply(index, term, payload)
        self.witness.applied(self._setup.member_id, (index, term, self.engine.term), payload, None if self.owner.diverged else self.state)

    def on_role(self, role: int) -> None:
        super().on_role(role)
        self.witness.role(self._setup.member_id, role, self.engine.term, self._journal)


class SimMember:
    def __init__(self, member_id: str, seed: int, marker: Configuration | None, world: World) -> None:
        self.id, self._world = member_id, world
        self._marker = self._configured = marker
        self.random = Random(f"{seed} {member_id}")
        self._owner = Owner(CLUSTER_ID, member_id)
        self.disk = MemoryDisk(self.random.getrandbits(32))
        self.incarnation = 0
        self.replica: SimReplica | None = None
        self.journal: Journal | None = None
        self.inbox: list[PeerEvent] = []
        self.busy_until = 0.0
        self.paused_until = 0.0
        self.wakes_at = float("inf")
        self.wall_offset_ms = 0
        self.halted = ""
        self.set_aside_now = False
        self._began = False  # its disk held a journal
        self._joined = True  # it was joining at its last start, as everyone is at the first
        self._configuration = marker  # the last that it went by
        self.diverged = False  # its state was changed behind its back

    @property
    def alive(self) -> bool:
        return self.replica is not None

    @property
    def configuration(self) -> Configuration | None:
        """By which it goes, or went before it was down: what it had not synced may still be on its disk."""
        return self._configuration if self.replica is None else self.replica.engine.configuration

    @property
    def joining(self) -> bool:
        """Whether it has no vote, as far as one can say of a member that is down."""
        return self._joined if self.replica is None else self.replica.engine.joining

    @property
    def role(self) -> int:
        """Of the engine, -1 while it is down."""
        return -1 if self.replica is None else self.replica.engine.role

    def boot(self) -> None:
        """Start the process. A crash in the middle of booting leaves it down."""
        self.incarnation += 1
        self.inbox = []
        try:
            store = SnapshotStore(self.disk, DIRECTORY / "snapshots", CLUSTER_ID)
            openers = Openers(self._open_journal, lambda journal: self._recover(journal, StateLoader(store)))
            self.journal, recovered = open_log(self.disk, DIRECTORY, openers, Whose(self._owner, True, self._began))
            self._began = True
            exchange = SnapshotExchange(store, InlineWorker(), self.journal, self._world.exchange_settings)
            setup = ReplicaSetup(
                member_id=self.id,
                timing=self._world.timing,
                ports=Ports(self._world.clock, self.random.random),
                wall_ms=lambda: self._world.wall_ms() + self.wall_offset_ms,
                authorize=_everyone,
                rules=self._world.rules,
                feature=self._world.feature,
            )
            SimReplica.witness = self._world.invariants
            self.replica = SimReplica(setup, recovered, self.journal, exchange, self)
            self.replica.owner = self
            self.diverged = False
            self._world.invariants.booted(self.id, self.replica, self.journal)
            if recovered.joining and not self._joined:
                self._world.set_aside(self)
            self._joined = recovered.joining
            self._world.booted(self)
        except HardStateCorrupt:
            if not self._world.is_damaged(self):
                raise
            self._world.count("refused")
            self.end()
            self.replace_disk(with_marker=False)  # as the message says
        except DiskFull:
            if not self._is_joining() and not self._world.is_damaged(self):
                raise  # D4: what has a sound journal starts on a full disk
            self.power_off()
        except (PowerLost, DiskFailed):
            self.power_off()

    def replace_disk(self, *, with_marker: bool) -> None:
        """It starts with nothing the next time."""
        self.disk = MemoryDisk(self.random.getrandbits(32))
        self._marker = self._configured if with_marker else None
        self._began = self._joined = False
        self._world.invariants.disk_replaced(self.id)

    def _open_journal(self) -> Journal:
        world = self._world
        tuning = Tuning(owner=self._owner, joining=True, tail_bytes=world.tail_bytes, clock=world.clock)
        return Journal.open(self.disk, DIRECTORY / "journal", segment_bytes=world.segment_bytes, tuning=tuning)

    def _is_joining(self) -> bool:
        """Whether it has no vote, by its disk."""
        if not self.disk.exists(DIRECTORY / "journal" / NAME):
            return True
        hard = HardStateFile.load(self.disk, DIRECTORY / "journal")
        hard.close()
        return hard.state.promise.joining

    def _recover(self, journal: Journal, snapshots: StateLoader) -> Recovered:
        if quarantine.set_aside_before(self.disk, DIRECTORY) is not None:
            self._marker = None
        from_log = self._world.rules.boot_from_log
        return recover(journal, snapshots, self._marker if from_log else self._configured, boot_from_log=from_log)

    def step(self) -> list[tuple[str, AnyMessage]]:
        """One step with everything that arrived. What it sent; when the member ended in it, what it sent before."""
        assert self.replica is not None and self.journal is not None
        events, self.inbox = self.inbox, []
        outbox: list[tuple[str, AnyMessage]] = []
        try:
            self.replica.step(events, outbox.extend)
            self.journal.idle(self._world.clock())
            self._world.invariants.stepped(self.id, self.replica)
            return outbox
        except (PowerLost, DiskFailed):
            self.power_off()
        except Quarantined:
            self.set_aside_now = True
            self.end()
        except Halted as fault:
            self.halted = str(fault)
            self.power_off()
        return outbox

    def end(self) -> None:
        """The process ends by itself; what it wrote stays readable, synced or not."""
        self._configuration = self.configuration
        self.replica = None
        self.journal = None
        self.disk.kill()

    def power_off(self) -> None:
        """The power went: callers never hear again, un-synced writes are lost, torn or kept."""
        self._configuration = self.configuration
        self.replica = None
        self.journal = None
        self.disk.crash()

    # the replica's observer

    def applied(self, state: State, events: Sequence[Event]) -> None:
        """The simulation looks at the replica itself."""

    def replaced(self, state: State) -> None:
        self._world.count("snapshot installed")
        self.diverged = False
        self._world.invariants.installed(self.id, state)

    def contradicted(self) -> None: ...

    def caught_up(self) -> None:
        self._joined = False
        self._world.caught_up(self)

    def bootstrapped(self) -> None:
        self._marker = None

    def peers_changed(self, configuration: Configuration) -> None:
        """The simulated network connects everyone."""

    def heard(self, peer: str, topic: str, data: bytes) -> None:
        """No agents here."""

    def alarm(self, code: str, detail: str) -> None:
        self._world.alarm(self.id, code, detail)

    def alarm_over(self, code: str) -> None:
        self._world.note("alarm over", self.id, code)

    def slow_disk(self, count: int, longest_s: float) -> None:
        """A step takes no virtual time in here."""

    def set_aside(self, why: Quarantine) -> None:
        quarantine.mark(self.disk, DIRECTORY, why)


class World(Protocol):
    """What all members share."""

    timing: Timing
    rules: Rules
    feature: int
    clock: Callable[[], float]
    wall_ms: Callable[[], int]
    invariants: Invariants
    exchange_settings: ExchangeSettings
    segment_bytes: int
    tail_bytes: int

    def note(self, *what: object) -> None:
        """Into the trace."""

    def count(self, kind: str) -> None: ...
    def booted(self, member: SimMember) -> None: ...
    def caught_up(self, member: SimMember) -> None: ...
    def set_aside(self, member: SimMember) -> None: ...
    def is_damaged(self, member: SimMember) -> bool: ...
    def alarm(self, member: str, code: str, detail: str) -> None: ...


def _everyone(principal: str, body: Body) -> bool:
    return True
