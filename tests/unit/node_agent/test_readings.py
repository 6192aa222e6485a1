"""Who shares a reading of memory with whom, and which are not begun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from node_agent.readings import MAX_WAITING, Readings, TooManyReadings

LATER = 10**9


class Scene:
    def __init__(self) -> None:
        self.now_ns = 0
        self.go = threading.Event()
        self.read: list[str] = []
        self.readings = Readings(lambda: self.now_ns)

    def ask(self, name: str, until_ns: int = LATER, fault: Exception | None = None) -> asyncio.Task[int | None]:
        def read() -> int:
            self.read.append(name)
            assert self.go.wait(10)
            if fault is not None:
                raise fault
            return len(self.read)

        return asyncio.create_task(self.readings.share(name, until_ns, read))

    async def begun(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while len(self.read) < count:
                await asyncio.sleep(0.001)


def run(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def whole() -> None:
        scene = Scene()
        try:
            await work(scene)
        finally:
            scene.go.set()

    asyncio.run(asyncio.wait_for(whole(), 20))


def test_who_asks_while_a_reading_waits_shares_it_and_who_asks_once_it_began_gets_the_next() -> None:
    async def work(scene: Scene) -> None:
        first = scene.ask("a")
        await scene.begun()
        more, other = [scene.ask("a") for _ in range(40)], scene.ask("b")
        await asyncio.sleep(0)
        scene.go.set()
        assert (await first, await asyncio.gather(*more), await other) == (1, [2] * 40, 3)
        assert scene.read == ["a", "a", "b"]

    run(work)


def test_nothing_is_begun_for_who_left_or_waited_long_enough() -> None:
    async def work(scene: Scene) -> None:
        first = scene.ask("a")
        await scene.begun()
        gone, late, patient = [scene.ask("b") for _ in range(40)], scene.ask("c", until_ns=5), scene.ask("d")
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        scene.now_ns = 6
        scene.go.set()
        assert (await first, await late, await patient) == (1, None, 2)
        assert scene.read == ["a", "d"]

    run(work)


def test_a_fault_is_that_of_all_who_shared_the_reading() -> None:
    async def work(scene: Scene) -> None:
        tasks = [scene.ask("a", fault=OSError("gone")) for _ in range(2)]
        scene.go.set()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, OSError)

    run(work)


def test_more_than_may_wait_are_refused() -> None:
    async def work(scene: Scene) -> None:
        tasks = [scene.ask("first")]
        await scene.begun()
        tasks += [scene.ask(str(number)) for number in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyReadings):
            await scene.ask("one more")
        joined = scene.ask("0")
        scene.go.set()
        await asyncio.gather(*tasks, joined)

    run(work)
