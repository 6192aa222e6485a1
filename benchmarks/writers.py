"""Clients that go on writing while a leader is lost: one way to measure the gap for every kind of cluster.

Each writer keeps one HTTP connection to one surviving member and sends one new write after the other. An attempt that is not answered in
ATTEMPT_S is given up with its connection, any other failure is followed by PAUSE_S, and the next attempt is another new write. The gap is
what the clock of this process shows from just before the signal to the first answer to a write that began after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ATTEMPT_S = 0.1
PAUSE_S = 0.005
PER_MEMBER = 2  # writers, so that one that is waiting for its time-out does not decide the gap
GIVE_UP_S = 30.0
_BROKEN = (OSError, asyncio.IncompleteReadError, ValueError)


@dataclass(frozen=True)
class Target:
    """A plain HTTP address, and what makes a new write to it each time it is called, head and body."""

    host: str
    port: int
    request: Callable[[], bytes]


class _Writer:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._reader: asyncio.StreamReader | None = None
        self._stream: asyncio.StreamWriter | None = None

    async def write(self) -> bool:
        """One attempt; whether it was acknowledged."""
        try:
            async with asyncio.timeout(ATTEMPT_S):
                return await self._attempt()
        except (TimeoutError, *_BROKEN):
            self.close()
            return False

    async def _attempt(self) -> bool:
        if self._stream is None or self._reader is None:
            self._reader, self._stream = await asyncio.open_connection(self._target.host, self._target.port)
        self._stream.write(self._target.request())
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        await self._reader.readexactly(length)
        return lines[0].split(b" ")[1] in (b"200", b"201")

    def close(self) -> None:
        if self._stream is not None:
            self._stream.transport.abort()
        self._reader = self._stream = None


async def _measure(targets: Sequence[Target], strike: Callable[[], None]) -> float:
    writers = [_Writer(target) for target in targets for _ in range(PER_MEMBER)]
    struck: list[float] = []  # before the signal, after it
    acknowledged: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def go_on(writer: _Writer) -> None:
        while not acknowledged.done():
            began = time.monotonic()
            if not await writer.write():
                await asyncio.sleep(PAUSE_S)
            elif not struck:
                await asyncio.sleep(PAUSE_S)  # the load before the signal is a light one
            elif began > struck[1] and not acknowledged.done():
                acknowledged.set_result(time.monotonic() - struck[0])

    tasks = [asyncio.create_task(go_on(writer)) for writer in writers]
    try:
        await asyncio.sleep(0.2)  # every connection is open and in use
        before = time.monotonic()
        strike()
        struck += [before, time.monotonic()]
        async with asyncio.timeout(GIVE_UP_S):
            return await acknowledged
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
        for writer in writers:
            writer.close()


def gap_s(targets: Sequence[Target], strike: Callable[[], None]) -> float:
    """Seconds without an acknowledged write after `strike`. Raises TimeoutError after GIVE_UP_S."""
    return asyncio.run(_measure(targets, strike))
