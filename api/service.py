"""One member as handlers see it: a state to read from, a way to propose, bounds, and counters.

Reads and writes take their meaning here: how fresh a state must be, how long to wait, and that a write is answered only after this member
itself has applied it, so that whoever wrote can read it back from the same member at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from api.bridge import Bridge
from api.deps import Member
from api.metrics import RequestStats
from api.operation import Call
from raftmeta.core.commands import Body
from raftmeta.core.errors import OK, RaftmetaError
from raftmeta.core.levels import level_fault
from raftmeta.core.state import State
from raftmeta.core.types import Outcome

T = TypeVar("T")

_KEY_BYTES = 8
GRACE_S = 0.5  # beyond a deadline that the log keeps itself: it knows better what became of a call


class ApiLimits(msgspec.Struct, frozen=True):
    """Bounds of the API. A client's attempt ends after 10 s, so a member answers before."""

    max_body_bytes: int = 4 << 20
    max_batch_bytes: int = 8 << 20
    max_in_flight: int = 2_048  # requests, watches not counted
    max_large_bytes: int = 256 << 20  # bodies above `large_bytes`, all together
    large_bytes: int = 64 << 10  # a body above this is worked on outside the event loop
    max_large_queue: int = 32  # such bodies waiting for the one thread that does it
    write_timeout_s: float = 8.0
    read_timeout_s: float = 5.0
    revision_wait_s: float = 2.0  # for min_revision, and for the own write to arrive here
    bookmark_s: float = 5.0
    comment_s: float = 2.0  # a sign of life on an idle watch, so that a dead client is noticed


class Rejected(RaftmetaError):
    """A command that was judged and refused; it has a revision."""

    def __init__(self, outcome: Outcome) -> None:
        params = result_of(outcome)
        super().__init__(outcome.code, outcome.detail, **{k: v for k, v in params.items() if k not in ("code", "detail", "self")})
        self.revision = outcome.revision
        self.repeated = outcome.repeated


class Service:
    """Belongs to one event loop."""

    def __init__(
        self,
        member: Member,
        loop: asyncio.AbstractEventLoop,
        limits: ApiLimits | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.member = member
        self._now_ms = now_ms
        self.limits = limits or ApiLimits()
        self.stats = RequestStats()
        self.draining = False  # set when the process was asked to end
        self.in_flight = 0
        self.large_bytes = 0  # of bodies above limits.large_bytes that are being read or worked on
        self._large_queue = 0
        self._random: list[str] = []  # of keys to come; each is used once
        self._bridge = Bridge(loop)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="raftmeta-bodies")

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def make_key(self) -> str:
        """An idempotency key for a caller without one. Its time is what most members' clocks say, whatever this one's does, and never
        behind the cluster's, which would make it an expired one."""
        if not self._random:
            drawn = os.urandom(_KEY_BYTES * 64).hex()  # one call for many keys
            self._random = [drawn[at : at + 2 * _KEY_BYTES] for at in range(0, len(drawn), 2 * _KEY_BYTES)]
        return f"{self.clock_ms():013d}-{self._random.pop()}"

    def clock_ms(self) -> int:
        """The clock that stamps records, as far as this member can tell: never behind what was stamped."""
        now_ms = self._now_ms() - self.member.log.status().clock_offset_ms
        return max(now_ms, self.member.state.cluster_ms, 0)

    async def view(self, call: Call, of_itself: bool = False) -> State:
        """The state to answer a read from. Raises RaftmetaError starting, stale, revision_not_reached, no_leader or no_quorum.

        A member that has not caught up answers nothing of the cluster; of_itself, it still says how far it is to who asks for stale.
        """
        member, query = self.member, call.query
        log = member.log
        of_the_cluster = not (of_itself and query.stale)
        if of_the_cluster:
            self.refuse_unsound()
        if query.stale:
            call.staleness_ms = log.staleness_ms()
            if query.max_stale_ms is not None and call.staleness_ms > query.max_stale_ms:
                raise RaftmetaError("stale", f"staler by {call.staleness_ms:.0f} ms, max_stale_ms is {query.max_stale_ms}")
        else:
            await self._barrier()
        if member.state.revision < query.min_revision:
            await self.reach(query.min_revision)
        state = member.state
        if of_the_cluster:  # looked at after the state was taken: a majority may have contradicted it while this waited
            self.refuse_unsound()
        if member.log is not log:  # what was learnt of the freshness of the former one's state says nothing of this one's
            raise RaftmetaError("starting", "this member began again from its disk while it was asked")
        return state

    async def propose(self, call: Call, body: Body, key: str = "") -> Outcome:
        """The outcome of a command that was applied, seen by this member. Raises Rejected or what the log raises.

        `key`: the command's own, where one call makes several.
        """
        self.refuse_unsound()  # it could not say what became of the command
        if level_fault(body, self.member.state.feature_level):
            await self.require_level(body)
        timeout_s = self.limits.write_timeout_s
        ticket = self.member.log.propose(body, key or call.key, call.caller.name, timeout_s)
        try:
            outcome = await self._bridge.result(ticket, timeout_s + GRACE_S)
        except TimeoutError as cause:
            raise _held_up("unknown_outcome", timeout_s) from cause
        if outcome.code != OK:
            raise Rejected(outcome)
        if self.member.state.revision < outcome.revision:
            await self.reach(outcome.revision)
        return outcome

    def refuse_unsound(self) -> None:
        """Raises RaftmetaError starting while nothing of the cluster may be told from this member's state."""
        why = self.member.unsound
        if why:
            raise RaftmetaError("starting", why)

    async def require_level(self, body: Body) -> None:
        """Raises RaftmetaError unsupported_command for what not every member would understand, and what a barrier raises."""
        if level_fault(body, self.member.state.feature_level):
            await self._barrier()
            fault = level_fault(body, self.member.state.feature_level)  # it may have been raised a moment ago
            if fault:
                raise RaftmetaError("unsupported_command", fault)

    async def reach(self, revision: int) -> None:
        """Waits a bounded time until this member has applied the revision. Raises RaftmetaError revision_not_reached."""
        await self.member.watch.reached(revision, self.limits.revision_wait_s)
        self.state_with(revision)

    def state_with(self, revision: int) -> State:
        """The newest state. Raises RaftmetaError revision_not_reached when it is older, perhaps because the member began again, or wrong.

        Not `starting`, which says that nothing was done: a write whose answer this is was applied.
        """
        state = self.member.state
        why = self.member.unsound
        if why:
            raise RaftmetaError("revision_not_reached", f"revision {revision} is expected; {why}", revision=state.revision)
        if state.revision < revision:
            raise RaftmetaError(
                "revision_not_reached", f"revision {revision} is expected, this member is at {state.revision}", revision=state.revision
            )
        return state

    async def _barrier(self) -> None:
        """Raises RaftmetaError no_leader or no_quorum."""
        timeout_s = self.limits.read_timeout_s
        try:
            await self._bridge.result(self.member.log.read_barrier(timeout_s), timeout_s + GRACE_S)
        except TimeoutError as cause:
            raise _held_up("no_quorum", timeout_s) from cause

    async def compute(self, size_bytes: int, work: Callable[..., T], *values: Any) -> T:
        """Runs pure work: at once when it is small, else beside the event loop. Raises RaftmetaError overloaded."""
        if size_bytes <= self.limits.large_bytes:
            return work(*values)
        if self._large_queue >= self.limits.max_large_queue:
            raise RaftmetaError("overloaded", f"{self._large_queue} large bodies are waiting, the limit is {self.limits.max_large_queue}")
        self._large_queue += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work, *values)
        finally:
            self._large_queue -= 1


def _held_up(code: str, timeout_s: float) -> RaftmetaError:
    """For a caller whom the log, which has a deadline itself, did not answer by then."""
    return RaftmetaError(code, f"this member's log did not answer within {timeout_s + GRACE_S:g} s; most likely its disk holds it up")


def result_of(outcome: Outcome) -> dict[str, Any]:
    """The result map of an outcome, {} when it has none."""
    return _decode(outcome.result) if outcome.result else {}


_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
