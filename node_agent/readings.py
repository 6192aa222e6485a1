"""Readings of memory for who asks, one after the other in a thread of their own.

Whatever else control does in threads never waits for them. Questions for the same thing that come while its reading waits for its turn
share that reading; whoever asks once it began gets the next one, so nobody gets what began to be read before the question. A reading that
nobody waits for any more is not begun. How many wait is bounded; how long one takes is not, so askers may wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

MAX_WAITING: Final = 64

T = TypeVar("T")


class TooManyReadings(Exception):
    """Every place to wait is taken."""


class _Waiting:
    def __init__(self) -> None:
        self.until_ns = 0
        self.askers = 0
        self.task: asyncio.Task[Any]


class Readings:
    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._thread = ThreadPoolExecutor(1, "readings")
        self._turn = asyncio.Lock()
        self._waiting: dict[Hashable, _Waiting] = {}  # not begun

    async def share(self, key: Hashable, until_ns: int, read: Callable[[], T]) -> T | None:
        """What `read` gives, in the thread; None when its turn came after `until_ns`. Raises TooManyReadings, and what `read` does."""
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) >= MAX_WAITING:
                raise TooManyReadings(f"{MAX_WAITING} readings wait for their turn")
            waiting = self._waiting[key] = _Waiting()
            waiting.task = asyncio.create_task(self._run(key, waiting, read))
            waiting.task.add_done_callback(_look_at)
        waiting.until_ns = max(waiting.until_ns, until_ns)
        waiting.askers += 1
        try:
            return cast("T | None", await asyncio.shield(waiting.task))
        finally:
            waiting.askers -= 1

    async def _run(self, key: Hashable, waiting: _Waiting, read: Callable[[], Any]) -> Any:
        async with self._turn:
            del self._waiting[key]
            if not waiting.askers or self._clock_ns() > waiting.until_ns:
                return None
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)


def _look_at(task: asyncio.Task[Any]) -> None:
    """A fault that all who waited for it left to is nobody's."""
    if not task.cancelled():
        task.exception()
