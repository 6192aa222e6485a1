"""One member, put together: lock, identity, journal, snapshots, network, replica, its thread, the controller. The wiring diagram.

Opening verifies everything that the disk holds before any port is bound. An empty data directory forms no cluster: it takes the marker that
`init` wrote, or the development mode of a single member that nobody else can reach.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog

from raftmeta.config import ServerConfig
from raftmeta.controller import Controller
from raftmeta.core.events import Event
from raftmeta.core.state import SUPPORTED_FEATURE_LEVEL, State
from raftmeta.durable import DirectoryLock, OsDisk, lock_directory
from raftmeta.log import marker as markers
from raftmeta.log import quarantine
from raftmeta.log.clock import monotonic
from raftmeta.log.configuration import Configuration
from raftmeta.log.exchange import ExchangeSettings, SnapshotExchange
from raftmeta.log.port import Log
from raftmeta.log.quarantine import Quarantine
from raftmeta.log.replica import Replica, ReplicaSetup
from raftmeta.log.runner import Ends, Runner
from raftmeta.log.setup import Ports, Timing
from raftmeta.log.transport import TlsTransport
from raftmeta.nodes import NodeTable
from raftmeta.parts import Parts, open_parts
from raftmeta.security.tokens import Authorizer
from raftmeta.watch import WatchHub, WatchLimits

STALLED_S = 2.0  # a step of the log's thread that takes longer shows in readiness: most likely the disk
MAX_ALARMS = 100
NO_CLUSTER = "this data directory belongs to no cluster; it waits until a leader adds this member"
VERIFIED = "journal and snapshot were verified at start"
SNAPSHOT_PAUSE_S = (
    0.001  # after each chunk, which takes about as long to encode: a commit then waits for one chunk, not for the next switch
)

_log = structlog.get_logger()


class Check(msgspec.Struct, frozen=True):
    """One condition of readiness."""

    name: str
    ok: bool
    reason: str


class Member:
    """Built by `open`, then `start`, `stop` once each. `failed` is set when the member met something it must not survive; see `fault`."""

    def __init__(self, config: ServerConfig, parts: Parts, lock: DirectoryLock) -> None:
        self._config, self._lock = config, lock
        self.cluster_id = parts.identity.cluster_id
        self.failed = threading.Event()
        self.fault = ""
        self.on_failed: Callable[[], None] = lambda: None
        self._stopping = threading.Event()
        self._beginning = threading.Lock()  # one at a time: beginning again, stopping
        self._alarms: dict[str, str] = {}
        bounds = config.limits
        limits = WatchLimits(max_events=bounds.event_count, max_bytes=bounds.event_bytes, max_watchers=bounds.watchers)
        self.watch = WatchHub(parts.recovered.state.revision, limits)
        self.nodes = NodeTable(lambda: time.monotonic_ns() // 1_000_000)
        self.authorizer = Authorizer(config.principals_file)
        self._assemble(parts)

    def _assemble(self, parts: Parts) -> None:
        """What is built anew when the member begins again from its directory."""
        config, timings = self._config, self._config.timings
        self._parts = parts
        self._level = 0  # feature level that the peers' builds were last required to run
        self._kept = quarantine.set_aside_before(parts.disk, parts.data_dir)
        if self._kept is not None:
            _log.warning("files_set_aside_are_kept", cause=self._kept.cause, detail=self._kept.detail)
        setup = ReplicaSetup(
            member_id=config.member_id,
            timing=Timing(timings.heartbeat_s, timings.election_min_s, timings.election_max_s),
            ports=Ports(monotonic, random.SystemRandom().random),
            wall_ms=lambda: time.time_ns() // 1_000_000,
            authorize=self.authorizer.permits,
            feature=SUPPORTED_FEATURE_LEVEL,
        )
        exchange = SnapshotExchange(
            parts.store,
            parts.snapshot_worker,
            parts.journal,
            ExchangeSettings(journal_bytes=config.limits.snapshot_journal_bytes),
            lambda: time.sleep(SNAPSHOT_PAUSE_S),
        )
        self._replica = Replica(setup, parts.recovered, parts.journal, exchange, self)
        self._runner = Runner(parts.identity, self._replica, parts.journal, parts.network, Ends(self._fail, self._begin_again_soon))
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
        self._require_level(self._replica.state)
        self._runner.start()
        self._controller.start()
        if self._belongs_to_none:
            _log.warning("no_cluster_yet", hint=NO_CLUSTER)

    def stop(self) -> None:
        self._stopping.set()
        with self._beginning:
            self._take_apart()
        self.watch.close()
        self._lock.release()

    def _take_apart(self) -> None:
        self._controller.stop()
        self._runner.stop()
        self._parts.store.close()  # the worker may be in the middle of a snapshot of a state that is set aside
        for worker in (self._parts.snapshot_worker, self._parts.segment_worker):
            worker.shutdown(wait=False, cancel_futures=True)

    def _begin_again_soon(self, why: str) -> None:
        """On the log's thread, which ends with this: another one takes over."""
        threading.Thread(target=self._begin_again, name="raftmeta-repair", daemon=True).start()
        _log.error("set_aside", detail=why)

    def _begin_again(self) -> None:
        """Open the directory once more, which sets aside what is marked, and take everything from the other members."""
        with self._beginning:
            if self._stopping.is_set():
                return
            try:
                self._take_apart()
                self._alarms.clear()
                self._assemble(open_parts(self._config, OsDisk()))
                self.watch.begin_again(self._replica.state.revision)
                self.start()
            except Exception as fault:  # noqa: BLE001 - the outermost frame of this thread: the member must end, whatever it was
                self._fail(f"the member could not begin again: {fault}")

    # ------------------------------------------------------------------ what the API uses

    @property
    def state(self) -> State:
        return self._runner.state

    @property
    def log(self) -> Log:
        return self._runner

    @property
    def unsound(self) -> str:
        """Why nothing may be read here now, "" when it may: it began with nothing and has not caught up, or a majority contradicts it."""
        if not self._replica.engine.joining:
            contradiction = self._replica.contradiction
            return f"a majority of the members has another state; {contradiction}" if contradiction else ""
        if self._belongs_to_none:
            return NO_CLUSTER
        unheard = self._replica.engine.founders_unheard
        if unheard:
            return f"the cluster forms once every first member has said that it holds nothing; {' and '.join(unheard)} did not yet"
        because = f", because it was set aside: {self._kept.detail}" if self._kept is not None else ""
        return f"this member has not caught up with the others yet{because}"

    @property
    def _belongs_to_none(self) -> bool:
        return self._kept is None and not self._replica.engine.configuration.members

    def transfer(self, target: str) -> None:
        """Hand leadership to another member, if this one leads; clients notice a pause of some milliseconds."""
        self._runner.transfer(target)

    @property
    def peer_events(self) -> Mapping[str, int]:
        """Counters of the links to the other members; they begin again with the member. {} for a single member."""
        network = self._parts.network
        return network.counters() if isinstance(network, TlsTransport) else {}

    def gossip(self, topic: str, data: bytes) -> None:
        self._runner.gossip(topic, data)

    def checks(self) -> tuple[Check, ...]:
        stalled = self._runner.stalled_s()
        found = [
            Check("log-thread", not self.fault, self.fault or "running"),
            Check("disk", stalled < STALLED_S, f"the current step takes {stalled:.1f} s" if stalled >= STALLED_S else "syncs return"),
            self._state_check(),
        ]
        if self._kept is not None:  # for somebody to look at; this member is none the worse for it
            found.append(Check("kept-files", True, f"in {self._parts.data_dir / quarantine.KEPT_NAME}: {self._kept.detail}"))
        found += [Check(f"alarm-{code}", False, detail) for code, detail in sorted(self._alarms.items())]
        return tuple(found)

    def _state_check(self) -> Check:
        """Files that read back well may still hold another state than the others' do: what nobody compared is no pass."""
        if self.unsound:
            return Check("state", False, self.unsound)
        if not self._replica.compared:
            return Check("state", False, f"{VERIFIED}, but no majority has compared its state with this one yet")
        return Check("state", True, f"{VERIFIED}, and no majority has another state")

    # ------------------------------------------------------------------ the replica's observer, on its thread

    def applied(self, state: State, events: Sequence[Event]) -> None:
        if self._replica.contradiction:  # what follows from a wrong state is told nobody
            self.watch.begin_again(state.revision)
        else:
            self.watch.publish(events, state.revision)
        self._require_level(state)
        if any(event.kind == "rollout" for event in events):
            self._controller.notify()

    def replaced(self, state: State) -> None:
        if self._replica.contradiction:  # the state before it may have come further than there is anything
            self.watch.begin_again(state.revision)
        else:
            self.watch.compacted(state.revision)
        self._require_level(state)
        self._controller.notify()

    def _require_level(self, state: State) -> None:
        """A build that cannot run the cluster's level would make another state of the log."""
        network = self._parts.network
        if state.feature_level != self._level and isinstance(network, TlsTransport):
            self._level = state.feature_level
            network.require_feature(self._level)

    def bootstrapped(self) -> None:
        markers.consume_marker(self._parts.disk, self._parts.data_dir)

    def contradicted(self) -> None:
        self.watch.begin_again(self._replica.state.revision)

    def caught_up(self) -> None:
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

    def alarm_over(self, code: str) -> None:
        if self._alarms.pop(code, None) is not None:
            _log.info("alarm_over", code=code)

    def slow_disk(self, count: int, longest_s: float) -> None:
        _log.warning("slow_disk", directory=str(self._parts.data_dir), slow_syncs=count, longest_ms=round(longest_s * 1000))

    def set_aside(self, why: Quarantine) -> None:
        quarantine.mark(self._parts.disk, self._parts.data_dir, why)

    def _fail(self, fault: str) -> None:
        self.fault = fault
        self.failed.set()
        self.on_failed()  # first: that the process ends may depend on nothing that can go wrong
        _log.critical("member_failed", fault=fault)
