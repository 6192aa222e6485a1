"""Deployments that no longer list the node: given up beside the hearing of orders, whatever fails on the way, also by the next control."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node_agent import leaving as leaving_module
from node_agent import loop as loop_module
from node_agent.crew import WorkersLag
from node_agent.desired import Event
from node_agent.in_process import InProcess
from node_agent.journal import Journal
from node_agent.leaving import Leaving
from node_agent.remembered import Remembered
from node_agent.taking import Serving
from node_agent.troubles import Troubles
from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import DiskFull
from tests.support.front_scene import RECORD, Scene
from tests.support.front_scene import run as run_front
from tests.support.loop_scene import LoopScene, run


@pytest.fixture
def scene(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopScene]:
    monkeypatch.setattr(loop_module, "RETRY_S", 0.05)
    monkeypatch.setattr(leaving_module, "AGAIN_S", 0.02)
    yield LoopScene(tmp_path, shm)


def leave(scene: LoopScene) -> None:
    scene.plane.records.pop("search")
    scene.plane.tell(Event("deployment", "search", "delete", None))


def fail_twice(scene: LoopScene, step: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The step fails two times. Gives what it was tried on so far, which each try adds to."""
    tries: list[str] = []

    def fails(cause: Exception) -> None:
        tries.append(step)
        if len(tries) <= 2:
            raise cause

    release, destroy, drop = InProcess.release, InProcess.destroy, scene.memory.journal.drop

    async def released(serving: InProcess, slot: int | None) -> None:
        fails(WorkersLag("a worker is busy"))
        await release(serving, slot)

    def destroyed(serving: InProcess) -> None:
        destroy(serving)
        fails(OSError("the file system is away"))

    def dropped(name: str) -> None:
        fails(DiskFull("no room"))
        drop(name)

    if step == "release":
        monkeypatch.setattr(InProcess, "release", released)
    elif step == "destroy":
        monkeypatch.setattr(InProcess, "destroy", destroyed)
    else:
        monkeypatch.setattr(scene.memory.journal, "drop", dropped)
    return tries


@pytest.mark.parametrize("step", ["release", "destroy", "drop"])
def test_what_fails_when_a_deployment_is_given_up_is_tried_until_it_is_done(
    scene: LoopScene, shm: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()
        tried: list[list[str]] = []
        said: list[str] = []

        def given_up() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                tried.append(fail_twice(scene, step, monkeypatch))
                leave(scene)
            why = scene.loop.status()["not_tended"].get("search", "")
            said.extend([why] if why else [])
            return scene.plane.revision > 10 and not scene.memory.journal.record.deployments

        await scene.until(given_up)
        assert tried == [[step] * 3] and said and all(why.startswith("leave: ") for why in said)
        assert list(shm.iterdir()) == [] and scene.status["not_tended"] == {}

    run(work)


def test_orders_of_others_are_heard_while_a_worker_keeps_a_deployment_from_leaving_and_one_that_comes_back_is_taken_anew(
    scene: LoopScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()
        free = asyncio.Event()
        release = InProcess.release

        async def released(serving: InProcess, slot: int | None) -> None:
            await free.wait()
            await release(serving, slot)

        def back() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                monkeypatch.setattr(InProcess, "release", released)
                leave(scene)
                scene.plane.tell(Event("deployment", "other", "put", scene.plane.declare("other", version="2.0.0", order_revision=11)))
                scene.plane.tell(Event("deployment", "search", "put", scene.plane.declare(version="1.0.0", order_revision=12)))
            if scene.plane.revision > 10 and "other" in scene.loop.tenders and not free.is_set():
                assert scene.memory.journal.record.deployments["search"].leaving
                if "came back" in scene.loop.status()["not_tended"].get("search", ""):
                    free.set()
            found = scene.loop.tenders.get("search")
            return free.is_set() and found is not None and not found.remembered.record.leaving

        await scene.until(back)

    run(work)


def test_a_control_that_ends_in_between_leaves_it_to_the_next_one_which_serves_nothing_of_it(scene: LoopScene, shm: Path) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        async def lag(deployment: str, slot: int, limit_s: float = 1.0) -> None:
            raise WorkersLag("a worker is busy")

        held: list[Serving] = []

        def leaves() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                scene.crew.release = lag  # type: ignore[method-assign]
                held.append(scene.loop.tenders["search"].serving)
                leave(scene)
            return "busy" in scene.loop.status()["not_tended"].get("search", "")

        await scene.until(leaves)
        assert scene.memory.journal.record.deployments["search"].leaving and list(shm.iterdir())
        held[0].close()  # as the end of a process does
        scene.begin(start_wait_s=0.0)
        seen: list[Any] = []

        def done() -> bool:
            seen.extend(scene.loop.tenders)
            return not scene.memory.journal.record.deployments

        await scene.until(done)
        assert (seen, list(shm.iterdir()), scene.crew.released) == ([], [], [-1])

    run(work)


class Memory:
    """Of a deployment that leaves: what is done with it, in order. `fail` is what its first end meets."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.steps: list[str] = []
        self._fail = fail

    async def release(self, slot: int | None) -> None:
        self.steps.append("release")
        fail, self._fail = self._fail, None
        if fail is not None:
            raise fail

    def destroy(self) -> None:
        self.steps.append("destroy")


def test_what_still_works_on_it_is_over_before_its_memory_goes_and_a_defect_ends_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, "n1")
        journal.put(RECORD)
        memory = Memory(ZeroDivisionError("a defect"))

        async def tend() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                memory.steps.append("tended")

        tending = asyncio.create_task(tend())
        await asyncio.sleep(0)
        leaving = Leaving(journal, Troubles())
        leaving.begin("search", memory, [tending])
        while "search" in leaving:
            await asyncio.sleep(0.005)
        assert memory.steps == ["tended", "release", "release", "destroy"] and not journal.record.deployments

    run(work)


def test_a_control_that_stops_leaves_nothing_going_on(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, "n1")
        journal.put(RECORD)
        leaving, memory = Leaving(journal, Troubles()), Memory()

        async def held(slot: int | None) -> None:
            await asyncio.Event().wait()

        memory.release = held  # type: ignore[method-assign]
        before = asyncio.all_tasks()
        leaving.begin("search", memory, ())
        assert len(asyncio.all_tasks()) == len(before) + 1
        await asyncio.sleep(0)
        await leaving.stop()
        assert asyncio.all_tasks() == before
        assert journal.record.deployments["search"].leaving and memory.steps == []

    run(work)


def test_nobody_answers_for_a_deployment_that_leaves(tmp_path: Path) -> None:
    async def work(front: Scene) -> None:
        assert (await front.infer()).status_code == 200
        front.journal.put(msgspec.structs.replace(RECORD, leaving=True))
        assert (await front.infer()).status_code == 404
        assert "no deployment lists this node" in (await front.http.get("/readyz")).json()["reason"]

    run_front(tmp_path, work)


def test_whoever_still_works_on_a_deployment_that_was_given_up_is_told_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    memory = Remembered(journal, "search")
    journal.drop("search")
    for work in (
        lambda: memory.record,
        lambda: memory.remember(lag_ms=1),
        lambda: memory.keep(lag_ms=1),
        lambda: memory.change_record("r-1"),
    ):
        with pytest.raises(RaftmetaError, match="unknown_deployment"):
            work()
