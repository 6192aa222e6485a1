"""What an operator may say to one node against the orders: keep this version, fail that rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from node_agent import failure, journal
from node_agent.plan import Change, Pinned
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Phase, Stage
from tests.support.tending import TendScene as Scene
from tests.support.tending import run


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


def test_a_pinned_version_serves_on_over_a_restart_until_it_is_lifted(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        assert await scene.tender.pin("audit") == scene.target(1)
        scene.close()
        scene.take_over()
        scene.revision += 3
        look = await scene.rest(scene.goal(2))
        assert look.pinned == "audit" and "1.0.0 is pinned here (audit)" in look.trouble
        assert scene.station.active == 0 and look.slots[0].record.version == "1.0.0"
        record = journal.read(scene.memory.store.root)
        assert record is not None and record.deployments["search"].pinned == Pinned(scene.target(1), "audit")
        await scene.tender.unpin()
        look = await scene.rest(scene.goal(2), lambda look: look.ready)
        assert look.pinned == "" and scene.station.active == 1

    run(work)


def test_a_rollout_fails_as_fenced_where_another_version_is_pinned_and_nothing_of_it_is_fetched(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.tender.pin("audit")
        (step,) = scene.tender.preview(scene.target(2))["steps"]
        assert step == {"step": "Decline", "version": "2.0.0", "pinned": "1.0.0", "reason": "audit"}
        fetched = list(scene.provider.fetched)
        await scene.rest(scene.goal(1, Change("r-2", Phase.PREPARING, scene.target(2), None)))
        assert (scene.last()["stage"], scene.last()["code"]) == ("failed", "fenced")
        assert "1.0.0, pinned: audit" in scene.last()["detail"]
        assert scene.provider.fetched == fetched

    run(work)


def test_nothing_can_be_pinned_while_nothing_serves(scene: Scene) -> None:
    async def work() -> None:
        with pytest.raises(RaftmetaError, match="starting: search: no verified version"):
            await scene.tender.pin("audit")
        assert scene.remembered.record.pinned is None

    run(work)


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING])
def test_an_aborted_rollout_fails_as_fenced_with_the_reason_and_what_serves_goes_on(scene: Scene, phase: Phase) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        before = scene.station.block.active()
        change = Change("r-2", phase, scene.target(2), None)
        scene.tender.want(scene.goal(1, change))
        assert await scene.tender.abort("wrong weights") == "r-2"
        await scene.rest(scene.goal(1, change))
        assert (scene.last()["stage"], scene.last()["code"]) == ("failed", "fenced")
        assert "an operator's word: wrong weights" in scene.last()["detail"]
        assert scene.station.block.active() == before
        await scene.roll(1, 2)

    run(work)


@pytest.mark.parametrize("step", ["Fetch", "Warm"])
def test_an_abort_ends_a_step_that_waits(scene: Scene, step: str) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        waits = asyncio.Event()
        if step == "Fetch":
            scene.provider.block = waits
        else:
            scene.crew.block = waits
        change = Change("r-2", Phase.SYNCING, scene.target(2), None)
        scene.tender.want(scene.goal(1, change))
        task = asyncio.create_task(scene.tender.run())
        try:
            async with asyncio.timeout(15):
                while not scene.tender.look().doing.startswith(step):
                    await asyncio.sleep(0.01)
                await scene.tender.abort("wrong weights")
                while scene.last()["stage"] != "failed":
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert scene.last()["code"] == "fenced" and not waits.is_set()

    run(work)


def test_what_is_counted_after_a_failure_leaves_the_failure_and_the_first_reason_stays(scene: Scene) -> None:
    remembered = scene.remembered
    remembered.change_record("r-2")
    remembered.fail_change("r-2", failure.make("aborted", "plan", "search"))
    remembered.count("r-2", lambda counters: msgspec.structs.replace(counters, bytes_read=7))
    remembered.fail_change("r-2", failure.make("internal", "fill", "search"))
    remembered.count("r-1", lambda counters: msgspec.structs.replace(counters, bytes_read=9))
    change = remembered.record.change
    assert (change.id, change.failure.kind, change.counters.bytes_read) == ("r-2", "aborted", 7)


def test_an_abort_is_refused_without_a_rollout_and_once_the_switch_is_decided(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        with pytest.raises(RaftmetaError, match="rollout_not_running"):
            await scene.tender.abort("why not")
        scene.tender.want(scene.goal(2, Change("r-2", Phase.COMMITTING, scene.target(2), Stage.READY)))
        with pytest.raises(RaftmetaError, match=r"wrong_phase: .* decided; roll back instead"):
            await scene.tender.abort("why not")
        assert not scene.remembered.record.change.failure

    run(work)
