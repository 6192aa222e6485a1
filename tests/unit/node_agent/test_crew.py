"""Asking every worker: nothing counts as done before each of them said so, and one that is away is waited for within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from node_agent.crew import Crew, WorkersLag
from node_agent.ipc import CallFailed, Server
from node_agent.messages import (
    Acknowledge,
    Answering,
    CheckDerived,
    DerivedChecked,
    DerivedDamage,
    Done,
    Fault,
    GetMetrics,
    Load,
    Loaded,
    Measured,
    Metrics,
    Numbered,
    Prove,
    Proved,
    Release,
    Reply,
    Served,
    SlotServed,
    WorkerState,
)
from node_agent.peers import Peer
from node_agent.plan import Target
from node_agent.refusal import Refusal

V1 = Target("encoder", "1.0.0", "1" * 64, "a" * 64)
V2 = Target("encoder", "2.0.0", "2" * 64, "b" * 64)


class FakeWorker:
    def __init__(self, path: Path, index: int) -> None:
        self.path = path
        self.index = index
        self.slots: dict[int, Target] = {}
        self.active = 0
        self.refuse = ""
        self.derived = {"position_ids": "0" * 64}
        self.damaged: tuple[DerivedDamage, ...] = ()
        self.failed = 0
        self.calls: list[Numbered] = []
        self.server = Server(self._answer, self.state)

    def state(self) -> WorkerState:
        slots = tuple(SlotServed(slot, target.label, target.checksum) for slot, target in sorted(self.slots.items()))
        return WorkerState(self.index, 1, (Served("search", slots, self.active, failed=self.failed),))

    async def start(self) -> None:
        self.server = Server(self._answer, self.state)
        await self.server.start(self.path)

    async def _answer(self, call: Numbered) -> Reply:
        self.calls.append(call)
        match call:
            case Load():
                if self.refuse:
                    return Fault(call.number, 409, self.refuse, "because")
                self.slots[call.slot] = Target("encoder", call.label, call.checksum, "")
                self.server.push(self.state())
                return Loaded(call.number, self.derived, 1)
            case Acknowledge():
                held = self.slots[self.active]
                return Answering(call.number, self.active, held.label, held.checksum)
            case Release():
                return Fault(call.number, 500, self.refuse, "because") if self.refuse else Done(call.number)
            case CheckDerived():
                if not self.slots:
                    return Fault(call.number, 503, "not_loaded", "because")
                return DerivedChecked(call.number, self.damaged, bool(self.damaged) and call.ends)
            case GetMetrics():
                return Metrics(call.number, ())
            case _:
                raise AssertionError(call)


class FakeProber:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.reply: Callable[[Prove], Reply] = lambda call: Proved(call.number, {}, 5, 6, (Measured("p", "y", "close", 0.0, 0.1, True),))
        self.dies = False
        self.calls: list[Numbered] = []
        self.server = Server(self._answer, lambda: None)

    async def start(self) -> None:
        self.server = Server(self._answer, lambda: None)
        await self.server.start(self.path)

    async def _answer(self, call: Numbered) -> Reply:
        self.calls.append(call)
        if self.dies:
            await self.server.stop()
            await asyncio.sleep(60)
        assert isinstance(call, Prove)
        return self.reply(call)


class Scene:
    def __init__(self, root: Path, load_timeout_s: float = 10.0) -> None:
        self.workers = [FakeWorker(root / f"w{index}", index) for index in range(2)]
        self.peers = [Peer(worker.path, lambda: None) for worker in self.workers]
        self.prober = FakeProber(root / "prober")
        self.prober_peer = Peer(self.prober.path, lambda: None)
        self.crew = Crew(self.peers, self.prober_peer, load_timeout_s)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Scene:
        self._tasks = [asyncio.create_task(peer.keep_connected()) for peer in (*self.peers, self.prober_peer)]
        return self

    async def start(self, *indexes: int) -> None:
        for index in indexes:
            await self.workers[index].start()
            await self.until(lambda index=index: self.peers[index].connected)

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            await worker.server.stop()
        await self.prober.server.stop()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.005)


def run(root: Path, work: Callable[[Scene], Awaitable[None]], load_timeout_s: float = 10.0) -> None:
    async def whole() -> None:
        async with Scene(root, load_timeout_s) as scene:
            await work(scene)

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_slot_counts_as_loaded_when_every_worker_says_so(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0, 1)
        assert not scene.crew.loaded("search", 1, V1)
        await scene.crew.load("search", 1, V1)
        await scene.until(lambda: scene.crew.loaded("search", 1, V1))
        assert not scene.crew.loaded("search", 1, V2)
        assert not scene.crew.loaded("search", 0, V1)
        await scene.workers[1].server.stop()
        await scene.until(lambda: not scene.crew.loaded("search", 1, V1))

    run(tmp_path, work)


def test_a_worker_that_is_away_is_waited_for(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0)
        loading = asyncio.create_task(scene.crew.load("search", 0, V1))
        await asyncio.sleep(0.1)
        assert not loading.done()
        await scene.start(1)
        await loading
        assert [worker.slots for worker in scene.workers] == [{0: Target("encoder", "1.0.0", "1" * 64, "")}] * 2

    run(tmp_path, work)


def test_a_worker_that_stays_away_ends_in_a_bounded_time(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0)
        with pytest.raises(WorkersLag):
            await scene.crew.load("search", 0, V1)

    run(tmp_path, work, load_timeout_s=0.2)


def test_one_refusal_refuses(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0, 1)
        scene.workers[1].refuse = "uncovered_tensor"
        with pytest.raises(CallFailed, match="uncovered_tensor"):
            await scene.crew.load("search", 0, V1)

    run(tmp_path, work)


def test_a_switch_is_acknowledged_when_every_worker_answers_with_the_version(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0, 1)
        for worker in scene.workers:
            worker.slots = {0: V1, 1: V2}
        scene.workers[0].active = 1
        with pytest.raises(WorkersLag, match=r"1 of 2 workers do not answer with 2\.0\.0: it answers with 1\.0\.0"):
            await scene.crew.acknowledged("search", V2, 0.1)
        scene.workers[1].active = 1
        await scene.crew.acknowledged("search", V2, 5)
        await scene.workers[1].server.stop()
        await scene.until(lambda: not scene.peers[1].connected)
        with pytest.raises(WorkersLag):
            await scene.crew.acknowledged("search", V2, 0.1)

    run(tmp_path, work)


def test_releasing_asks_those_that_are_here(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0)
        await scene.crew.release("search", 1)
        assert [(type(call), call.slot) for call in scene.workers[0].calls if isinstance(call, Release)] == [(Release, 1)]

    run(tmp_path, work)


def test_a_worker_that_fails_at_a_release_has_released_nothing(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0, 1)
        scene.workers[1].refuse = "internal"
        with pytest.raises(WorkersLag, match="a worker did not release slot 1 of search: because"):
            await scene.crew.release("search", 1)

    run(tmp_path, work)


def test_workers_load_one_after_the_other(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0, 1)
        scene.workers[0].refuse = "no_memory"
        with pytest.raises(CallFailed, match="no_memory"):
            await scene.crew.load("search", 0, V1)
        assert scene.workers[1].calls == [], "the second computes requests while the first loads"

    run(tmp_path, work)


def test_workers_that_make_different_modules_of_the_same_bytes_are_refused(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0, 1)
        assert await scene.crew.load("search", 0, V1) == {"position_ids": "0" * 64}
        scene.workers[1].derived = {"position_ids": "0" * 64, "inv_freq": "1" * 64}
        with pytest.raises(Refusal, match=r"derived_changed.*expected the same in every worker, found inv_freq"):
            await scene.crew.load("search", 0, V2)

    run(tmp_path, work)


def test_a_version_is_tried_by_the_prober_which_is_waited_for(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        proving = asyncio.create_task(scene.crew.prove("search", 1, V1))
        await asyncio.sleep(0.1)
        assert not proving.done()
        await scene.prober.start()
        proved = await proving
        assert (proved.warm_ms, proved.peak_bytes, proved.measured[0].probe) == (5, 6, "p")
        (call,) = scene.prober.calls
        assert isinstance(call, Prove) and (call.deployment, call.slot, call.label, call.checksum) == ("search", 1, "1.0.0", "1" * 64)

    run(tmp_path, work)


def test_a_prober_that_refuses_ends_or_stays_away_is_told_apart(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        with pytest.raises(WorkersLag, match="no prober"):
            await scene.crew.prove("search", 1, V1)
        await scene.prober.start()
        await scene.until(lambda: scene.prober_peer.connected)
        scene.prober.reply = lambda call: Fault(call.number, 409, "probe_drift", "cosine 0.2")
        with pytest.raises(CallFailed, match="probe_drift"):
            await scene.crew.prove("search", 1, V1)
        scene.prober.dies = True
        with pytest.raises(CallFailed, match=r"warmup_failed.*the prober ended"):
            await scene.crew.prove("search", 1, V1)

    run(tmp_path, work, load_timeout_s=0.5)


def test_what_workers_find_in_their_own_memory_is_told_apart_and_one_that_is_away_or_loads_says_nothing(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.start(0, 1)
        await scene.crew.load("search", 0, V1)
        scene.workers[1].damaged = (DerivedDamage("ids", 2, "1:2", "3:4"),)
        found = await scene.crew.check_derived("search", 0, V1.checksum, True)
        assert [(worker, reply.damaged, reply.ends) for worker, reply in found] == [(0, (), False), (1, scene.workers[1].damaged, True)]
        scene.workers[0].slots.clear()
        await scene.workers[1].server.stop()
        assert await scene.crew.check_derived("search", 0, V1.checksum, True) == []

    run(tmp_path, work)


def test_what_modules_failed_at_is_counted_over_the_workers_of_now(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        scene.workers[0].failed, scene.workers[1].failed = 2, 3
        await scene.start(0, 1)
        await scene.until(lambda: scene.crew.failed("search") == 5)
        assert scene.crew.failed("other") == 0
        await scene.workers[1].server.stop()
        await scene.until(lambda: scene.crew.failed("search") == 2)

    run(tmp_path, work)
