"""Which modules a worker makes of slots, keeps, checks again and lets go; and what a worker that begins again loads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from node_agent.binding import SlotViews
from node_agent.host import Host
from node_agent.loading import Loader
from node_agent.messages import (
    NOT_LOADED,
    VERSION_NOT_HELD,
    Fault,
    Infer,
    Load,
    Loaded,
    Release,
    SlotServed,
    TensorSpec,
)
from raftmeta.core.errors import RaftmetaError
from tests.support.first_byte import FakeEngine, FakeInstance
from tests.support.host_scene import Scene, answer, code
from tests.support.small_version import make_version


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


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


def test_a_restarted_worker_opens_nothing_that_is_leaving_the_node(scene: Scene) -> None:
    scene.stage(1, 0)
    scene.switch(1, 0)
    scene.memory.journal.keep("search", lambda record: msgspec.structs.replace(record, leaving=True))
    again = scene.fresh_host(worker=1)
    assert (again.load_all(), again.served()) == ([], ())


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
