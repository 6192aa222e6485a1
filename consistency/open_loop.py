"""Work that begins when its time has come, whatever became of the work before. A fault that nobody expected ends all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple


class Due(NamedTuple):
    work: Coroutine[Any, Any, None] | None  # None: left out
    next_s: float  # monotonic time at which the next is due


async def open_loop(stop: asyncio.Event, begin: Callable[[float, int], Due]) -> None:
    """Until `stop`; what is on its way then is waited for. `begin` is told when the work was due and how much is on its way.

    Raises what a piece of work raises.
    """
    on_its_way: set[asyncio.Task[None]] = set()
    try:
        async with asyncio.TaskGroup() as group:
            due_s = time.monotonic()
            while not await _stopped_before(due_s, stop):
                work, next_s = begin(due_s, len(on_its_way))
                if work is not None:
                    task = group.create_task(work)
                    on_its_way.add(task)
                    task.add_done_callback(on_its_way.discard)
                due_s = next_s
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed


async def _stopped_before(due_s: float, stop: asyncio.Event) -> bool:
    left_s = due_s - time.monotonic()
    if left_s > 0:
        try:
            async with asyncio.timeout(left_s):
                await stop.wait()
        except TimeoutError:
            pass
    else:
        await asyncio.sleep(0)  # what is on its way gets its turn, however late this is
    return stop.is_set()
