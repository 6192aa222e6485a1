"""Requests that keep the old slot when it has to be rewritten: waited for and named, or ended with an answer, as the policy says."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")

from node_agent import taking
from node_agent.config import AgentConfig
from node_agent.crew import Crew
from node_agent.device.port import SlotState
from node_agent.device.process import ProcessId, kill, start_ticks
from node_agent.in_process import InProcess
from node_agent.ipc import CallFailed, ConnectionLost
from node_agent.messages import REQUEST_CANCELLED, Cancel, Done, Infer, Tensor
from node_agent.metrics import Meter
from node_agent.peers import Peer
from node_agent.plan import Change, Drain, Goal
from node_agent.refusal import Refusal
from node_agent.runtime import Runtime
from node_agent.slots import WorkerGate
from node_agent.worker import EXIT_CANCELLED, Worker
from raftmeta.core.types import DrainOverdue, Phase, Stage
from tests.support.agent_fakes import FakeCrew
from tests.support.first_byte import FakeEngine
from tests.support.shm import line_of, python_process
from tests.support.tending import TendScene, run
from tests.unit.node_agent.test_host import Scene as HostScene

HOLD = """
import sys, time
from pathlib import Path
from node_agent.device.control_block import ControlBlock
from node_agent.slots import WorkerGate
print(WorkerGate(ControlBlock.open(Path(sys.argv[1])), 5).enter(), flush=True)
print(input(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[TendScene]:
    made = TendScene(tmp_path, shm)
    yield made
    made.close()


@pytest.fixture
def hosted(tmp_path: Path, shm: Path) -> Iterator[HostScene]:
    made = HostScene(tmp_path, shm)
    yield made
    made.close()


async def hold_old_slot(scene: TendScene) -> WorkerGate:
    """Worker 4 computes in slot 0, and slot 1 serves."""
    await scene.roll(None, 1)
    gate = WorkerGate(scene.station.block, 4)
    assert gate.enter() == 0
    await scene.roll(1, 2)
    return gate


def next_goal(scene: TendScene, drain: Drain) -> Goal:
    """Version 3 is to be staged, into slot 0."""
    return scene.goal(2, Change("r-3", Phase.SYNCING, scene.target(3), Stage.PREPARED))._replace(drain=drain)


def test_by_default_requests_are_waited_for_a_minute_and_not_ended() -> None:
    assert Drain() == (60.0, DrainOverdue.WAIT)


def test_with_wait_the_holder_is_named_with_its_time_and_the_slot_stays_as_it_is(scene: TendScene) -> None:
    async def work() -> None:
        gate = await hold_old_slot(scene)
        goal = next_goal(scene, Drain(0.05, DrainOverdue.WAIT))
        look = await scene.rest(goal, lambda look: "slot_busy" in look.trouble)
        assert "1 in worker 4 for " in look.trouble and look.ready
        assert scene.crew.cancelled == []
        held = scene.station.slot_record(0)
        assert (held.version, held.state) == ("1.0.0", SlotState.VERIFIED)
        gate.leave(0)
        await scene.rest(goal)
        assert scene.last()["stage"] == "ready" and scene.station.slot_record(0).version == "3.0.0"

    run(work)


def test_while_a_slot_drains_the_status_names_who_holds_it(scene: TendScene) -> None:
    async def work() -> None:
        gate = await hold_old_slot(scene)
        goal = next_goal(scene, Drain(30.0, DrainOverdue.WAIT))
        look = await scene.rest(goal, lambda look: bool(look.holders))
        assert [holder.who for holder in look.holders] == ["worker 4"] and look.holders[0].seconds is not None
        gate.leave(0)

    run(work)


@pytest.mark.parametrize("why", ["nobody wants the version", "less time"])
def test_waiting_for_a_slot_ends_at_once_when(scene: TendScene, why: str) -> None:
    async def work() -> None:
        gate = await hold_old_slot(scene)
        goal = next_goal(scene, Drain(3600.0, DrainOverdue.WAIT))
        scene.tender.want(goal)
        task = asyncio.create_task(scene.tender.run())
        async with asyncio.timeout(10):
            while not scene.tender.doing.startswith("StageInto"):
                await asyncio.sleep(0.01)
            if why == "less time":
                scene.tender.want(goal._replace(drain=Drain(0.05, DrainOverdue.WAIT)))
                while "slot_busy" not in scene.tender.trouble:
                    await asyncio.sleep(0.01)
            else:
                scene.tender.want(scene.goal(2))
                while not scene.tender.idle:
                    await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scene.station.slot_record(0).version == "1.0.0" and scene.tender.look().ready
        gate.leave(0)

    run(work)


def test_with_cancel_the_holder_is_ended_once_the_time_is_over_and_the_version_is_staged(scene: TendScene) -> None:
    async def work() -> None:
        gate = await hold_old_slot(scene)
        scene.crew.on_cancel = lambda: gate.leave(0)
        await scene.rest(next_goal(scene, Drain(0.05, DrainOverdue.CANCEL)))
        assert scene.crew.cancelled == [(0, 4)]
        assert scene.crew.released == [0, -1, 1, 0], "the workers forget the slot before it is rewritten"
        assert scene.last()["stage"] == "ready" and scene.station.slot_record(0).version == "3.0.0"

    run(work)


def test_with_cancel_a_slot_that_drains_in_time_ends_nobody(scene: TendScene) -> None:
    async def work() -> None:
        gate = await hold_old_slot(scene)
        gate.leave(0)
        await scene.rest(next_goal(scene, Drain(5.0, DrainOverdue.CANCEL)))
        assert scene.crew.cancelled == [] and scene.last()["stage"] == "ready"

    run(work)


@pytest.mark.parametrize("overdue", list(DrainOverdue))
def test_a_request_that_keeps_its_worker_from_answering_after_a_switch_is_treated_alike(scene: TendScene, overdue: DrainOverdue) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        gate = WorkerGate(scene.station.block, 4)
        assert gate.enter() == 0
        scene.crew.behind = lambda: scene.station.active == 1 and bool(scene.station.held(0))
        scene.crew.on_cancel = lambda: gate.leave(0)
        change = Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)
        await scene.rest(scene.goal(1, change))
        scene.revision += 3
        goal = scene.goal(2, change._replace(phase=Phase.COMMITTING, attested=Stage.READY))._replace(drain=Drain(0.05, overdue))
        if overdue is DrainOverdue.WAIT:
            look = await scene.rest(goal, lambda look: "workers_lag" in look.trouble)
            assert [holder.who for holder in look.holders] == ["worker 4"] and scene.crew.cancelled == []
            gate.leave(0)
        await scene.rest(goal)
        assert scene.crew.cancelled == ([(0, 4)] if overdue is DrainOverdue.CANCEL else [])
        assert scene.last()["stage"] == "active"

    run(work)


def test_a_request_that_has_time_left_is_not_ended_because_a_worker_does_not_answer(scene: TendScene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        gate = WorkerGate(scene.station.block, 4)
        assert gate.enter() == 0
        scene.crew.behind = lambda: scene.station.active == 1
        change = Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)
        await scene.rest(scene.goal(1, change))
        scene.revision += 3
        goal = scene.goal(2, change._replace(phase=Phase.COMMITTING, attested=Stage.READY))
        await scene.rest(goal._replace(drain=Drain(60.0, DrainOverdue.CANCEL)), lambda look: "workers_lag" in look.trouble)
        assert scene.crew.cancelled == []
        gate.leave(0)

    run(work)


def test_a_long_request_in_the_slot_that_serves_is_nobody_to_end(scene: TendScene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.crew.behind = lambda: scene.station.active == 1
        change = Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)
        await scene.rest(scene.goal(1, change))
        scene.revision += 3
        goal = scene.goal(2, change._replace(phase=Phase.COMMITTING, attested=Stage.READY))._replace(drain=Drain(0.05, DrainOverdue.CANCEL))
        await scene.rest(goal, lambda look: "workers_lag" in look.trouble)
        gate = WorkerGate(scene.station.block, 4)
        assert gate.enter() == 1
        await scene.rest(goal, lambda look: scene.tender._tries >= 4)
        assert "workers_lag" in scene.tender.trouble and scene.crew.cancelled == []
        gate.leave(1)

    run(work)


def test_a_holder_that_does_not_let_go_although_it_was_ended_keeps_the_slot(scene: TendScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "CANCELLED_S", 0.05)

    async def work() -> None:
        gate = await hold_old_slot(scene)
        look = await scene.rest(next_goal(scene, Drain(0.05, DrainOverdue.CANCEL)), lambda look: "slot_busy" in look.trouble)
        assert scene.crew.cancelled and look.ready
        assert scene.station.slot_record(0).version == "1.0.0"
        gate.leave(0)

    run(work)


def test_nothing_is_ended_in_the_slot_that_serves(scene: TendScene) -> None:
    async def work() -> None:
        gate = await hold_old_slot(scene)
        with pytest.raises(Refusal, match="slot_active"):
            await scene.tender.serving.cancel(1)
        assert scene.crew.cancelled == []
        gate.leave(0)

    run(work)


def test_a_worker_that_does_not_answer_when_it_is_told_to_end_is_killed(scene: TendScene) -> None:
    class DeafCrew(FakeCrew):
        async def cancel(self, deployment: str, slot: int, worker: int) -> bool:
            return False

    async def work() -> None:
        await scene.roll(None, 1)
        with python_process(HOLD, str(scene.station.block.path)) as process:
            assert line_of(process) == "0"
            scene.station.end_holder(1, 5)
            assert _answers(process), "a worker that does not use the slot was killed"
            await scene.roll(1, 2)
            await InProcess(scene.station, DeafCrew(), "kernel 1").cancel(0)
            assert process.wait(10) == -9
            assert scene.station.held(0), "its place is freed by the supervisor, which knows that it ended"

    run(work)


def test_a_process_that_got_the_number_of_an_ended_one_is_not_killed() -> None:
    with python_process("import time; print('here', flush=True); print(input(), flush=True); time.sleep(60)") as process:
        assert line_of(process) == "here"
        started = start_ticks(process.pid)
        assert started is not None
        kill(ProcessId(process.pid, started - 1))
        assert _answers(process), "another process was killed"
        kill(ProcessId(process.pid, started))
        assert process.wait(10) == -9


def _answers(process: subprocess.Popen[str]) -> bool:
    """It is there, and says back what it is told."""
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    return line_of(process) == "go on"


def _serve_second(hosted: HostScene) -> tuple[threading.Event, Callable[[], None]]:
    """Version 1 serves from slot 0, 2 is loaded in slot 1; a request to version 1 says that it began, and ends when it is let go."""
    for number, slot in ((1, 0), (2, 1)):
        hosted.stage(number, slot)
        hosted.load(number, slot)
    hosted.switch(1, 0)
    began, go_on = threading.Event(), threading.Event()

    def during() -> None:
        began.set()
        assert go_on.wait(30)

    FakeEngine.made[0].during = during
    return began, go_on.set


def test_a_request_in_the_old_slot_gets_503_with_a_code_of_its_own_and_its_worker_ends(hosted: HostScene) -> None:
    began, let_go = _serve_second(hosted)

    async def work() -> None:
        values = {"node": "n1", "zone": "a", "member_urls": ["http://127.0.0.1:1"], "store_dir": hosted.memory.root}
        runtime = Runtime(AgentConfig(**values), "boot-1", 8100)  # type: ignore[arg-type]
        runtime.run_dir.mkdir(parents=True, exist_ok=True)
        left: list[int] = []

        def leave(status: int) -> None:
            """What an end of the process does to its connections."""
            left.append(status)
            for writer in tuple(worker._server._writers):
                writer.transport.abort()

        worker = Worker(0, hosted.host, Meter(), leave)
        running = asyncio.create_task(worker.run(runtime))
        peer = Peer(runtime.worker_socket(0), lambda: None)
        keeping = asyncio.create_task(peer.keep_connected())
        async with asyncio.timeout(10):
            while not peer.served:
                await asyncio.sleep(0.005)
        inputs = (Tensor("x", "INT64", (1,), bytes(8)),)
        asked = asyncio.create_task(peer.call(lambda n: Infer(n, "search", "", inputs, ()), 20.0))
        queued = asyncio.create_task(peer.call(lambda n: Infer(n, "search", "", inputs, ()), 20.0))
        assert await asyncio.to_thread(began.wait, 10)
        hosted.switch(2, 1)
        crew = Crew([peer], Peer(runtime.prober_socket(), lambda: None), 1.0)

        assert isinstance(await peer.call(lambda n: Cancel(n, "search", 1), 5.0), Done)
        assert isinstance(await peer.call(lambda n: Cancel(n, "other", 0), 5.0), Done)
        assert left == [] and not asked.done(), "what computes elsewhere was ended"

        assert await crew.cancel("search", 0, 0)
        with pytest.raises(CallFailed) as failed:
            await asked
        assert (failed.value.fault.status, failed.value.fault.code) == (503, REQUEST_CANCELLED)
        assert "slot 0" in failed.value.fault.detail
        assert left == [EXIT_CANCELLED] and hosted.station.held(0), "the memory counts as used until the process has ended"
        with pytest.raises(ConnectionLost):
            await queued  # the front asks another worker
        let_go()
        async with asyncio.timeout(10):
            while not hosted.station.drained(0):
                await asyncio.sleep(0.005)
        async with asyncio.timeout(10):
            while not peer.connected:
                await asyncio.sleep(0.005)
        assert await crew.cancel("search", 0, 0) and left == [EXIT_CANCELLED], "nothing computes there any more"
        assert hosted.host.computing_in("search", 0) is None
        runtime.stopping.set()
        await running
        keeping.cancel()
        with suppress(ConnectionLost):
            await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_worker_that_is_lost_while_it_is_told_to_end_has_ended_and_a_silent_one_has_not() -> None:
    class GonePeer:
        async def call(self, make: object, timeout_s: float) -> object:
            raise self.error

        def __init__(self, error: Exception) -> None:
            self.error = error

    async def work() -> None:
        for error, ended in ((ConnectionLost("gone"), True), (TimeoutError(), False)):
            assert not await Crew([], GonePeer(error), 1.0).cancel("search", 0, 0), "no worker of this start"  # type: ignore[arg-type]
            assert await Crew([GonePeer(error)], GonePeer(error), 1.0).cancel("search", 0, 0) is ended  # type: ignore[list-item, arg-type]

    asyncio.run(work())
