"""One deployment tended over real shared memory, with workers, a provider and a control plane in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from node_agent.in_process import InProcess
from node_agent.metrics import Meter
from node_agent.observe import Observer
from node_agent.plan import Change, Goal, Order, Target
from node_agent.prepared import Prepared
from node_agent.quiet import Gate
from node_agent.remembered import Remembered
from node_agent.report import Look
from node_agent.taking import Means
from node_agent.tend import Tender
from raftmeta.core.types import Phase, SideName, Stage
from tests.support.agent_fakes import FakeCrew, FakePlane, FakeProvider
from tests.support.agent_memory import NodeMemory
from tests.support.small_version import make_version


class TendScene:
    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.memory = NodeMemory(root / "store", arena_dir)
        big = b"x" * 70_000
        tensors = {1: {"a": b"1" * 100, "big": big}, 2: {"a": b"2" * 100, "big": big}, 3: {"a": b"3" * 100, "big": big}}
        self.versions = {f"{n}.0.0": make_version(root / f"v{n}", f"{n}.0.0", value) for n, value in tensors.items()}
        self.crew = FakeCrew()
        self.provider = FakeProvider(self.memory, self.versions)
        self.plane = FakePlane()
        self.meter = Meter()
        self.revision = 3
        self.gate: Gate | None = None
        self.take_over()

    def target(self, number: int) -> Target:
        return self.versions[f"{number}.0.0"].target

    def take_over(self) -> None:
        """A control process begins, as after a crash of the one before."""
        self.station = self.memory.station()
        self.crew.station = self.station
        serving = InProcess(self.station, self.crew, "kernel 1")
        self.remembered = Remembered(self.memory.journal, "search")
        means = Means("n1", "boot-1", self.plane, self.provider, lambda record: serving, Observer(self.meter), self.gate)
        self.tender = Tender(self.remembered, Prepared(self.memory.store, serving.held), serving, means)

    def close(self) -> None:
        self.station.close()

    def goal(self, committed: int | None, change: Change | None = None, revision: int | None = None) -> Goal:
        target = None if committed is None else self.target(committed)
        return Goal("search", SideName.PRIMARY, target, Order(1, self.revision if revision is None else revision), change)

    async def rest(self, goal: Goal, holds: Callable[[Look], bool] | None = None) -> Look:
        """Let the tender work until this holds, by default until nothing is left to do."""
        self.tender.want(goal)
        task = asyncio.create_task(self.tender.run())
        try:
            async with asyncio.timeout(15):
                while True:
                    await asyncio.sleep(0.01)
                    look = self.tender.look()
                    if holds(look) if holds else self.tender.idle:
                        return look
                    if task.done():
                        task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def roll(self, committed: int | None, to: int) -> None:
        """Through all phases, as the control plane would move them."""
        change = Change(f"r-{to}-{self.revision}", Phase.PREPARING, self.target(to), None)
        await self.rest(self.goal(committed, change))
        came = Stage(self.last()["stage"])
        assert came in (Stage.PREPARED, Stage.READY)  # ready at once where a slot holds the version
        await self.rest(self.goal(committed, change._replace(phase=Phase.SYNCING, attested=came)))
        assert self.last()["stage"] == "ready", self.tender.trouble
        self.revision += 3
        await self.rest(self.goal(to, change._replace(phase=Phase.COMMITTING, attested=Stage.READY)))
        assert self.last()["stage"] == "active"
        await self.rest(self.goal(to))

    def last(self) -> dict[str, Any]:
        return self.plane.attested[-1]


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))
