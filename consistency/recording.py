"""Keeping verdicts with the members: each says of which order it is, and none is recorded that may no longer be true of it.

Not recorded is a verdict whose deployment got another order while it was checked, and one that comes late, for instance because this
process stood still: its time in the log would say that it is younger than it is. The members refuse one whose order is not the current one.
A verdict that rests on a quorum is recorded as incomplete. What cannot be recorded is told; the verdict stands even then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from consistency import report
from consistency.asking import all_of
from consistency.findings import Verdict
from raftmeta.client import Reply
from raftmeta.core.errors import RaftmetaError

MAX_AT_ONCE = 8  # questions to members; more cost more: the library looks at all of its connections for each
RECORD_WITHIN_S = 60.0


class Recorder(Protocol):
    async def record_verdict(self, deployment: str, verdict: str, report: Mapping[str, Any], /) -> Reply: ...


async def record(
    recorder: Recorder, verdicts: Sequence[Verdict], given_s: float | None = None, clock: Callable[[], float] = time.monotonic
) -> tuple[str, ...]:
    """Why verdicts were not recorded. `given_s`: when they were given, by the clock."""
    turn = asyncio.Semaphore(MAX_AT_ONCE)
    until = (clock() if given_s is None else given_s) + RECORD_WITHIN_S

    async def one(item: Verdict) -> str:
        if item.moved:
            return f"{item.deployment}: it got another order while it was checked"
        made = report.for_record(item)
        async with turn:
            if clock() > until:
                return f"{item.deployment}: the verdict is older than {RECORD_WITHIN_S:g} s"
            try:
                await recorder.record_verdict(item.deployment, report.recorded_as(item), made)
            except RaftmetaError as error:
                return f"{item.deployment}: {error}"
        return ""

    return tuple(why for why in await all_of(one(item) for item in verdicts) if why)
