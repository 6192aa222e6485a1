"""What a worker answers with: only modules of verified slots, under the gate, with the label of what computed it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from node_agent.config import AgentConfig
from node_agent.engine.port import EngineFault
from node_agent.messages import (
    Acknowledge,
    Answering,
    Done,
    Fault,
    Infer,
    Load,
    Loaded,
    Release,
    Reply,
)
from node_agent.peers import Peer
from node_agent.runtime import Runtime
from node_agent.worker import Worker
from tests.support.first_byte import FakeEngine
from tests.support.host_scene import Scene, answer, code


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


def test_the_answer_carries_the_label_of_the_slot_that_computed_it(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.stage(2, 1)
    assert isinstance(scene.load(1, 0), Loaded) and isinstance(scene.load(2, 1), Loaded)
    scene.switch(1, 0)
    assert answer(scene.infer()) == ("1.0.0", b"1")
    scene.switch(2, 1)
    assert answer(scene.infer()) == ("2.0.0", b"2")


def test_nothing_is_answered_before_the_first_switch_although_slots_are_loaded(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    assert code(scene.infer()) == "nothing_serves"
    assert "no slot serves" in scene.host.served()[0].blocked
    assert code(scene.host.acknowledge(Acknowledge(1, "search"))) == "not_loaded"


def test_an_active_slot_that_is_not_loaded_here_is_not_answered_from(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.stage(2, 1)
    scene.load(2, 1)
    scene.switch(1, 0)
    assert code(scene.infer()) == "not_loaded"
    assert scene.host.served()[0].blocked == "", "this worker has to load it, nothing is wrong with the node"
    scene.load(1, 0)
    assert answer(scene.infer()) == ("1.0.0", b"1")


def test_a_slot_whose_record_no_longer_says_verified_does_not_serve(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    scene.switch(1, 0)
    arena = scene.station._arena
    assert arena is not None
    arena.mark_dirty(0, arena.record(0))  # the same version, about to be written again
    assert code(scene.infer()) == "nothing_serves"
    refused = scene.infer("1.0.0")
    assert code(refused) == "version_not_held"
    assert isinstance(refused, Fault) and refused.detail.endswith("held: none")
    arena.mark_empty(0)
    assert code(scene.infer()) == "nothing_serves"
    served = scene.host.served()[0]
    assert (served.slots, served.blocked) == ((), "the slot that should serve, 0, is empty, not verified")


def test_a_slot_that_was_taken_away_is_served_from_the_other_one_after_the_switch(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    scene.switch(1, 0)
    arena = scene.station._arena
    assert arena is not None
    arena.mark_empty(0)
    scene.stage(1, 1)
    scene.load(1, 1)
    assert scene.host.served()[0].blocked, "loaded, but nobody switched to it"
    assert answer(scene.infer("1.0.0")) == ("1.0.0", b"1"), "who asks for it by name may have it"
    scene.switch(1, 1)
    assert scene.host.served()[0].blocked == ""
    assert answer(scene.infer()) == ("1.0.0", b"1")


def test_a_deployment_whose_memory_is_gone_is_said_to_serve_nothing_until_it_is_loaded_again(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.switch(1, 0)
    path = scene.station._arena_path
    path.rename(path.with_suffix(".away"))
    again = scene.fresh_host(worker=1)
    assert len(again.load_all()) == 1
    assert "no slot serves" in again.served()[0].blocked
    assert code(again.infer(Infer(1, "search", "", (), ()))) == "nothing_serves"
    path.with_suffix(".away").rename(path)
    target = scene.versions[1].target
    assert isinstance(again.load(Load(1, "search", 0, target.label, target.checksum)), Loaded)
    assert [item.blocked for item in again.served()] == [""]
    FakeEngine.made.clear()
    again.close()


@asynccontextmanager
async def worker_of(scene: Scene) -> AsyncIterator[Peer]:
    """A worker over the scene's host, and a link to it."""
    values = {"node": "n1", "zone": "a", "member_urls": ["http://127.0.0.1:1"], "store_dir": scene.memory.root}
    runtime = Runtime(AgentConfig(**values), "boot-1", 8100)  # type: ignore[arg-type]
    runtime.run_dir.mkdir(parents=True, exist_ok=True)
    running = asyncio.create_task(Worker(0, scene.host, runtime.meter("worker")).run(runtime))
    peer = Peer(runtime.worker_socket(0), lambda: None)
    keeping = asyncio.create_task(peer.keep_connected())
    yield peer
    FakeEngine.made.clear()
    runtime.stopping.set()
    await running
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def test_a_worker_says_that_it_binds_a_module_before_it_begins_and_once_it_is_done(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    scene.stage(2, 1)
    target, goes_on, load = scene.versions[2].target, threading.Event(), scene.host.load

    def gated(call: Load) -> Reply:
        assert not call.number or goes_on.wait(10)  # what a worker loads at its start has no number
        return load(call)

    scene.host.load = gated  # type: ignore[method-assign]

    async def work() -> None:
        async with worker_of(scene) as peer:
            await until(lambda: bool(peer.served) and not peer.served[0].is_loading)
            asked = asyncio.create_task(peer.call(lambda n: Load(n, "search", 1, target.label, target.checksum), 20))
            await until(lambda: peer.served[0].is_binding)
            goes_on.set()
            assert isinstance(await asked, Loaded)
            await until(lambda: not peer.served[0].is_binding and len(peer.served[0].slots) == 2)

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_worker_tells_by_itself_that_the_slot_that_serves_was_taken_away_and_that_one_serves_again(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    scene.switch(1, 0)
    arena = scene.station._arena
    assert arena is not None

    async def work() -> None:
        async with worker_of(scene) as peer:
            await until(lambda: bool(peer.served) and bool(peer.served[0].slots))
            arena.mark_empty(0)  # and nobody says so
            await until(lambda: "is empty, not verified" in peer.served[0].blocked)
            scene.stage(1, 1)
            scene.load(1, 1)
            scene.switch(1, 1)
            await until(lambda: peer.served[0].blocked == "" and peer.served[0].active == 1)

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_pinned_version_is_served_from_the_slot_that_holds_it_and_refused_otherwise(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.stage(2, 1)
    scene.load(1, 0)
    scene.load(2, 1)
    scene.switch(2, 1)
    assert answer(scene.infer("2.0.0")) == ("2.0.0", b"2")
    assert answer(scene.infer("1.0.0")) == ("1.0.0", b"1")
    refused = scene.infer("9.0.0")
    assert code(refused) == "version_not_held"
    assert isinstance(refused, Fault) and refused.status == 409 and "1.0.0, 2.0.0" in refused.detail


def test_a_pinned_answer_computed_while_its_slot_was_rewritten_is_thrown_away(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.stage(2, 1)
    scene.load(1, 0)
    scene.load(2, 1)
    scene.switch(2, 1)
    FakeEngine.made[0].during = lambda: (scene.stage(3, 0), None)[1]
    assert code(scene.infer("1.0.0")) == "version_not_held"


def test_a_released_slot_is_forgotten_and_the_other_goes_on(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.stage(2, 1)
    scene.load(1, 0)
    scene.load(2, 1)
    scene.switch(2, 1)
    assert isinstance(scene.host.release(Release(1, "search", 0)), Done)
    assert code(scene.infer("1.0.0")) == "version_not_held"
    assert answer(scene.infer()) == ("2.0.0", b"2")


def test_releasing_the_deployment_gives_the_memory_back_and_it_can_be_loaded_again(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    scene.switch(1, 0)
    assert isinstance(scene.host.release(Release(1, "search", -1)), Done)
    assert [(item.slots, item.active, bool(item.blocked)) for item in scene.host.served()] == [((), -1, True)]
    assert code(scene.infer()) == "nothing_serves"
    assert scene.station.block.attached() == ()
    assert isinstance(scene.load(1, 0), Loaded)
    assert answer(scene.infer()) == ("1.0.0", b"1")


def test_bad_input_is_the_requests_fault_and_keeps_the_gate_clean(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    scene.switch(1, 0)
    reply = scene.infer(name="z")
    assert isinstance(reply, Fault) and (reply.status, reply.code) == (400, "bad_input")
    assert scene.station._switch.in_flight(0) == 0


def test_a_worker_says_at_how_many_requests_its_module_failed(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    scene.switch(1, 0)

    def fails() -> None:
        raise EngineFault("engine_failed", "index out of range")

    assert scene.host.served()[0].failed == 0
    FakeEngine.made[0].during = fails
    reply = scene.infer()
    assert isinstance(reply, Fault) and (reply.status, reply.code) == (500, "engine_failed")
    scene.infer(name="z")  # the request's own fault counts for nothing
    assert scene.host.served()[0].failed == 1


def test_acknowledging_says_what_the_next_request_gets(scene: Scene) -> None:
    version = scene.stage(1, 0)
    scene.load(1, 0)
    scene.switch(1, 0)
    reply = scene.host.acknowledge(Acknowledge(1, "search"))
    assert reply == Answering(1, 0, "1.0.0", version.target.checksum)
    assert scene.station._switch.acknowledged(1)
