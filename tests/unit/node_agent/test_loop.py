"""The agent's conversation with the control plane: list, watch, heartbeat, and what a node does without an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node_agent import loop as loop_module
from node_agent.desired import Event
from node_agent.device.arena import Arena
from node_agent.device.control_block import ControlBlock
from node_agent.plan import Order, Target
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import SideName
from tests.support.loop_scene import LoopScene, run


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[LoopScene]:
    yield LoopScene(tmp_path, shm)


def test_a_node_that_no_deployment_lists_has_nothing_and_says_hello(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(nodes=["n2"])
        scene.begin()
        await scene.until(lambda: len(scene.plane.heartbeats) > 1)
        assert scene.plane.heartbeats[-1] == {
            "node": "n1", "zone": "a", "boot_id": "boot-1", "url": "http://n1", "slots": [], "deployments": {},
        }  # fmt: skip
        assert scene.loop.contact.reachable

    run(work)


def test_what_is_committed_is_brought_up_from_the_list_alone(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()
        await scene.until(lambda: scene.serving() == "1.0.0")
        beat = scene.status
        assert beat["deployments"]["search"]["vector_root"] == scene.versions["1.0.0"].target.vector_root
        assert [(slot["slot"], slot["state"]) for slot in beat["slots"]] == [("active", "verified"), ("standby", "empty")]

    run(work)


def test_what_serves_is_told_with_the_order_that_it_obeys(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()
        await scene.until(lambda: bool(scene.plane.evidence))
        word, target = scene.plane.evidence[0], scene.versions["1.0.0"].target
        assert (word["version"], word["checksum"], word["vector_root"]) == ("1.0.0", target.checksum, target.vector_root)
        assert (word["generation"], word["order_revision"], word["boot_id"]) == (1, 7, "boot-1")

    run(work)


def test_a_failover_is_written_down_before_its_order_is_obeyed_and_the_version_stays(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        def step() -> bool:
            record = scene.memory.journal.record.deployments.get("search")
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                decided = {"serving_side": "standby", "failover": {"to": "standby", "revision": 11}}
                scene.plane.tell(Event("deployment", "search", "put", scene.plane.declare(version="1.0.0", order_revision=11, **decided)))
            return record is not None and record.fence == Order(1, 11)

        await scene.until(step)
        record = scene.memory.journal.record.deployments["search"]
        assert (record.serving_side, record.serving_order, record.fenced_by) == (SideName.STANDBY, Order(1, 11), SideName.STANDBY)
        assert scene.status["deployments"]["search"]["serving_side"] == "standby"
        assert scene.status["deployments"]["search"]["version"] == "1.0.0"

    run(work)


def test_what_is_of_an_order_below_the_one_that_was_heard_moves_a_node_to_no_side(scene: LoopScene) -> None:
    """The node was on the standby side at order 9, and is fenced on the primary side since order 11."""

    async def work() -> None:
        decided = {"serving_side": "standby", "failover": {"to": "standby", "revision": 11}}
        here, there = {"zone": "a", "nodes": ["n1"]}, {"zone": "b", "nodes": ["n2"]}
        scene.plane.declare(version="1.0.0", order_revision=11, primary=here, standby=there, **decided)
        scene.begin()
        sides: list[SideName] = []  # once each of these orders was looked at

        def tell(order: int, **fields: Any) -> None:
            seen = scene.plane.declare(version="1.0.0", order_revision=order, primary=there, standby=here, **fields)
            scene.plane.tell(Event("deployment", "search", "put", seen))

        def step() -> bool:
            record, tender = scene.memory.journal.record.deployments.get("search"), scene.loop.tenders.get("search")
            if record is None or tender is None or tender.goal is None:
                return False
            if not sides and scene.serving() == "1.0.0":
                sides.append(record.side)
                tell(9)
            elif len(sides) == 1 and tender.goal.order == Order(1, 9):
                sides.append(record.side)
                tell(11, **decided)
            elif len(sides) == 2 and tender.goal.order == Order(1, 11):
                sides.append(record.side)
            return len(sides) == 3

        await scene.until(step)
        assert sides == [SideName.PRIMARY, SideName.PRIMARY, SideName.STANDBY]

    run(work)


def test_a_failover_is_heard_though_no_member_says_what_its_version_consists_of(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        def step() -> bool:
            record = scene.memory.journal.record.deployments.get("search")
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                scene.plane.versions = {}
                decided = {"serving_side": "standby", "failover": {"to": "standby", "revision": 11}}
                scene.plane.tell(Event("deployment", "search", "put", scene.plane.declare(version="1.0.0", order_revision=11, **decided)))
            return record is not None and record.fenced_by is SideName.STANDBY

        await scene.until(step)

    run(work)


def test_changes_of_the_watch_are_followed(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        def step() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                record = scene.plane.declare(version="2.0.0", previous="1.0.0", order_revision=11)
                scene.plane.tell(Event("deployment", "search", "put", record))
            return scene.serving() == "2.0.0"

        await scene.until(step)

    run(work)


def test_a_compacted_watch_is_answered_by_a_list(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        def step() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.lists == 1:
                scene.plane.declare(version="2.0.0", order_revision=40)
                scene.plane.fail_watch(RaftmetaError("compacted", "too old"))
            return scene.serving() == "2.0.0"

        await scene.until(step)
        assert scene.plane.lists == 2

    run(work)


def test_a_member_that_says_compacted_again_and_again_is_listed_with_pauses(scene: LoopScene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(loop_module, "RETRY_S", 0.1)
        for _ in range(4):
            scene.plane.fail_watch(RaftmetaError("compacted", "nothing is retained"))
        began = time.monotonic()
        scene.begin()
        await scene.until(lambda: scene.plane.lists == 5)
        assert time.monotonic() - began >= 4 * 0.1

    run(work)


def test_an_older_order_after_a_list_is_not_obeyed(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.revision = 50
        scene.plane.declare(version="2.0.0", order_revision=40)
        scene.begin()

        def step() -> bool:
            if scene.serving() == "2.0.0" and scene.plane.lists == 1:
                scene.plane.declare(version="1.0.0", order_revision=7)
                scene.plane.fail_watch(RaftmetaError("compacted", "a restored member"))
            return "older" in scene.loop.status()["deployments"].get("search", {}).get("trouble", "")

        await scene.until(step)
        assert scene.status["deployments"]["search"]["version"] == "2.0.0"

    run(work)


@pytest.mark.parametrize("what", ["another cluster", "an earlier revision", "an earlier generation"])
def test_an_empty_list_of_strangers_takes_nothing_away(scene: LoopScene, what: str) -> None:
    async def work() -> None:
        scene.plane.revision, scene.plane.generation = 50, 2
        scene.plane.declare(version="1.0.0", order_revision=40)
        scene.begin()

        def step() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.lists == 1:
                scene.plane.records.clear()
                if what == "another cluster":
                    scene.plane.cluster_id = "c-2"
                elif what == "an earlier revision":
                    scene.plane.revision = 39
                else:
                    scene.plane.generation = 1
                scene.plane.fail_watch(RaftmetaError("compacted", "elsewhere"))
                scene.plane.lists = 2
            return scene.plane.lists == 2 and not scene.loop.contact.reachable

        await scene.until(step)
        assert scene.status["deployments"]["search"]["version"] == "1.0.0"
        assert "this node" in scene.status["control_plane"]["reason"]
        assert "search" in scene.memory.journal.record.deployments

    run(work)


def test_a_deployment_that_leaves_the_node_gives_its_memory_back(scene: LoopScene, shm: Path) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        def step() -> bool:
            if scene.serving() == "1.0.0" and scene.plane.revision == 10:
                scene.plane.tell(Event("deployment", "search", "put", scene.plane.declare(nodes=["n9"])))
            return scene.plane.revision > 10 and not scene.memory.journal.record.deployments

        await scene.until(step)
        assert -1 in scene.crew.released
        assert scene.memory.journal.record.deployments == {}
        assert list(shm.iterdir()) == []

    run(work)


def test_more_deployments_than_the_node_takes_are_refused_and_the_others_served(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare("alpha", version="1.0.0", order_revision=7)
        scene.plane.declare("beta", version="1.0.0", order_revision=8)
        scene.begin(max_deployments=1)
        await scene.until(lambda: scene.serving("alpha") == "1.0.0")
        assert set(scene.loop.tenders) == {"alpha"}

    run(work)


@pytest.mark.parametrize("offline", [False, True], ids=["online", "without control plane"])
@pytest.mark.parametrize("held", ["arena", "control block"])
def test_memory_that_an_earlier_control_still_holds_is_taken_over_once_it_lets_go(
    scene: LoopScene, held: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        monkeypatch.setattr(loop_module, "RETRY_S", 0.02)
        scene.plane.declare(version="1.0.0", order_revision=5)
        scene.begin()
        await scene.until(lambda: scene.serving() == "1.0.0")
        record = scene.memory.journal.record.deployments["search"]
        arena_dir = scene.memory.places.arena_dir
        if held == "arena":
            earlier: Arena | ControlBlock = Arena.open(arena_dir / record.arena, readonly=False)
        else:
            earlier = ControlBlock.open(arena_dir / record.control_block)
            earlier.lock_control()
        if offline:
            scene.plane.down = RaftmetaError("no_quorum", "nobody")
        scene.begin(start_wait_s=0.01)
        refused: list[str] = []

        def comes_back() -> bool:
            if (why := scene.loop.status()["not_tended"].get("search")) and not refused:
                refused.append(why)
                earlier.close()
            return scene.serving() == "1.0.0"

        await scene.until(comes_back)
        assert len(refused) == 1 and "in_use" in refused[0]

    run(work)


def test_a_plan_of_a_version_that_is_not_ordered_asks_for_it_and_of_one_that_is_not_there_says_so(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=5)
        scene.begin()
        plans: list[dict[str, Any]] = []

        async def ask() -> None:
            plans.append(await scene.loop.plans("2.0.0"))
            plans.append(await scene.loop.plans("9.0.0"))

        asking: list[asyncio.Task[None]] = []

        def asked() -> bool:
            if scene.serving() == "1.0.0" and not asking:
                asking.append(asyncio.create_task(ask()))
            return bool(asking) and asking[0].done()

        await scene.until(asked)
        asking[0].result()
        assert [step["step"] for step in plans[0]["search"]["steps"]] == ["Fetch", "Attest", "StageInto", "Warm", "Attest"]
        assert plans[1]["search"]["steps"] == [] and "9.0.0" in plans[1]["search"]["refused"]
        assert plans[1]["search"]["code"] == "unknown_version"

    run(work)


def test_without_an_answer_a_restarted_node_serves_its_pin_and_says_that_it_is_alone(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()
        await scene.until(lambda: scene.serving() == "1.0.0")
        scene.plane.down = RaftmetaError("no_quorum", "nobody")
        scene.begin(start_wait_s=0.05)
        await scene.until(lambda: scene.serving() == "1.0.0" and not scene.loop.contact.reachable)
        assert scene.status["control_plane"]["reachable"] is False
        assert scene.provider.fetched == []

    run(work)


def test_a_node_without_pin_and_without_answer_serves_nothing(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.down = RaftmetaError("no_quorum", "nobody")
        scene.begin(start_wait_s=0.02)
        passed = asyncio.get_running_loop().time() + 0.2
        await scene.until(lambda: asyncio.get_running_loop().time() > passed)
        assert scene.status["deployments"] == {}
        assert not scene.loop.contact.reachable

    run(work)


def test_what_must_stay_in_the_store_is_everything_active_previous_and_desired(scene: LoopScene) -> None:
    async def work() -> None:
        def checksum(label: str) -> str:
            return scene.versions[label].target.checksum

        target: Target = scene.versions["3.0.0"].target
        scene.plane.rollouts["r-3"] = {
            "id": "r-3", "deployment": "search", "model": "encoder", "to_version": "3.0.0", "checksum": target.checksum,
            "vector_root": target.vector_root, "phase": "preparing", "status": "running", "attestations": [],
        }  # fmt: skip
        scene.plane.declare(version="2.0.0", previous="1.0.0", order_revision=7, rollout_id="r-3")
        scene.begin()
        assert scene.loop.keep() is None, "nothing is known before the first list"
        await scene.until(lambda: scene.serving() == "2.0.0" and bool(scene.plane.attested))
        assert scene.kept == {checksum(label) for label in ("1.0.0", "2.0.0", "3.0.0")}
        assert scene.plane.attested[0]["stage"] == "prepared"

    run(work)


@pytest.mark.parametrize("missing", ["cluster_id", "checksum", "vector_root", "interval_ms"])
def test_a_member_whose_replies_lack_a_field_ends_nothing_and_is_asked_again(scene: LoopScene, missing: str) -> None:
    async def work() -> None:
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()
        scene.plane.missing = missing

        def whole_again() -> bool:
            status = scene.loop.status()
            said = status["control_plane"]["reason"] + status["not_tended"].get("search", "")
            if missing in said or (missing == "interval_ms" and scene.serving()):
                scene.plane.missing = ""
            return not scene.plane.missing and scene.serving() == "1.0.0" and len(scene.plane.heartbeats) > 1

        await scene.until(whole_again)

    run(work)


def test_an_interval_that_no_clock_holds_ends_nothing_and_is_asked_for_again(scene: LoopScene) -> None:
    async def work() -> None:
        scene.plane.interval_ms = 10**400
        scene.plane.declare(version="1.0.0", order_revision=7)
        scene.begin()

        def asked_again() -> bool:
            if scene.plane.heartbeats:
                scene.plane.interval_ms = 20
            return scene.serving() == "1.0.0" and len(scene.plane.heartbeats) > 1

        await scene.until(asked_again)

    run(work)
