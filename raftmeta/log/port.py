"""What the rest of the program needs of a replicated log.

The engine behind this port may be PySyncObj in our wall or, later, another. All methods may be called from any thread; tickets
always end: with a value, or with RaftmetaError `no_leader`, `not_applied`, `unknown_outcome`,
`overloaded`, `no_quorum` or `shutting_down`. A command that ended `not_applied` is in no log; one that ended `unknown_outcome` may
still be applied, and is safe to repeat under its key.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from raftmeta.core.commands import Body
from raftmeta.core.types import Outcome
from raftmeta.log.ticket import Ticket


class MemberInfo(msgspec.Struct, frozen=True):
    id: str
    zone: str
    peer_address: str  # host:port of the log transport
    api_url: str
    role: str  # leader | follower | learner | unreachable (as seen by the answering member)
    match_index: int  # -1 when the answering member does not lead
    feature_level: int = 0  # highest that its build can run, 0 while the answering member has no link to it


class LogStatus(msgspec.Struct, frozen=True):
    """One consistent look at the engine, published after every tick."""

    member_id: str
    cluster_id: str
    role: str  # leader | candidate | follower | stopped
    leader_id: str  # "" when unknown
    term: int
    last_index: int
    commit_index: int
    applied_index: int
    applied_revision: int
    members: tuple[MemberInfo, ...]
    journal_bytes: int
    snapshot_index: int
    sync_ms: float  # duration of the last journal sync
    fault: str  # why it stopped, "" while it runs
    clock_offset_ms: int = 0  # this member's wall clock less what most members' say


class Log(Protocol):
    def propose(self, body: Body, request_id: str, principal: str, timeout_s: float) -> Ticket[Outcome]:
        """Replicate one command from this member, leader or not; the outcome is the leader's. A follower forwards."""

    def read_barrier(self, timeout_s: float) -> Ticket[int]:
        """Revision that this member has applied and that is at least every revision committed before the call."""

    def staleness_ms(self) -> float:
        """Now minus the local monotonic time at which the last applied barrier was started; infinity before the first."""

    def status(self) -> LogStatus: ...
