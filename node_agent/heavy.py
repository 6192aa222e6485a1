"""Large bodies and answers are read and written in one thread beside the front's loop, one after the other.

The interpreter runs one thread at a time, so a single call of the JSON library still keeps the loop waiting; several never do so in a row.
How many wait is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from node_agent.serve import ServeError

LARGE_BYTES: Final = 64 << 10
MAX_WAITING: Final = 8  # the one at work included

T = TypeVar("T")


class Heavy:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies")
        self._waiting = 0

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Raises ServeError 503 when too many large bodies wait, and what `work` does."""
        if size > LARGE_BYTES and self._waiting >= MAX_WAITING:
            raise ServeError(503, f"{MAX_WAITING} large bodies wait to be read", retry_after_s=1)
        return await self.write(size, work)

    async def write(self, size: int, work: Callable[[], T]) -> T:
        """What was computed is not refused any more: the queue bounded it."""
        if size <= LARGE_BYTES:
            return work()
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._waiting -= 1
