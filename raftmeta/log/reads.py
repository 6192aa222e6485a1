"""Linearizable reads (C1): the read index, shared by readers.

On the leader a read waits for a heartbeat round that begins after the read arrived; all reads that wait when a round begins share it, and
one round is under way at a time. When a majority answered the round and the leader applied the commit index noted at its start, its reads
may be served from the state. A follower asks the leader for such an index and waits until it applied it. A barrier also tells how stale
this member can be: what it applied is at least as new as the moment at which the barrier was started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

ReadSink = Callable[[str, int], None]  # ("ok", index to have applied) or (error code, 0)
MAX_WAITING = 20_000


class _Read(NamedTuple):
    deadline: float
    sink: ReadSink


class _Round(NamedTuple):
    number: int  # the leader's round, or the id of the question to the leader
    read_index: int  # -1 until the leader answered
    started_at: float
    reads: list[_Read]


class Reads:
    def __init__(self, first_id: int) -> None:
        self._waiting: deque[_Read] = deque()
        self._round: _Round | None = None
        self._applying: deque[_Round] = deque()  # confirmed, waiting for apply
        self._next_id = first_id
        self.barrier_started_at = float("-inf")  # start of the newest barrier that this member applied

    @property
    def idle(self) -> bool:
        return not self._waiting and self._round is None

    def submit(self, deadline: float, sink: ReadSink) -> None:
        if len(self._waiting) >= MAX_WAITING:
            sink("overloaded", 0)
        else:
            self._waiting.append(_Read(deadline, sink))

    def start_round(self, number: int, commit_index: int, now: float) -> bool:
        """On the leader: let the next heartbeat round, `number`, answer for the waiting reads. False when there is nothing to start."""
        if not self._waiting or self._round is not None:
            return False
        self._round = _Round(number, commit_index, now, self._take())
        return True

    def confirmed(self, number: int) -> None:
        """On the leader: a majority answered round `number` or a later one."""
        if self._round is not None and number >= self._round.number:
            self._applying.append(self._round)
            self._round = None

    def ask(self, now: float, retry_s: float) -> int | None:
        """On a follower: the id of a question to send to the leader now, None when one is under way or nobody waits.

        A question that got no answer for `retry_s` is asked anew: a later start is always allowed, an earlier one never.
        """
        if self._round is not None:
            if now - self._round.started_at < retry_s:
                return None
            self._waiting.extendleft(reversed(self._round.reads))
            self._round = None
        if not self._waiting:
            return None
        question, self._next_id = self._next_id, self._next_id + 1
        self._round = _Round(question, -1, now, self._take())
        return question

    def answered(self, question: int, index: int) -> None:
        """The leader's answer; -1: it does not lead."""
        if self._round is None or self._round.number != question:
            return
        current, self._round = self._round, None
        if index < 0:
            self._waiting.extendleft(reversed(current.reads))
        else:
            self._applying.append(current._replace(read_index=index))

    def settle(self, applied_index: int) -> None:
        """Serve every confirmed read whose index is applied."""
        while self._applying and self._applying[0].read_index <= applied_index:
            done = self._applying.popleft()
            self.barrier_started_at = max(self.barrier_started_at, done.started_at)
            for read in done.reads:
                read.sink("ok", done.read_index)

    def lost_leader(self) -> None:
        """The round under way will not be answered; its reads wait for the next leader."""
        if self._round is not None:
            self._waiting.extendleft(reversed(self._round.reads))
            self._round = None

    def expire(self, now: float, code: str) -> None:
        for holder in [self._waiting, *([self._round.reads] if self._round else []), *(r.reads for r in self._applying)]:
            overdue = [read for read in holder if read.deadline <= now]
            if overdue:
                kept = [read for read in holder if read.deadline > now]
                holder.clear()
                holder.extend(kept)
            for read in overdue:
                read.sink(code, 0)

    def end(self, code: str) -> None:
        self.expire(float("inf"), code)

    def _take(self) -> list[_Read]:
        reads, self._waiting = list(self._waiting), deque()
        return reads
