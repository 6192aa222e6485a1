"""Control's side of a hold: requests of one deployment wait in the front while the block of a `with` runs.

The lease is renewed from a task, over restarts of the front; a front that is away has no requests to hand out. Nothing here waits for the
front without an end, and what a pause is for must be safe without it: it spares requests a detour, it protects no memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from node_agent import tasks
from node_agent.ipc import CallFailed, ConnectionLost
from node_agent.messages import Held, Hold, LetGo, Numbered, Reply

LEASE_S: Final = 1.0  # longer than this process stands still on a busy machine; a dead one ends its holds with its connection
RENEW_S: Final = 0.25
POLL_S: Final = 0.005  # between looks whether workers still have requests
CALL_S: Final = 1.0


class Front(Protocol):
    """The front process, as far as a pause sees it."""

    async def call(self, make: Callable[[int], Numbered], timeout_s: float) -> Reply:
        """Raises ConnectionLost, CallFailed or TimeoutError."""


class Pause:
    def __init__(self, front: Front, deployment: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._front = front
        self._deployment = deployment
        self._clock_ns = clock_ns

    async def idle(self) -> int:
        """Until workers have no request of the deployment. Gives the monotonic time in ns until which they get none.

        Raises TimeoutError once the front holds them no longer, however often it is asked.
        """
        while True:
            asked_ns = self._clock_ns()
            held = await self.renew()
            if held is not None and not held.lease_ms:
                raise TimeoutError(f"requests of {self._deployment} were held back for as long as they may")
            if held is not None and not held.in_flight:
                return asked_ns + held.lease_ms * 1_000_000
            await asyncio.sleep(POLL_S)

    async def renew(self) -> Held | None:
        """None when the front does not answer."""
        with suppress(ConnectionLost, CallFailed, TimeoutError):
            reply = await self._front.call(lambda number: Hold(number, self._deployment, int(LEASE_S * 1000)), CALL_S)
            return reply if isinstance(reply, Held) else None
        return None

    async def keep(self) -> None:
        """Until cancelled, or until the front has held for as long as it may."""
        held = None
        while held is None or held.lease_ms:
            await asyncio.sleep(RENEW_S)
            held = await self.renew()

    async def let_go(self) -> None:
        with suppress(ConnectionLost, CallFailed, TimeoutError):
            await self._front.call(lambda number: LetGo(number, self._deployment), CALL_S)


@asynccontextmanager
async def paused(front: Front, deployment: str) -> AsyncIterator[Pause]:
    pause = Pause(front, deployment)
    await pause.renew()
    keeping = asyncio.create_task(pause.keep())
    try:
        yield pause
    finally:
        await tasks.end((keeping,))
        await pause.let_go()
