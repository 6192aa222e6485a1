"""The thread that owns a replica: waits for the network, steps, sends. Implements the port `Log` for every other thread.

Other threads never touch the replica: they leave a call in the inbox and get a ticket. What they may look at (state, status) is an
immutable value that this thread replaces. The inbox is bounded, for the thread may be held up by its disk, and what waited in it beyond its
deadline is not proposed. An exception out of a step is final: it is recorded, every waiting caller is ended, and `Ends` tells the process
to end; a member that met a disk error or two truths must not go on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Protocol

import msgspec

from raftmeta.core.commands import Body
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.state import State
from raftmeta.core.types import Outcome
from raftmeta.log.clock import monotonic
from raftmeta.log.journal import Journal
from raftmeta.log.messages import AnyMessage, Proposal
from raftmeta.log.peers import PeerEvent
from raftmeta.log.port import LogStatus, MemberInfo
from raftmeta.log.proposals import MAX_QUEUED, MAX_QUEUED_BYTES, Result, encode_body
from raftmeta.log.quarantine import Quarantined
from raftmeta.log.replica import Replica
from raftmeta.log.setup import LEADER, ROLE_NAMES
from raftmeta.log.ticket import Ticket

MAX_WAIT_S = 0.5
STATUS_S = 0.01  # a look at the engine is at most this old while it works
STOP_S = 5.0
GOSSIP_BYTES = 1 << 20  # of calls that wait, beyond which news of this member is dropped: the next one says more


class Network(Protocol):
    """What the runner uses of a transport."""

    def start(self) -> None: ...
    def poll(self, timeout_s: float) -> list[PeerEvent]: ...
    def send(self, peer: str, message: AnyMessage) -> bool: ...
    def flush(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Identity(msgspec.Struct, frozen=True):
    member_id: str
    cluster_id: str


class Ends(msgspec.Struct, frozen=True):
    """Who is told, on the log's thread, that it ended by itself and why."""

    fault: Callable[[str], None]  # the process must end
    set_aside: Callable[[str], None]  # the member begins again from its directory


class Runner:
    def __init__(self, identity: Identity, replica: Replica, journal: Journal, network: Network, ends: Ends) -> None:
        self._identity, self._replica, self._journal, self._network = identity, replica, journal, network
        self._ends = ends
        self._inbox: deque[Callable[[], object]] = deque()
        self._inbox_bytes = 0
        self._closed = False  # for good: nothing that is left in the inbox from now on would be found
        self._woken = False
        self._calling = threading.Lock()  # guards the four above; the inbox may be emptied without it
        self._stopping = False
        self._fault = ""
        self._set_aside = ""
        self._thread = threading.Thread(target=self._run, name="raftmeta-log", daemon=True)
        self._status = self._look()
        self._status_at = 0.0
        self._busy_since = inf  # monotonic: when this step began or, while waiting, when the wait has to end

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Bind the peer port in the caller's thread, so that a taken port is the caller's error; then run."""
        self._network.start()
        self._thread.start()

    def stop(self) -> None:
        """End every waiting caller and the thread, then close journal and network."""
        self._stopping = True
        self._network.wake()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._end_callers()  # those of a thread that never began
            self._network.close()
            self._journal.close(sync=not self._fault)  # what a step that failed had appended was promised to nobody

    def propose(self, body: Body, request_id: str, principal: str, timeout_s: float) -> Ticket[Outcome]:
        ticket: Ticket[Outcome] = Ticket()
        deadline = monotonic() + timeout_s
        proposal = Proposal(0, request_id, principal, self._identity.member_id, encode_body(body))

        def sink(result: Result) -> None:
            if result.outcome is not None and result.code == "ok":
                ticket.set_result(result.outcome)
            else:
                ticket.set_exception(RaftmetaError(result.code, _why(result.code)))

        def call() -> None:
            left_s = deadline - monotonic()
            if left_s > 0.0:
                self._replica.propose(proposal, left_s, sink)
            else:
                sink(Result("no_leader"))

        self._call(call, ticket, len(proposal.body))
        return ticket

    def read_barrier(self, timeout_s: float) -> Ticket[int]:
        ticket: Ticket[int] = Ticket()
        deadline = monotonic() + timeout_s

        def sink(code: str, index: int) -> None:
            if code == "ok":
                ticket.set_result(self._replica.state.revision)
            else:
                ticket.set_exception(RaftmetaError(code, _why(code)))

        self._call(lambda: self._replica.read(deadline - monotonic(), sink), ticket)
        return ticket

    def transfer(self, target: str) -> None:
        """Best effort: hand leadership to this member; the status shows what came of it."""
        self._call(lambda: self._replica.transfer(target), None)

    def gossip(self, topic: str, data: bytes) -> None:
        """Best effort, to every connected member; dropped while the log is busy."""
        self._call(lambda: self._replica.gossip(topic, data), None, len(data), GOSSIP_BYTES)

    def staleness_ms(self) -> float:
        return self._replica.staleness_s() * 1000.0

    @property
    def state(self) -> State:
        """The newest applied value of this log."""
        return self._replica.state

    def status(self) -> LogStatus:
        return self._status

    def stalled_s(self) -> float:
        """How long the current step has been running, or a wait beyond its end; what blocks the thread shows here while it cannot tell."""
        return max(0.0, monotonic() - self._busy_since)

    def _call(
        self,
        call: Callable[[], object],
        ticket: Ticket[Outcome] | Ticket[int] | None,
        size_bytes: int = 0,
        limit_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        """Leave it for the log's thread, which runs it or ends the ticket, also when it ends at this moment."""
        sleeps = False
        with self._calling:
            refusal = self._refusal(size_bytes, limit_bytes)
            if refusal is None:
                self._inbox.append(call)
                self._inbox_bytes += size_bytes
                sleeps, self._woken = not self._woken, True
        if refusal is not None:
            if ticket is not None:
                ticket.set_exception(refusal)
        elif sleeps:
            self._network.wake()

    def _refusal(self, size_bytes: int, limit_bytes: int) -> RaftmetaError | None:
        if self._closed or self._stopping or self._fault or self._set_aside:
            why = self._fault or self._set_aside or "the member is stopping"
            return RaftmetaError("starting" if self._set_aside else "shutting_down", why)
        if len(self._inbox) >= MAX_QUEUED or self._inbox_bytes + size_bytes > limit_bytes:
            return RaftmetaError(
                "overloaded", f"{len(self._inbox)} calls wait for the member's log, which has been busy for {self.stalled_s():.1f} s"
            )
        return None

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        self._busy_since = monotonic()
        try:
            while not self._stopping:
                self._once()
        except Quarantined as why:
            self._set_aside = str(why)
        except Exception as fault:  # noqa: BLE001 - the outermost loop: the member must end, whatever it was
            self._fault = f"{type(fault).__name__}: {fault}"
        self._busy_since = inf
        try:
            self._end_callers()
            self._status = self._look()
        finally:
            if self._fault:
                self._ends.fault(self._fault)
            elif self._set_aside:
                self._ends.set_aside(self._set_aside)

    def _end_callers(self) -> None:
        with self._calling:
            self._closed = True
        self._replica.stop()
        self._drain()
        self._replica.stop()

    def _once(self) -> None:
        wait = self._replica.next_deadline() - monotonic()
        wait = min(wait, self._journal.idle(monotonic()) - monotonic(), MAX_WAIT_S)
        wait = 0.0 if self._inbox else max(wait, 0.0)
        self._busy_since = monotonic() + wait
        events = self._network.poll(wait)
        self._busy_since = monotonic()
        self._drain()
        self._replica.step(events, self._transmit)
        now = monotonic()
        if now - self._status_at >= STATUS_S or self._replica.engine.role != self._looked_role:
            self._status, self._status_at = self._look(), now

    def _transmit(self, outbox: list[tuple[str, AnyMessage]]) -> None:
        for peer, message in outbox:
            self._network.send(peer, message)
        self._network.flush()

    def _drain(self) -> None:
        with self._calling:
            self._woken, self._inbox_bytes, due = False, 0, len(self._inbox)
        for _ in range(due):
            self._inbox.popleft()()

    def _look(self) -> LogStatus:
        engine = self._replica.engine
        self._looked_role = engine.role
        matches = engine.match_indexes | ({self._identity.member_id: engine.last_index} if engine.role == LEADER else {})
        return LogStatus(
            member_id=self._identity.member_id,
            cluster_id=self._identity.cluster_id,
            role="stopped" if self._fault or self._set_aside or self._stopping else ROLE_NAMES[engine.role],
            leader_id=engine.leader_id,
            term=engine.term,
            last_index=engine.last_index,
            commit_index=engine.commit_index,
            applied_index=engine.applied_index,
            applied_revision=self._replica.state.revision,
            members=tuple(
                MemberInfo(
                    id=member.id,
                    zone=member.zone,
                    peer_address=member.peer_address,
                    api_url=member.api_url,
                    role=self._role_of(member.id),
                    match_index=matches.get(member.id, -1),
                    feature_level=self._replica.levels.of(member.id),
                )
                for member in engine.configuration.members
            ),
            journal_bytes=self._journal.bytes,
            snapshot_index=self._replica.snapshot_index,
            sync_ms=self._replica.sync_s * 1000.0,
            fault=self._fault,
            clock_offset_ms=self._replica.clock_offset_ms(),
        )

    def _role_of(self, member_id: str) -> str:
        engine = self._replica.engine
        if member_id == self._identity.member_id:
            return ROLE_NAMES[engine.role]
        if member_id == engine.leader_id:
            return ROLE_NAMES[LEADER]
        return "follower" if self._replica.is_connected(member_id) else "unreachable"


_WHY = {
    "no_leader": "no leader answered before the deadline; nothing was proposed",
    "no_quorum": "a majority of the members did not confirm the leader before the deadline",
    "not_applied": "another leader's entry took the place of this one",
    "unknown_outcome": "the leader changed while the command was under way",
    "overloaded": "too many commands are waiting",
    "body_too_large": "the command exceeds 4 MiB",
    "disk_full": "the leader has no room for another journal segment",
    "shutting_down": "the member is stopping",
    "integrity": "members have different states: nothing is written before a majority says which is right, and a wrong one answers no read",
    "starting": "this member started without data and has not caught up",
    "forbidden": "the leader does not allow this principal to do this",
    "bad_request": "the leader could not read the forwarded command",
}


def _why(code: str) -> str:
    return _WHY.get(code, code)
