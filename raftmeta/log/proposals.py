"""Commands on their way into the log, from arrival to result (R12: every one of them ends, in a bounded time).

`queue`: waiting for a leader or for the next entry. `inflight`: in an entry of this leader, by index. `forwarded`: sent to the leader. Each
has its deadline wherever it is: a majority that is there and takes nothing must not hold a caller for ever. A sink is called exactly once,
from the engine thread. Bounds: MAX_QUEUED commands and MAX_QUEUED_BYTES of bodies; beyond, `overloaded`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from raftmeta.core import commands
from raftmeta.core.commands import Body, Command
from raftmeta.core.types import Outcome
from raftmeta.log.messages import MAX_COMMAND_BYTES, MAX_ENTRY_BYTES, Proposal, bounded_depth

MAX_QUEUED = 20_000
MAX_QUEUED_BYTES = 64 << 20
MAX_BATCH = 4_096  # commands of one entry
NEVER = float("inf")


class Result(NamedTuple):
    """`code` "ok": applied, see `outcome` (which may be a rejection); else why there is none."""

    code: str
    outcome: Outcome | None = None
    log_index: int = 0  # log index of the entry, 0 when there is none


Sink = Callable[[Result], None]


class Pending:
    """One command and who waits for it."""

    __slots__ = ("body", "deadline", "principal", "request_id", "sink", "size_bytes", "source")

    def __init__(self, proposal: Proposal, deadline: float, sink: Sink) -> None:
        self.request_id, self.principal, self.source = proposal.request_id, proposal.principal, proposal.source
        self.body = proposal.body
        self.size_bytes = len(proposal.body) + 256
        self.deadline = deadline
        self.sink = sink


class Batch(NamedTuple):
    payload: bytes
    waiting: list[Pending]


class _Entry:
    """One entry on its way, and who waits for its commands; None in place of one who was answered already."""

    __slots__ = ("deadline", "term", "waiting")

    def __init__(self, term: int, waiting: list[Pending]) -> None:
        self.term = term
        self.waiting: list[Pending | None] = [*waiting]
        self.deadline = min((pending.deadline for pending in waiting), default=NEVER)

    def expire(self, now: float) -> list[Pending]:
        """Those whose time is up, who wait no longer."""
        overdue = [pending for pending in self.waiting if pending is not None and pending.deadline <= now]
        self.waiting = [None if pending is None or pending.deadline <= now else pending for pending in self.waiting]
        self.deadline = min((pending.deadline for pending in self.waiting if pending is not None), default=NEVER)
        return overdue


class Proposals:
    def __init__(self, first_id: int) -> None:
        """`first_id` differs between incarnations, so that an answer meant for an earlier one is nobody's."""
        self.queue: deque[Pending] = deque()
        self.inflight: dict[int, _Entry] = {}
        self.forwarded: dict[int, Pending] = {}
        self._queued_bytes = 0
        self._next_id = first_id
        self._last_ms = 0

    @property
    def queue_bytes(self) -> int:
        """Upper bound of the next entry's payload."""
        return min(self._queued_bytes, MAX_ENTRY_BYTES + MAX_COMMAND_BYTES)

    def submit(self, pending: Pending) -> None:
        """Queue it, or end it at once as too large or one too many."""
        if pending.size_bytes > MAX_COMMAND_BYTES:
            pending.sink(Result("body_too_large"))
        elif len(self.queue) >= MAX_QUEUED or self._queued_bytes + pending.size_bytes > MAX_QUEUED_BYTES:
            pending.sink(Result("overloaded"))
        else:
            self.queue.append(pending)
            self._queued_bytes += pending.size_bytes

    def submit_first(self, pending: Pending) -> None:
        """This member's own, before whatever waits; few and small enough to need no bound."""
        self.queue.appendleft(pending)
        self._queued_bytes += pending.size_bytes

    def next_batch(self, now_ms: int) -> Batch | None:
        """The oldest queued commands as the payload of one entry, stamped; at most MAX_ENTRY_BYTES and MAX_BATCH."""
        if not self.queue:
            return None
        self._last_ms = max(self._last_ms, now_ms)
        encoded: list[bytes] = []
        waiting: list[Pending] = []
        size = 0
        while self.queue and len(encoded) < MAX_BATCH:
            size += self.queue[0].size_bytes
            if encoded and size > MAX_ENTRY_BYTES:
                break
            pending = self._pop()
            encoded.append(_stamp(pending, self._last_ms))
            waiting.append(pending)
        return Batch(_payload_encoder.encode(encoded), waiting)

    def appended(self, index: int, term: int, waiting: list[Pending]) -> None:
        self.inflight[index] = _Entry(term, waiting)

    def applied(self, index: int, term: int, outcomes: Sequence[Outcome]) -> None:
        """The entry at `index` is committed: with its own term its commands have outcomes, with another they are in no log."""
        entry = self.inflight.pop(index, None)
        if entry is None:
            return
        if entry.term != term:
            for pending in entry.waiting:
                if pending is not None:
                    pending.sink(Result("not_applied"))
            return
        for pending, outcome in zip(entry.waiting, outcomes, strict=True):
            if pending is not None:
                pending.sink(Result("ok", outcome, index))

    def take_forwards(self, max_bytes: int) -> list[Proposal]:
        """Queued commands to send to the leader; they stay here as `forwarded`."""
        taken: list[Proposal] = []
        size = 0
        while self.queue and (not taken or size + self.queue[0].size_bytes <= max_bytes):
            pending = self._pop()
            size += pending.size_bytes
            self.forwarded[self._next_id] = pending
            taken.append(Proposal(self._next_id, pending.request_id, pending.principal, pending.source, pending.body))
            self._next_id += 1
        return taken

    def answered(self, proposal_id: int, result: Result) -> None:
        pending = self.forwarded.pop(proposal_id, None)
        if pending is not None:
            pending.sink(result)

    def lost_leadership(self) -> None:
        """Their entries may still be committed by another leader."""
        waiting = [pending for entry in self.inflight.values() for pending in entry.waiting if pending is not None]
        self.inflight.clear()
        for pending in waiting:
            pending.sink(Result("unknown_outcome"))

    def lost_leader(self) -> None:
        """What was sent to a leader that is gone may or may not have been proposed."""
        self.end_forwarded("unknown_outcome")

    def end_forwarded(self, code: str) -> None:
        waiting, self.forwarded = list(self.forwarded.values()), {}
        for pending in waiting:
            pending.sink(Result(code))

    def end_queued(self, code: str) -> None:
        """Nothing queued is in any log."""
        waiting, self.queue, self._queued_bytes = self.queue, deque(), 0
        for pending in waiting:
            pending.sink(Result(code))

    def answer_known(self, known: Callable[[Pending], Outcome | None]) -> None:
        """End those queued whose key has an outcome: they need no entry, so nothing that forbids one is the answer to them."""
        found = [(pending, known(pending)) for pending in self.queue]
        self.queue = deque(pending for pending, outcome in found if outcome is None)
        self._queued_bytes = sum(pending.size_bytes for pending in self.queue)
        for pending, outcome in found:
            if outcome is not None:
                pending.sink(Result("ok", outcome))

    def expire(self, now: float) -> None:
        if any(pending.deadline <= now for pending in self.queue):
            overdue = [pending for pending in self.queue if pending.deadline <= now]
            self.queue = deque(pending for pending in self.queue if pending.deadline > now)
            self._queued_bytes = sum(pending.size_bytes for pending in self.queue)
            for pending in overdue:
                pending.sink(Result("no_leader"))
        for proposal_id in [key for key, pending in self.forwarded.items() if pending.deadline <= now]:
            self.forwarded.pop(proposal_id).sink(Result("unknown_outcome"))
        for overdue_entry in [entry for entry in self.inflight.values() if entry.deadline <= now]:
            for pending in overdue_entry.expire(now):  # it may still be committed
                pending.sink(Result("unknown_outcome"))

    def _pop(self) -> Pending:
        pending = self.queue.popleft()
        self._queued_bytes -= pending.size_bytes
        return pending


def commands_of(payload: memoryview | bytes) -> list[bytes]:
    """The encoded commands of an entry's payload without its opcode. Raises msgspec.MsgspecError."""
    return _payload_decoder.decode(payload)


def encode_body(body: Body) -> bytes:
    return commands.encode_body(body)


def decode_body(data: bytes) -> Body:
    """Raises msgspec.MsgspecError."""
    return bounded_depth(_body_decoder, data)


def _stamp(pending: Pending, now_ms: int) -> bytes:
    return _stamped_encoder.encode(
        _Stamped(commands.SCHEMA, pending.request_id, pending.principal, pending.source, now_ms, msgspec.Raw(pending.body))
    )


class _Stamped(msgspec.Struct, frozen=True, array_like=True):
    """`Command` with a body that is encoded already: same bytes, no second encoding."""

    schema: int
    request_id: str
    principal: str
    source: str
    stamped_ms: int
    body: msgspec.Raw


assert _Stamped.__struct_fields__ == Command.__struct_fields__

_payload_encoder = msgspec.msgpack.Encoder()
_payload_decoder = msgspec.msgpack.Decoder(list[bytes])
_stamped_encoder = msgspec.msgpack.Encoder()
_body_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)
