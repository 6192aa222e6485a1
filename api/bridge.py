"""From the tickets of the log's thread to the event loop, many completions per wake-up.

A thread that completes a ticket may not touch the loop except by `call_soon_threadsafe`, which writes to a socket each time. Here the
first completion asks for one wake-up and the others of the same moment join it. The order "append, then look at the flag" on one side
and "lower the flag, then empty the queue" on the other is what loses no completion.

Tickets end by the log's thread, which its disk may hold up, so every wait has an end of its own here. One look at all of them now and then
is cheaper than a timer for each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, TypeVar

from raftmeta.log.ticket import Ticket

T = TypeVar("T")

LOOK_S = 0.25  # between two looks for waits that are over


class Bridge:
    """Belongs to one event loop; only `_completed` runs on other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: deque[tuple[asyncio.Future[Any], Ticket[Any]]] = deque()  # bounded by the requests in flight
        self._woken = False
        self._waiting: dict[asyncio.Future[Any], float] = {}  # with the loop's time at which the wait is over
        self._looking = False

    async def result(self, source: Ticket[T], timeout_s: float) -> T:
        """The result of `source`, or its exception; TimeoutError when there is none in time. Giving up does not cancel the work."""
        if source.done():
            return source.result()
        target: asyncio.Future[T] = self._loop.create_future()
        self._waiting[target] = self._loop.time() + timeout_s
        if not self._looking:
            self._looking = True
            self._loop.call_later(LOOK_S, self._look)
        source.add_done_callback(lambda done: self._completed(target, done))
        try:
            return await target
        finally:
            del self._waiting[target]

    def _look(self) -> None:
        now = self._loop.time()
        for target, end in self._waiting.items():
            if end <= now and not target.done():
                target.set_exception(TimeoutError())
        self._looking = bool(self._waiting)
        if self._looking:
            self._loop.call_later(LOOK_S, self._look)

    def _completed(self, target: asyncio.Future[Any], source: Ticket[Any]) -> None:
        self._done.append((target, source))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._done.clear()

    def _deliver(self) -> None:
        self._woken = False
        done = self._done
        while done:
            target, source = done.popleft()
            if target.done():  # the waiter gave up
                continue
            fault = source.exception()
            if fault is not None:
                target.set_exception(fault)
            else:
                target.set_result(source.result())
