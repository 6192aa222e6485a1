"""Checking again and again until somebody says stop; a round that is stopped gives no verdict and records none."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from consistency.findings import EXIT_STATUS, INCOMPLETE
from consistency.outcome import Outcome

MIN_PAUSE_S = 1.0  # between two rounds, however long each takes
SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def watch(
    check: Callable[[], Awaitable[Outcome]],
    every_s: float,
    tell: Callable[[Outcome], None],
    stop: asyncio.Event,
    min_pause_s: float = MIN_PAUSE_S,
) -> int:
    """Begins a round every so many seconds. Gives the exit status of the last round that ended, incomplete when none did."""
    loop = asyncio.get_running_loop()
    status = EXIT_STATUS[INCOMPLETE]
    while not stop.is_set():
        began = loop.time()
        outcome = await _unless(stop, check())
        if outcome is None:
            break
        status = outcome.exit_status
        tell(outcome)
        pause_s = max(min_pause_s, began + every_s - loop.time())
        await _unless(stop, asyncio.sleep(pause_s))
    return status


async def _unless(stop: asyncio.Event, work: Awaitable[Outcome | None]) -> Outcome | None:
    """The result of the work, None when it was cancelled because it has to stop. Raises what the work raises."""
    doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, stopping):
            task.cancel()
        await asyncio.gather(doing, stopping, return_exceptions=True)


@contextmanager
def stopped_by_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
