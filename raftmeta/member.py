"""One member, put together: lock, identity, journal, snapshots, network, replica, its thread, the controller. The wiring diagram.

Opening verifies everything that the disk holds before any port is bound. An empty data directory forms no cluster: it takes the marker that
`init` wrote, or the development mode of a single member that nobody else can reach.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from raftmeta.config import ServerConfig
from raftmeta.controller import Controller
from raftmeta.core.events import Event
from raftmeta.core.state import State
from raftmeta.durable import DirectoryLock, OsDisk, lock_directory
from raftmeta.log import joining
from raftmeta.log import marker as markers
from raftmeta.log.clock import monotonic
from raftmeta.log.configuration import Configuration
from raftmeta.log.exchange import ExchangeSettings, SnapshotExchange
from raftmeta.log.port import Log
from raftmeta.log.replica import Replica, ReplicaSetup
from raftmeta.log.runner import Runner
from raftmeta.log.setup import Ports, Timing
from raftmeta.log.transport import TlsTransport
from raftmeta.nodes import NodeTable
from raftmeta.parts import Parts, open_parts
from raftmeta.security.tokens import Authorizer
from raftmeta.watch import WatchHub, WatchLimits

STALLED_S = 2.0  # a step of the log's thread that takes longer shows in readiness: most likely the disk
MAX_ALARMS = 100

_log = structlog.get_logger()


class Check(msgspec.Struct, frozen=True):
    """One condition of readiness."""

    name: str
    ok: bool
    reason: str


class Member:
    """Built by `open`, then `start`, `stop` once each. `failed` is set when the member met something it must not survive; see `fault`."""

    def __init__(self, config: ServerConfig, parts: Parts, lock: DirectoryLock) -> None:
        self._parts, self._lock = parts, lock
        self.cluster_id = parts.identity.cluster_id
        self.failed = threading.Event()
        self.fault = ""
        self.on_failed: Callable[[], None] = lambda: None
        self._alarms: dict[str, str] = {}
        bounds = config.limits
        limits = WatchLimits(max_events=bounds.event_count, max_bytes=bounds.event_bytes, max_watchers=bounds.watchers)
        self.watch = WatchHub(parts.recovered.state.revision, limits)
        self.nodes = NodeTable(lambda: time.monotonic_ns() // 1_000_000)
        self.authorizer = Authorizer(config.principals_file)
        timings = config.timings
        setup = ReplicaSetup(
            member_id=config.member_id,
            timing=Timing(timings.heartbeat_s, timings.election_min_s, timings.election_max_s),
            ports=Ports(monotonic, random.SystemRandom().random),
            wall_ms=lambda: time.time_ns() // 1_000_000,
            authorize=self.authorizer.permits,
        )
        exchange = SnapshotExchange(
            parts.store, parts.snapshot_worker, parts.journal, ExchangeSettings(journal_bytes=bounds.snapshot_journal_bytes)
        )
        self._replica = Replica(setup, parts.recovered, parts.journal, exchange, self)
        self._runner = Runner(parts.identity, self._replica, parts.journal, parts.network, self._fail)
        self._controller = Controller(self._runner, lambda: self._replica.state, self.nodes)

    @classmethod
    def open(cls, config: ServerConfig) -> Member:
        """Verify and recover. Raises RaftmetaError with what is wrong and how to go on; nothing was changed then."""
        lock = lock_directory(config.data_dir)
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            parts = open_parts(config, OsDisk())
            undo.callback(parts.journal.close)
            member = cls(config, parts, lock)
            undo.pop_all()
        return member

    def start(self) -> None:
        """Bind the peer port and join. Raises RaftmetaError when the port is taken."""
        self.peers_changed(self._replica.engine.configuration)
        self._runner.start()
        self._controller.start()
        configuration = self._replica.engine.configuration
        if not configuration.members:
            _log.warning("no_cluster_yet", hint="this data directory belongs to no cluster; it waits until a leader adds this member")

    def stop(self) -> None:
        self._controller.stop()
        self._runner.stop()
        self.watch.close()
        for worker in (self._parts.snapshot_worker, self._parts.segment_worker):
            worker.shutdown(wait=False, cancel_futures=True)
        self._lock.release()

    # ------------------------------------------------------------------ what the API uses

    @property
    def state(self) -> State:
        return self._replica.state

    @property
    def log(self) -> Log:
        return self._runner

    def gossip(self, topic: str, data: bytes) -> None:
        self._runner.gossip(topic, data)

    def checks(self) -> tuple[Check, ...]:
        stalled = self._runner.stalled_s()
        found = [
            Check("log-thread", not self.fault, self.fault or "running"),
            Check("disk", stalled < STALLED_S, f"the current step takes {stalled:.1f} s" if stalled >= STALLED_S else "syncs return"),
            Check("state", True, "journal and snapshot were verified at start"),
        ]
        found += [Check(f"alarm-{code}", False, detail) for code, detail in sorted(self._alarms.items())]
        return tuple(found)

    # ------------------------------------------------------------------ the replica's observer, on its thread

    def applied(self, state: State, events: Sequence[Event]) -> None:
        self.watch.publish(events, state.revision)
        if any(event.kind == "rollout" for event in events):
            self._controller.notify()

    def replaced(self, state: State) -> None:
        self.watch.compacted(state.revision)
        self._controller.notify()

    def bootstrapped(self) -> None:
        markers.consume_marker(self._parts.disk, self._parts.data_dir)

    def caught_up(self) -> None:
        joining.clear(self._parts.disk, self._parts.data_dir)
        _log.info("caught_up", detail="this member started without data and votes from now on")

    def peers_changed(self, configuration: Configuration) -> None:
        network = self._parts.network
        if isinstance(network, TlsTransport):
            members = configuration.members or self._parts.configured
            network.set_peers({member.id: member.peer_address for member in members})

    def heard(self, peer: str, topic: str, data: bytes) -> None:
        if topic == "heartbeat":
            self.nodes.absorb(data)

    def alarm(self, code: str, detail: str) -> None:
        if self._alarms.get(code) != detail and (code in self._alarms or len(self._alarms) < MAX_ALARMS):
            self._alarms[code] = detail
            _log.error("alarm", code=code, detail=detail)

    def _fail(self, fault: str) -> None:
        self.fault = fault
        _log.critical("member_failed", fault=fault)
        self.failed.set()
        self.on_failed()
