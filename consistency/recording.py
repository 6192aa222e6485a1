"""Keeping verdicts with the members: each says of which order it is, and none is recorded that may no longer be true of it.

Not recorded is a verdict whose deployment got another order while it was checked, and one that comes late, for instance because this
process stood still: its time in the log would say that it is younger than it is. The members refuse one whose order is not the current one.
A verdict that rests on a quorum is recorded as incomplete. What cannot be recorded is told; the verdict stands even then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from consistency import report
from consistency.findings import Verdict
from raftmeta.client import Reply
from raftmeta.core.errors import OK, RaftmetaError

BATCH = 100  # verdicts in one request: 100 reports of the greatest size stay below what members take
RECORD_WITHIN_S = 60.0


class Recorder(Protocol):
    async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply: ...


async def record(
    recorder: Recorder, verdicts: Sequence[Verdict], given_s: float | None = None, clock: Callable[[], float] = time.monotonic
) -> tuple[str, ...]:
    """Why verdicts were not recorded. `given_s`: when they were given, by the clock."""
    until = (clock() if given_s is None else given_s) + RECORD_WITHIN_S
    why = [f"{item.deployment}: it got another order while it was checked" for item in verdicts if item.moved]
    pending = [item for item in verdicts if not item.moved]
    for first in range(0, len(pending), BATCH):
        batch = pending[first : first + BATCH]
        if clock() > until:
            why += [f"{item.deployment}: the verdict is older than {RECORD_WITHIN_S:g} s" for item in batch]
        else:
            why += await _recorded(recorder, batch)
    return tuple(why)


async def _recorded(recorder: Recorder, batch: Sequence[Verdict]) -> list[str]:
    items = [{"deployment": item.deployment, "verdict": report.recorded_as(item), "report": report.for_record(item)} for item in batch]
    try:
        told = (await recorder.record_verdicts(items))["items"]
    except RaftmetaError as error:
        return [f"{item.deployment}: {error}" for item in batch]
    if len(told) != len(batch):
        return [f"{item.deployment}: a member told of {len(told)} verdicts, it was given {len(batch)}" for item in batch]
    judged = zip(batch, told, strict=True)
    return [f"{item.deployment}: {one['code']}: {one.get('detail', '')}" for item, one in judged if one.get("code", OK) != OK]
