"""What is wrong with one deployment is that one's trouble: the others are followed, and it is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node_agent import loop as loop_module
from node_agent.desired import Event
from node_agent.remembered import Remembered
from raftmeta.client import Reply
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import SideName
from raftmeta.durable import DiskFull
from tests.support.loop_scene import LoopScene, run

ODD: dict[str, Any] = {"policy": {"drain_overdue": "ask"}}  # of a later build
DECIDED: dict[str, Any] = {"serving_side": "standby", "failover": {"to": "standby", "revision": 11}}


@pytest.fixture
def scene(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopScene]:
    monkeypatch.setattr(loop_module, "RETRY_S", 0.05)
    monkeypatch.setattr(loop_module, "RELIST_S", 0.05)
    yield LoopScene(tmp_path, shm)


def test_a_record_of_other_nodes_that_cannot_be_read_is_nobodys_trouble(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare("alpha", nodes=["n7"], **ODD)
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()
        await scene.until(lambda: scene.serving() == "1.0.0")
        assert (scene.status["not_tended"], scene.plane.lists) == ({}, 1)

    run(work)


@pytest.mark.parametrize("what", ["version", "rollout"])
def test_what_no_member_knows_of_one_deployment_keeps_no_other_waiting_and_is_asked_again(scene: LoopScene, what: str) -> None:
    async def work() -> None:
        fields = {"version": "9.0.0"} if what == "version" else {"version": "1.0.0", "rollout_id": "r-1"}
        scene.plane.declare("alpha", order_revision=5, **fields)
        scene.plane.declare(version="1.0.0", order_revision=7)
        target = scene.versions["1.0.0"].target
        whole = {
            "id": "r-1", "deployment": "alpha", "model": "encoder", "to_version": "1.0.0", "checksum": target.checksum,
            "vector_root": target.vector_root, "phase": "active", "status": "done", "attestations": [],
        }  # fmt: skip
        scene.plane.rollouts["r-1"] = whole | {"phase": "a later one"}
        scene.begin()
        troubles: list[str] = []

        def mended() -> bool:
            if scene.serving() == "1.0.0" and not troubles:
                troubles.append(scene.loop.status()["not_tended"]["alpha"])
                scene.plane.rollouts["r-1"] = whole
                scene.plane.versions = scene.versions | {"9.0.0": scene.versions["1.0.0"]}
                scene.provider.versions |= {"9.0.0": scene.versions["1.0.0"]}
            return bool(troubles) and "alpha" in scene.loop.tenders and not scene.loop.status()["not_tended"]

        await scene.until(mended)
        assert ("9.0.0" if what == "version" else "RolloutView") in troubles[0]
        assert scene.plane.lists == 1, "that was no reason to list everything again"

    run(work)


def test_a_member_that_does_not_answer_for_one_deployment_keeps_no_order_of_another_from_being_heard(scene: LoopScene) -> None:
    async def work() -> None:
        answer = scene.plane.get_version

        async def get_version(model: str, label: str) -> Reply:
            if label == "9.0.0":
                await asyncio.Event().wait()
            return await answer(model, label)

        scene.plane.get_version = get_version  # type: ignore[method-assign]
        scene.plane.declare("alpha", version="9.0.0", order_revision=5)
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        def followed() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                scene.plane.tell(Event("deployment", "search", "put", scene.plane.declare(version="2.0.0", order_revision=11)))
            return scene.serving() == "2.0.0"

        await scene.until(followed)

    run(work)


@pytest.mark.parametrize("how", ["a change", "a list"])
@pytest.mark.parametrize("odd", [ODD, {"primary": 7}, {"primary": 7, "name": 7}], ids=["a field", "its sides", "its name"])
def test_a_deployment_whose_record_cannot_be_read_goes_on_as_it_is_until_it_can(scene: LoopScene, odd: dict[str, Any], how: str) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7, **DECIDED)
        scene.begin()
        troubles: list[str] = []

        def serves_the_next() -> bool:
            status = scene.loop.status()
            trouble = status["deployments"].get("search", {}).get("trouble", "") + "".join(status["not_tended"].values())
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                record = scene.plane.declare(version="2.0.0", order_revision=11)
                record |= odd
                if how == "a change":
                    scene.plane.tell(Event("deployment", "search", "put", record))
                else:
                    scene.plane.revision += 1
                    scene.plane.fail_watch(RaftmetaError("compacted", "listed anew"))
            elif scene.plane.revision == 11 and "record" in trouble:
                assert scene.serving() == "1.0.0" and scene.loop.contact.reachable
                assert scene.memory.journal.record.deployments["search"].fenced_by is SideName.STANDBY
                troubles.append(trouble)
                scene.plane.revision += 1
                scene.plane.declare(version="2.0.0", order_revision=12, **DECIDED)  # nobody tells it: the next list has it
            return scene.serving() == "2.0.0"

        await scene.until(serves_the_next)
        assert len(troubles) == 1
        assert scene.status["deployments"]["search"]["trouble"] == "" and scene.status["not_tended"] == {}

    run(work)


def test_a_failover_is_heard_though_this_build_cannot_read_the_rest_of_its_record(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        def fenced() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                record = scene.plane.declare(version="1.0.0", order_revision=11, **DECIDED, **ODD)
                scene.plane.tell(Event("deployment", "search", "put", record))
            found = scene.memory.journal.record.deployments.get("search")
            return found is not None and found.fenced_by is SideName.STANDBY

        await scene.until(fenced)
        assert "search" in scene.loop.tenders

    run(work)


def test_a_side_that_cannot_be_written_down_keeps_its_own_order_alone_waiting(scene: LoopScene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        for name in ("alpha", "search"):
            scene.plane.declare(name, version="1.0.0", order_revision=7)
        scene.begin()
        hear = Remembered.hear_serving_side
        room: list[bool] = []

        def hear_serving_side(memory: Remembered, side: SideName | None, order: Any) -> bool:
            if memory.name == "alpha" and side is not None and not room:
                raise DiskFull("no room")
            return hear(memory, side, order)

        monkeypatch.setattr(Remembered, "hear_serving_side", hear_serving_side)

        def decided() -> bool:
            tended = scene.loop.tenders
            if len(tended) == 2 and all(each.goal for each in tended.values()) and scene.plane.revision == 10:
                records = [scene.plane.declare(name, version="1.0.0", order_revision=11, **DECIDED) for name in ("alpha", "search")]
                scene.plane.tell(*(Event("deployment", record["name"], "put", record) for record in records))
            known = scene.memory.journal.record.deployments
            if "search" in known and known["search"].fenced_by is not None and not room:
                goal = tended["alpha"].goal
                assert goal is not None and goal.order.revision == 7
                room.append("no room" in scene.loop.status()["deployments"]["alpha"]["trouble"])
            return bool(room) and known["alpha"].fenced_by is not None

        await scene.until(decided)
        assert room == [True]

    run(work)
