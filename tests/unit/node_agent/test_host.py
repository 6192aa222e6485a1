"""What a worker answers with: only modules of verified slots, under the gate, with the label of what computed it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from node_agent.binding import SlotViews
from node_agent.config import AgentConfig
from node_agent.engine.port import EngineFault
from node_agent.host import Host
from node_agent.loading import Loader
from node_agent.messages import (
    NOT_LOADED,
    VERSION_NOT_HELD,
    Acknowledge,
    Answering,
    Done,
    Fault,
    Infer,
    Inferred,
    Load,
    Loaded,
    Release,
    Reply,
    SlotServed,
    Tensor,
    TensorSpec,
)
from node_agent.peers import Peer
from node_agent.plan import Order
from node_agent.runtime import Runtime
from node_agent.serving import Staging
from node_agent.station import Station
from node_agent.worker import Worker
from raftmeta.core.errors import RaftmetaError
from tests.support.agent_memory import NodeMemory
from tests.support.first_byte import FakeEngine, FakeInstance
from tests.support.small_version import Version, make_version


class Scene:
    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.memory = NodeMemory(root / "store", arena_dir)
        self.versions = {n: make_version(root / f"v{n}", f"{n}.0.0", {"a": str(n).encode() * 100, "b": b"b" * 50}) for n in (1, 2, 3)}
        for version in self.versions.values():
            self.memory.fetch(version)
        self.station: Station = self.memory.station()
        self.station.make_room(self.versions[1].manifest)
        FakeEngine.made.clear()
        self.host = self.fresh_host()

    def fresh_host(self, worker: int = 0) -> Host:
        return Host(worker, (self.memory.root, self.memory.arena_dir), Loader(self.memory.store, {"fake": FakeEngine}))

    def stage(self, number: int, slot: int) -> Version:
        version = self.versions[number]
        self.station.stage(Staging(version.target, version.manifest, slot, Order(1, number), "", 0))
        return version

    def load(self, number: int, slot: int) -> object:
        target = self.versions[number].target
        return self.host.load(Load(1, "search", slot, target.label, target.checksum))

    def switch(self, number: int, slot: int) -> None:
        self.station.note_warm(slot, "", {})
        self.station.switch(self.versions[number].target, slot)

    def close(self) -> None:
        FakeEngine.made.clear()
        self.host.close()
        self.station.close()

    def infer(self, version: str = "", name: str = "x") -> object:
        return self.host.infer(Infer(1, "search", version, (Tensor(name, "INT64", (1,), bytes(8)),), ()))


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


def answer(reply: object) -> tuple[str, bytes]:
    assert isinstance(reply, Inferred), reply
    data = reply.outputs[0].data
    assert isinstance(data, bytes)
    return reply.version, data


def code(reply: object) -> str:
    assert isinstance(reply, Fault), reply
    return reply.code


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


def test_loading_refuses_a_slot_that_holds_another_version(scene: Scene) -> None:
    scene.stage(1, 0)
    assert code(scene.load(2, 0)) == "slot_not_verified"
    assert code(scene.load(1, 1)) == "slot_not_verified"
    assert all(served.slots == () for served in scene.host.served())


def test_loading_twice_checks_the_module_and_does_not_bind_or_warm_again(scene: Scene) -> None:
    """An undo waits for this: the module was warmed over the same bytes before."""
    scene.stage(1, 0)
    scene.load(1, 0)
    assert isinstance(scene.load(1, 0), Loaded)
    assert [made.warmed for made in FakeEngine.made] == [1]


def test_a_module_whose_own_tensors_changed_is_made_again_at_the_next_load(scene: Scene) -> None:
    """Refused, it would stand in the way of every undo to this version until the worker ends."""
    scene.stage(1, 0)
    scene.load(1, 0)
    FakeEngine.made[0].moved = True
    assert isinstance(scene.load(1, 0), Loaded)
    assert [made.warmed for made in FakeEngine.made] == [1, 1]
    scene.switch(1, 0)
    FakeEngine.made[0].during = lambda: pytest.fail("the damaged module computes")
    assert answer(scene.infer()) == ("1.0.0", b"1")


def test_a_version_that_lies_elsewhere_when_it_comes_again_is_bound_again(scene: Scene, tmp_path: Path) -> None:
    """Where a tensor lies depends on what the slot held before."""
    for number, tensors in ((4, {"a": b"4" * 300, "b": b"b" * 900, "c": b"c" * 300}), (5, {"b": b"z" * 100, "c": b"c" * 300})):
        scene.versions[number] = make_version(tmp_path / f"v{number}", f"{number}.0.0", tensors)
        scene.memory.fetch(scene.versions[number])
    scene.station.make_room(make_version(tmp_path / "v9", "9.0.0", {"a": b"9" * 9000}).manifest)
    scene.stage(4, 0)
    scene.load(4, 0)
    before = scene.station.slot_record(0)
    scene.stage(5, 0)
    scene.stage(4, 0)
    assert scene.station.slot_record(0).layout_digest != before.layout_digest
    scene.switch(4, 0)
    assert code(scene.infer()) == "not_loaded", "its module reads where the version lay before"
    scene.load(4, 0)
    assert answer(scene.infer()) == ("4.0.0", b"4") and len(FakeEngine.made) == 2


def test_a_load_that_a_release_overtook_leaves_no_module_behind(scene: Scene) -> None:
    scene.stage(1, 0)
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        def load(self, version_dir: Path, views: SlotViews, unbound: Sequence[str]) -> FakeInstance:
            begun.set()
            assert goes_on.wait(10)
            return super().load(version_dir, views, unbound)

    scene.host = Host(0, (scene.memory.root, scene.memory.arena_dir), Loader(scene.memory.store, {"fake": Slow}))
    replies: list[object] = []
    loading = threading.Thread(target=lambda: replies.append(scene.load(1, 0)))
    loading.start()
    assert begun.wait(10)
    scene.host.release(Release(1, "search", 0))
    goes_on.set()
    loading.join(10)
    assert code(replies[0]) == "slot_not_verified"
    assert [item.slots for item in scene.host.served()] == [()]
    assert isinstance(scene.load(1, 0), Loaded), "the next one is kept"


def test_memory_is_let_go_also_where_the_record_of_the_node_cannot_be_read(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.load(1, 0)
    state = scene.memory.root / "node.state"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1] + b"?")
    with pytest.raises(RaftmetaError):
        scene.host.release(Release(1, "search", -1))
    state.write_bytes(whole)
    assert scene.host.served() == ()


def test_a_module_that_fails_to_warm_up_is_not_served(scene: Scene, tmp_path: Path) -> None:
    broken = make_version(tmp_path / "broken", "4.0.0", {"a": b"!" * 100, "b": b"b" * 50})
    scene.memory.fetch(broken)
    scene.versions[4] = broken
    scene.stage(4, 1)
    assert code(scene.load(4, 1)) == "warmup_failed"
    assert all(served.slots == () for served in scene.host.served())


def test_a_deployment_that_the_record_does_not_name_is_not_loaded(scene: Scene) -> None:
    assert code(scene.host.load(Load(1, "other", 0, "1.0.0", "c"))) == "not_bindable"
    assert code(scene.host.infer(Infer(1, "other", "", (), ()))) == "not_loaded"


def test_an_engine_that_this_build_lacks_is_refused_by_name(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.host.close()
    scene.host = Host(0, (scene.memory.root, scene.memory.arena_dir), Loader(scene.memory.store, {}))
    reply = scene.load(1, 0)
    assert code(reply) == "not_bindable" and isinstance(reply, Fault) and "fake" in reply.detail


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


def test_a_restarted_worker_loads_what_the_record_and_the_slots_say_by_itself(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.stage(2, 1)
    scene.switch(2, 1)
    again = scene.fresh_host(worker=1)
    assert again.load_all() == []
    served = again.served()[0]
    specs = (TensorSpec("x", "INT64", (-1,)),), (TensorSpec("y", "UINT8", (1,)),)
    assert list(served.slots) == [
        SlotServed(0, "1.0.0", scene.versions[1].target.checksum, *specs),
        SlotServed(1, "2.0.0", scene.versions[2].target.checksum, *specs),
    ]
    assert served.active == 1
    FakeEngine.made.clear()
    again.close()


def test_a_restarted_worker_that_has_not_loaded_both_slots_yet_says_so_instead_of_that_it_holds_no_such_version(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.stage(2, 1)
    scene.switch(2, 1)
    again = scene.fresh_host(worker=1)
    seen: list[tuple[bool, list[str], str]] = []

    class Watched(FakeInstance):
        def warm(self) -> None:
            served = again.served()[0]
            pinned = again.infer(Infer(1, "search", "1.0.0", (), ()))
            seen.append((served.is_loading, [slot.label for slot in served.slots], code(pinned)))

    class WatchedEngine(FakeEngine):
        def load(self, version_dir: Path, views: SlotViews, unbound: Sequence[str]) -> FakeInstance:
            return Watched(views)

    again._loader = Loader(scene.memory.store, {"fake": WatchedEngine})
    assert again.load_all() == []
    assert seen == [(True, [], NOT_LOADED), (True, ["2.0.0"], NOT_LOADED)]
    assert again.served()[0].is_loading is False
    assert code(again.infer(Infer(1, "search", "7", (), ()))) == VERSION_NOT_HELD
    again.close()


@pytest.mark.parametrize("damage", ["changed", "missing", "planted"])
def test_no_module_is_made_of_files_that_are_not_those_of_the_manifest(scene: Scene, damage: str) -> None:
    scene.stage(1, 0)
    directory = scene.memory.store.version_dir(scene.versions[1].target.checksum)
    config = directory / "config.json"
    data = config.read_bytes()
    if damage == "changed":
        config.chmod(0o640)
        config.write_bytes(data[:-1] + b"]")
    elif damage == "missing":
        config.unlink()
    else:
        (directory / "tokenizer.json").write_bytes(b"{}")
    reply = scene.load(1, 0)
    assert isinstance(reply, Fault) and reply.code == "files_changed", reply
    assert not FakeEngine.made
    scene.memory.store.materialize(scene.versions[1].target.checksum, scene.versions[1].manifest)
    assert isinstance(scene.load(1, 0), Loaded)
