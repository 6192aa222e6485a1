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
    given_s = clock() if given_s is None else given_s
    why = [f"{item.deployment}: it got another order while it was checked" for item in verdicts if item.moved]
    pending = [item for item in verdicts if not item.moved]
    for first in range(0, len(pending), BATCH):
        batch = pending[first : first + BATCH]
        passed_ms = math.ceil((clock() - given_s) * 1000)
        aged = [(item, passed_ms + (item.oldest_proof_ms or 0)) for item in batch]
        late = sorted(item.deployment for item, age_ms in aged if age_ms > MAX_ANSWER_AGE_MS)
        why += [f"{name}: memory that the verdict rests on was read more than {report.duration(MAX_ANSWER_AGE_MS)} ago" for name in late]
        why += await _recorded(recorder, [(item, age_ms) for item, age_ms in aged if age_ms <= MAX_ANSWER_AGE_MS])
    return tuple(why)


async def _recorded(recorder: Recorder, batch: Sequence[tuple[Verdict, int]]) -> list[str]:
    """Of verdicts with their ages in ms."""
    if not batch:
        return []
    items = [_item(item, age_ms) for item, age_ms in batch]
    try:
        told = msgspec.convert(dict(await recorder.record_verdicts(items)), _Answer).items
    except RaftmetaError as error:
        if len(batch) > 1 and error.code in _OF_ONE_ITEM:
            half = len(batch) // 2
            return await _recorded(recorder, batch[:half]) + await _recorded(recorder, batch[half:])
        return [f"{item.deployment}: {error}" for item, _ in batch]
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
