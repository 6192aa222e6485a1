"""Keeping verdicts with the members: each says of which order it is, and none is recorded that may no longer be true of it.

Not recorded is a verdict whose deployment got another order while it was checked, and one that comes late, for instance because this
process stood still: its time in the log would say that it is younger than it is, so it counts from the oldest answer that it rests on.
The members refuse one whose order is not the current one. A verdict that rests on a quorum is recorded as incomplete. What cannot be
recorded is told; the verdict stands even then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from consistency import report
from consistency.findings import Verdict
from raftmeta.client import Reply
from raftmeta.core.errors import OK, RaftmetaError

BATCH = 100  # verdicts in one request: 100 reports of the greatest size stay below what members take
RECORD_WITHIN_S = 60.0
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
    recorder: Recorder, verdicts: Sequence[Verdict], given_s: float | None = None, clock: Callable[[], float] = time.monotonic
) -> tuple[str, ...]:
    """Why verdicts were not recorded. `given_s`: when they were given, by the clock."""
    given_s = clock() if given_s is None else given_s
    why = [f"{item.deployment}: it got another order while it was checked" for item in verdicts if item.moved]
    pending = [item for item in verdicts if not item.moved]
    for first in range(0, len(pending), BATCH):
        batch = pending[first : first + BATCH]
        passed_s = clock() - given_s
        in_time = [item for item in batch if passed_s + (item.oldest_answer_ms or 0) / 1000 <= RECORD_WITHIN_S]
        late = {item.deployment for item in batch} - {item.deployment for item in in_time}
        why += [f"{name}: an answer that the verdict rests on is older than {RECORD_WITHIN_S:g} s" for name in sorted(late)]
        why += await _recorded(recorder, in_time)
    return tuple(why)


async def _recorded(recorder: Recorder, batch: Sequence[Verdict]) -> list[str]:
    if not batch:
        return []
    items = [{"deployment": item.deployment, "verdict": report.recorded_as(item), "report": report.for_record(item)} for item in batch]
    try:
        told = msgspec.convert(dict(await recorder.record_verdicts(items)), _Answer).items
    except RaftmetaError as error:
        if len(batch) > 1 and error.code in _OF_ONE_ITEM:
            half = len(batch) // 2
            return await _recorded(recorder, batch[:half]) + await _recorded(recorder, batch[half:])
        return [f"{item.deployment}: {error}" for item in batch]
    except msgspec.ValidationError as cause:
        return [f"{item.deployment}: a member's answer is not what became of verdicts: {cause}" for item in batch]
    if len(told) != len(batch):
        return [f"{item.deployment}: a member told of {len(told)} verdicts, it was given {len(batch)}" for item in batch]
    judged = zip(batch, told, strict=True)
    return [f"{item.deployment}: {one.code}: {one.detail}" for item, one in judged if one.code != OK]
