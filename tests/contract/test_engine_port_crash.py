"""What every engine behind the serving port survives: the death of control between any two verbs, and of a server that owns its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from node_agent.device.port import SlotState
from node_agent.metrics import Meter
from node_agent.observe import Observer
from node_agent.places import new_record
from node_agent.plan import Change, Goal, Order
from node_agent.prepared import Prepared
from node_agent.refusal import Refusal
from node_agent.remembered import Remembered
from node_agent.serving import DrainKnown, VectorFrom
from node_agent.taking import Means
from node_agent.tend import Tender
from raftmeta.core.types import Phase, SideName, Stage
from tests.support.agent_fakes import FakePlane, FakeProvider
from tests.support.owned_serving import OwnedServing
from tests.support.owning_server import OwningServer
from tests.support.serving_subjects import InProcessSubject, OwningSubject, Subject, run, serve, work
from tests.support.shm import shm_directory


@pytest.fixture(params=[InProcessSubject, OwningSubject], ids=["in_process", "owning_server"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    with shm_directory() as shm:
        made = request.param(tmp_path, shm)
        yield made
        made.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwningSubject]:
    with shm_directory() as shm:
        yield OwningSubject(tmp_path, shm)


class Driver:
    """A tender over the subject, whose control process may be killed after any number of steps."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.versions = {version.target.label: version for version in subject.versions.values()}
        self.plane = FakePlane()
        subject.memory.journal.put(new_record(subject.memory.goal, "encoder", subject.memory.root, "n1"))
        self.begin()

    def begin(self) -> None:
        memory, serving = self.subject.memory, self.subject.serving
        means = Means("n1", "boot-1", self.plane, FakeProvider(memory, self.versions), lambda record: serving, Observer(Meter()))
        self.tender = Tender(Remembered(memory.journal, "search"), Prepared(memory.store, serving.held), serving, means)

    async def steps(self, goal: Goal, count: int) -> bool:
        """As many steps of the plan. True when nothing was left to do before."""
        self.tender.want(goal)
        for _ in range(count):
            await self.tender._advance(goal)
            if self.tender.idle:
                return True
        return False

    async def rest(self, goal: Goal) -> None:
        async with asyncio.timeout(20):
            while not await self.steps(goal, 1):
                pass


@pytest.mark.parametrize("lives", [1, 2, 3])
def test_control_killed_between_any_two_verbs_converges(subject: Subject, lives: int) -> None:
    """Every control process lives for so many steps; each phase of the rollout takes as many of them as it needs."""

    async def steps() -> None:
        driver = Driver(subject)
        first, second = subject.versions[1].target, subject.versions[2].target
        await driver.rest(Goal("search", SideName.PRIMARY, first, Order(1, 3), None))
        change = Change("r-2", Phase.PREPARING, second, None)
        for committed, order, at in (
            (first, 3, change),
            (first, 3, change._replace(phase=Phase.SYNCING, attested=Stage.PREPARED)),
            (second, 6, change._replace(phase=Phase.COMMITTING, attested=Stage.READY)),
        ):
            goal = Goal("search", SideName.PRIMARY, committed, Order(1, order), at)
            for _ in range(8):
                subject.take_over()
                driver.begin()
                await driver.steps(goal, lives)
                assert subject.answer() in ("1.0.0 1", "2.0.0 2"), driver.tender.trouble
        await driver.rest(Goal("search", SideName.PRIMARY, second, Order(1, 6), None))
        assert subject.answer() == "2.0.0 2" and driver.tender.look().ready
        assert not [item for item in driver.plane.attested if item["stage"] == "failed"]

    run(steps)


def test_each_engine_says_what_it_can_tell(tmp_path: Path) -> None:
    with shm_directory() as shm:
        ours, theirs = InProcessSubject(tmp_path / "ours", shm), OwningSubject(tmp_path / "theirs", shm)
        assert ours.serving.abilities == (VectorFrom.MEMORY, DrainKnown.COUNTED, 2)
        assert theirs.serving.abilities == (VectorFrom.SERVER, DrainKnown.TOLD, 2)
        ours.close()


def test_a_vector_that_a_server_attests_is_no_vector_from_memory(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        reading = subject.serving.vector()
        assert reading is not None and reading.root == subject.versions[1].target.vector_root
        assert reading.vector_from is subject.serving.abilities.vector_from
        assert bool(reading.vectors) is (reading.vector_from is VectorFrom.MEMORY)

    run(steps)


def test_without_a_second_slot_a_first_version_serves_and_nothing_is_staged_beside_it(server: OwningSubject) -> None:
    async def steps() -> None:
        server.serving = OwnedServing(server.server, server.memory.store, slots=1)
        await serve(server, 1, 0)
        with pytest.raises(Refusal, match="no_second_slot"):
            await server.serving.stage(work(server, 2, 1))
        assert server.answer() == "1.0.0 1"

    run(steps)


def test_a_server_that_lost_its_state_is_filled_again(server: OwningSubject) -> None:
    async def steps() -> None:
        driver = Driver(server)
        goal = Goal("search", SideName.PRIMARY, server.versions[1].target, Order(1, 3), None)
        await driver.rest(goal)
        server.server.restart()
        assert server.answer() == "" and server.serving.look(None).active is None
        driver.tender.idle = False
        await driver.rest(goal)
        assert server.answer() == "1.0.0 1" and driver.tender.look().ready

    run(steps)


def test_a_server_that_holds_other_bytes_than_it_was_sent_serves_none_of_them(
    server: OwningSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps() -> None:
        await serve(server, 1, 0)
        digest = OwningServer.digest
        monkeypatch.setattr(OwningServer, "digest", lambda self, name: digest(self, name) if name.startswith("0/") else "f" * 64)
        with pytest.raises(Refusal, match="vector_mismatch"):
            await server.serving.stage(work(server, 2, 1))
        assert server.answer() == "1.0.0 1" and list(server.server.held) == [server.server.active]

    run(steps)


def test_a_stray_of_an_abandoned_load_is_unloaded_before_the_next_one(server: OwningSubject) -> None:
    async def steps() -> None:
        await serve(server, 1, 0)
        go_on = server.slow_down()
        given_up = asyncio.create_task(server.serving.stage(work(server, 2, 1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await go_on()
        assert len(server.server.held) == 2 and server.serving.look(None).slots[1].state is SlotState.EMPTY
        await server.serving.stage(work(server, 3, 1))
        assert sorted(held.label for held in server.server.held.values()) == ["1.0.0", "3.0.0"]

    run(steps)


def test_a_server_that_can_ends_the_streams_of_the_old_version_and_no_other(server: OwningSubject) -> None:
    async def steps() -> None:
        await serve(server, 1, 0)
        old = server.hold()
        await serve(server, 2, 1)
        new = server.hold()
        with pytest.raises(Refusal, match="slot_active"):
            await server.serving.cancel(1)
        await server.serving.cancel(0)
        await server.serving.drain(0, 5.0)
        assert (old(), new()) == ("", "2.0.0 2")

    run(steps)
