"""A replicated log of one member in memory: the port over `core.apply`, with switches for what a real one can answer.

`FakeMember` puts it together with a watch, a table of nodes and an authorizer, as a member does. Commands are applied on the calling thread
at once unless a switch says otherwise; `completions_on` runs them on another thread, as the engine does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from api.schemas.answers import ReadyCheck
from raftmeta.core import commands
from raftmeta.core.apply import apply_batch
from raftmeta.core.commands import Body, Command
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.state import SUPPORTED_FEATURE_LEVEL, State
from raftmeta.core.types import Outcome
from raftmeta.log.port import LogStatus, MemberInfo
from raftmeta.log.ticket import Ticket
from raftmeta.nodes import NodeTable
from raftmeta.security.roles import Principal, Role
from raftmeta.watch import WatchHub, WatchLimits

START_MS = 1_764_450_000_000
NEW_STATE = msgspec.structs.replace(State.empty(), feature_level=SUPPORTED_FEATURE_LEVEL)  # as a new cluster begins


@dataclass
class Switches:
    """What goes wrong."""

    no_leader: bool = False  # refuses proposals and barriers
    stopped: bool = False
    hold: bool = False  # neither applies nor answers until `release`
    unknown: bool = False  # applies, but answers that it does not know
    lose: bool = False  # does not apply, and answers that it does not know
    not_applied: bool = False
    lag: bool = False  # outcomes come before this member has applied them, until `catch_up`
    staleness_ms: float = 3.0
    clock_offset_ms: int = 0  # of this member against the others, as the log knows it


@dataclass
class FakeAuthorizer:
    """Tokens to names, and what each name may do. Without tokens everybody is `anonymous` and may do everything."""

    tokens: dict[str, str] = field(default_factory=dict)
    denied: set[tuple[str, str, str]] = field(default_factory=set)  # (name, action, resource); "*" for any

    def authenticate(self, token: str) -> Principal:
        if not self.tokens and not token:
            return Principal("anonymous", Role.ADMIN)
        if token not in self.tokens:
            raise RaftmetaError("unauthenticated", "the token is not known")
        return Principal(self.tokens[token], Role.ADMIN)

    def require(self, caller: Principal, action: str, resource: str) -> None:
        for name, denied_action, denied_resource in self.denied:
            if name == caller.name and denied_action in ("*", action) and denied_resource in ("*", resource):
                raise RaftmetaError("forbidden", f"{caller.name} may not {action} {resource}")


class FakeLog:
    """Applies in the order of proposals. `publish` is called with each state as the engine thread would."""

    def __init__(self, publish: Callable[[State, tuple[object, ...]], None], threaded: bool = False) -> None:
        self.switches = Switches()
        self.state = NEW_STATE
        self.now_ms = START_MS
        self.proposed: list[Command] = []  # what was accepted, applied or not
        self._publish = publish
        self._held: list[Callable[[], None]] = []
        self._lagging: list[tuple[State, tuple[object, ...]]] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1) if threaded else None

    def propose(self, body: Body, request_id: str, principal: str, timeout_s: float) -> Ticket[Outcome]:
        command = Command(commands.SCHEMA, request_id, principal, "m1", self.now_ms, body)
        ticket: Ticket[Outcome] = Ticket()
        self._run(lambda: self._settle(ticket, lambda: self._apply(command)))
        return ticket

    def read_barrier(self, timeout_s: float) -> Ticket[int]:
        ticket: Ticket[int] = Ticket()
        self._run(lambda: self._settle(ticket, self._barrier))
        return ticket

    def staleness_ms(self) -> float:
        return self.switches.staleness_ms

    def status(self) -> LogStatus:
        switches, revision = self.switches, self.state.revision
        role = "stopped" if switches.stopped else "candidate" if switches.no_leader else "leader"
        info = MemberInfo("m1", "zone-a", "127.0.0.1:7401", "http://127.0.0.1:7400", role, revision, SUPPORTED_FEATURE_LEVEL)
        return LogStatus(
            member_id="m1",
            cluster_id="fake",
            role=role,
            leader_id="" if switches.no_leader else "m1",
            term=1,
            last_index=revision,
            commit_index=revision,
            applied_index=revision,
            applied_revision=revision,
            members=(info,),
            journal_bytes=0,
            snapshot_index=0,
            sync_ms=0.1,
            fault="the disk is gone" if switches.stopped else "",
            clock_offset_ms=switches.clock_offset_ms,
        )

    def release(self) -> None:
        """Runs what was held back."""
        self.switches.hold = False
        held, self._held = self._held, []
        for work in held:
            work()

    def catch_up(self) -> None:
        """Publishes what was applied elsewhere already."""
        self.switches.lag = False
        lagging, self._lagging = self._lagging, []
        for state, events in lagging:
            self._publish(state, events)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _run(self, work: Callable[[], None]) -> None:
        if self.switches.hold:
            self._held.append(work)
        elif self._pool is not None:
            self._pool.submit(work)
        else:
            work()

    def _settle(self, ticket: Ticket, work: Callable[[], object]) -> None:  # type: ignore[type-arg]
        try:
            value = work()
        except RaftmetaError as error:
            ticket.set_exception(error)
        else:
            ticket.set_result(value)

    def _apply(self, command: Command) -> Outcome:
        switches = self.switches
        if switches.no_leader:
            raise RaftmetaError("no_leader", "no leader is known")
        if switches.not_applied:
            raise RaftmetaError("not_applied", "the leader changed before the command was replicated")
        if switches.lose:
            raise RaftmetaError("unknown_outcome", "the leader did not answer in time")
        with self._lock:
            self.proposed.append(command)
            done = apply_batch(self.state, (commands.encode(command),))
            self.state = done.state
            if switches.lag:
                self._lagging.append((done.state, done.events))
            else:
                self._publish(done.state, done.events)
        if switches.unknown:
            raise RaftmetaError("unknown_outcome", "the leader did not answer in time")
        return done.outcomes[0]

    def _barrier(self) -> int:
        if self.switches.no_leader:
            raise RaftmetaError("no_leader", "no leader is known")
        return self.state.revision


class FakeMember:
    """A member whose log is in memory. Time stands still unless a test moves it."""

    def __init__(self, watch_limits: WatchLimits | None = None, *, threaded: bool = False) -> None:
        self.monotonic_ms = 1_000_000
        self.state = NEW_STATE
        self.watch = WatchHub(0, watch_limits)
        self.nodes = NodeTable(lambda: self.monotonic_ms)
        self.authorizer = FakeAuthorizer()
        self.gossiped: list[tuple[str, bytes]] = []
        self.peer_events: dict[str, int] = {}
        self.verified = True
        self.unsound = ""
        self.log = FakeLog(self._published, threaded)

    def gossip(self, topic: str, data: bytes) -> None:
        self.gossiped.append((topic, data))

    def checks(self) -> tuple[ReadyCheck, ...]:
        return (ReadyCheck("state", self.verified, "the state hash was compared with a peer's" if self.verified else "not compared yet"),)

    def _published(self, state: State, events: tuple[object, ...]) -> None:
        self.state = state
        self.watch.publish(events, state.revision)  # type: ignore[arg-type]
