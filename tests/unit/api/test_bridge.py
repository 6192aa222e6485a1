"""Completions from other threads reach their waiters, many per wake-up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from api.bridge import Bridge
from raftmeta.core.errors import RaftmetaError
from raftmeta.log.ticket import Ticket
from tests.unit.api.harness import run


class CountingLoop:
    """The loop with a count of its wake-ups."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.woken = 0

    def create_future(self) -> asyncio.Future[int]:
        return self._loop.create_future()

    def time(self) -> float:
        return self._loop.time()

    def call_later(self, delay_s: float, callback: object) -> None:
        self._loop.call_later(delay_s, callback)  # type: ignore[arg-type]

    def call_soon_threadsafe(self, callback: object) -> None:
        self.woken += 1
        self._loop.call_soon_threadsafe(callback)  # type: ignore[arg-type]


def _complete(sources: list[Ticket[int]]) -> None:
    for source in sources:
        source.set_result(1)


def test_completions_of_one_moment_share_one_wake_up() -> None:
    async def work() -> None:
        loop = CountingLoop(asyncio.get_running_loop())
        bridge = Bridge(loop)  # type: ignore[arg-type]
        sources: list[Ticket[int]] = [Ticket() for _ in range(500)]
        waits = [asyncio.ensure_future(bridge.result(source, 10.0)) for source in sources]
        await asyncio.sleep(0)
        thread = threading.Thread(target=lambda: [source.set_result(at) for at, source in enumerate(sources)])
        thread.start()
        thread.join()  # the loop does not turn meanwhile
        assert await asyncio.gather(*waits) == list(range(500))
        assert loop.woken == 1

    run(work())


def test_every_completion_arrives_whatever_the_threads_do() -> None:
    async def work() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        for _ in range(20):
            sources: list[Ticket[int]] = [Ticket() for _ in range(100)]
            threads = [threading.Thread(target=_complete, args=(sources[part::4],)) for part in range(4)]
            waits = [asyncio.ensure_future(bridge.result(source, 10.0)) for source in sources]
            await asyncio.sleep(0)
            for thread in threads:
                thread.start()
            assert sum(await asyncio.gather(*waits)) == 100
            for thread in threads:
                thread.join()

    run(work())


def test_an_error_of_the_work_is_raised_to_its_waiter_only() -> None:
    async def work() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        bad: Ticket[int] = Ticket()
        good: Ticket[int] = Ticket()
        waits = [asyncio.ensure_future(bridge.result(source, 10.0)) for source in (bad, good)]
        await asyncio.sleep(0)
        bad.set_exception(RaftmetaError("no_leader", "none"))
        good.set_result(7)
        with pytest.raises(RaftmetaError):
            await waits[0]
        assert await waits[1] == 7

    run(work())


def test_a_waiter_that_gave_up_disturbs_nobody() -> None:
    async def work() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        sources: list[Ticket[int]] = [Ticket(), Ticket()]
        waits = [asyncio.ensure_future(bridge.result(source, 10.0)) for source in sources]
        await asyncio.sleep(0)
        waits[0].cancel()
        for source in sources:
            source.set_result(3)
        assert await waits[1] == 3

    run(work())


def test_a_finished_result_needs_no_turn_of_the_loop() -> None:
    async def work() -> None:
        done: Ticket[int] = Ticket()
        done.set_result(5)
        coroutine = Bridge(asyncio.get_running_loop()).result(done, 10.0)
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)
        assert ended.value.value == 5

    run(work())


def test_a_wait_ends_although_nobody_ends_the_ticket_and_others_go_on() -> None:
    async def work() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        never, late = Ticket[int](), Ticket[int]()
        waits = [asyncio.ensure_future(bridge.result(source, timeout_s)) for source, timeout_s in ((never, 0.1), (late, 60.0))]
        with pytest.raises(TimeoutError):
            await waits[0]
        late.set_result(3)
        never.set_result(4)  # nobody waits any more
        assert await waits[1] == 3

    run(work())


def test_when_nobody_waits_nothing_is_looked_at() -> None:
    async def work() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        for _ in range(2):  # it begins again, too
            source = Ticket[int]()
            wait = asyncio.ensure_future(bridge.result(source, 60.0))
            await asyncio.sleep(0)
            assert bridge._looking
            source.set_result(1)
            await wait
            while bridge._looking:
                await asyncio.sleep(0.01)
            assert bridge._waiting == {}

    run(work())
