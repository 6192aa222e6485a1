"""Keeping verdicts with the members: each says of which order it is, and none is recorded that may no longer be true of it.

Each says how old the oldest reading of memory is that it rests on, since reading takes minutes, may be of another day where the caller
allows it, and a process may stand still: its age counts from there, not from its record. Not recorded is a verdict whose deployment got
another order while it was checked, and one that is older than members take. They refuse one whose order is not the current one. A verdict
that rests on a quorum is recorded as incomplete.
What cannot be recorded is told; the verdict stands even then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from consistency import report
from consistency.clock import boottime
from consistency.findings import Verdict
from raftmeta.client import Reply
from raftmeta.core.errors import OK, RaftmetaError
from raftmeta.core.types import MAX_ANSWER_AGE_MS

BATCH = 100  # verdicts in one request: 100 reports of the greatest size stay below what members take
# What a member says to a whole request because of one item. Each half is tried then; what it says to any request is not asked again.
_OF_ONE_ITEM = frozenset({"bad_request", "bad_json", "bad_name", "bad_field", "body_too_large", "internal"})


class Recorder(Protocol):
    async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply: ...


class _Told(msgspec.Struct, frozen=True):
    """Of one verdict."""

    code: str = OK
    detail: str = ""


class _Answer(msgspec.Struct, frozen=True):
    items: tuple[_Told, ...]


async def record(
    recorder: Recorder, verdicts: Sequence[Verdict], given_s: float | None = None, clock: Callable[[], float] = boottime
) -> tuple[str, ...]:
    """Why verdicts were not recorded. `given_s`: when they were given, by the clock."""
    since_s = clock() if given_s is None else given_s

    def age_ms(item: Verdict) -> int:
        return math.ceil((clock() - since_s) * 1000) + (item.oldest_proof_ms or 0)

    why = [f"{item.deployment}: it got another order while it was checked" for item in verdicts if item.moved]
    pending = [item for item in verdicts if not item.moved]
    for first in range(0, len(pending), BATCH):
        why += await _recorded(recorder, pending[first : first + BATCH], age_ms)
    return tuple(why)


async def _recorded(recorder: Recorder, batch: Sequence[Verdict], age_ms: Callable[[Verdict], int]) -> list[str]:
    """`age_ms`: of a verdict now. It is asked before each request, because those before it took their time."""
    aged = [(item, age_ms(item)) for item in batch]
    late = sorted(item.deployment for item, age in aged if age > MAX_ANSWER_AGE_MS)
    why = [f"{name}: memory that the verdict rests on was read more than {report.duration(MAX_ANSWER_AGE_MS)} ago" for name in late]
    young = [(item, age) for item, age in aged if age <= MAX_ANSWER_AGE_MS]
    if not young:
        return why
    try:
        return why + _refused(await recorder.record_verdicts([_item(item, age) for item, age in young]), young)
    except RaftmetaError as error:
        if len(young) > 1 and error.code in _OF_ONE_ITEM:
            half = len(young) // 2
            for part in (young[:half], young[half:]):
                why += await _recorded(recorder, [item for item, _ in part], age_ms)
            return why
        return why + [f"{item.deployment}: {error}" for item, _ in young]


def _refused(reply: Reply, batch: Sequence[tuple[Verdict, int]]) -> list[str]:
    """Why members did not take some of these."""
    try:
        told = msgspec.convert(dict(reply), _Answer).items
    except msgspec.ValidationError as cause:
        return [f"{item.deployment}: a member's answer is not what became of verdicts: {cause}" for item, _ in batch]
    if len(told) != len(batch):
        return [f"{item.deployment}: a member told of {len(told)} verdicts, it was given {len(batch)}" for item, _ in batch]
    judged = zip(batch, told, strict=True)
    return [f"{item.deployment}: {one.code}: {one.detail}" for (item, _), one in judged if one.code != OK]


def _item(verdict: Verdict, age_ms: int) -> dict[str, Any]:
    basis = {
        "generation": verdict.generation,
        "order_revision": verdict.order_revision,
        "version": verdict.version,
        "started_revision": verdict.started_revision,
        "node_count": verdict.nodes_seen,
        "age_ms": age_ms,
    }
    word, made = report.recorded_as(verdict), report.for_record(verdict)
    return {"deployment": verdict.deployment, "verdict": word, "report": made, "basis": basis}
