"""What a module holds outside the slot: a worker digests it again, names what changed, computes nothing more with it, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from consistency.vector import BLOCK_BYTES  # noqa: E402
from node_agent.binding import SlotViews, bind  # noqa: E402
from node_agent.config import AgentConfig  # noqa: E402
from node_agent.device.arena import Arena  # noqa: E402
from node_agent.device.port import SlotRecord  # noqa: E402
from node_agent.ipc import CallFailed, ConnectionLost, Link  # noqa: E402
from node_agent.layout import plan  # noqa: E402
from node_agent.messages import NOT_LOADED, CheckDerived, DerivedChecked, DerivedDamage  # noqa: E402
from node_agent.metrics import Meter  # noqa: E402
from node_agent.runtime import Runtime  # noqa: E402
from node_agent.worker import EXIT_DAMAGED, Worker  # noqa: E402
from raftmeta.core.manifest import TensorEntry, tensor_bytes  # noqa: E402
from tests.support.scrub_scene import GOOD, EndsEngine, ScrubScene  # noqa: E402

DIGEST = "0" * 64
BLOCK_VALUES = BLOCK_BYTES // 8


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("ids", torch.arange(2 * BLOCK_VALUES + 3), persistent=False)
        self.plain = {"offset": torch.tensor([10.0])}
        self.other: dict[str, torch.Tensor] = {}


def bound(path: Path) -> object:
    shapes = {"layer.weight": (3, 4), "layer.bias": (3,)}
    layout = plan([TensorEntry(n, "F32", s, "f", 0, tensor_bytes("F32", s), DIGEST, DIGEST) for n, s in shapes.items()])
    arena = Arena.create(path, 1 << 16)
    arena.mark_dirty(0, SlotRecord(version="1"))
    arena.mark_verified(0, DIGEST, DIGEST)

    def load(_: object, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
        module = Module()
        module.load_state_dict(tensors, assign=True)
        return module

    return bind(None, load, SlotViews(arena.serving_view(0), layout))


@pytest.mark.parametrize("at", [0, BLOCK_VALUES - 1, BLOCK_VALUES, 2 * BLOCK_VALUES, 2 * BLOCK_VALUES + 2])
@pytest.mark.parametrize("bit", [0, 31, 63])
def test_a_flipped_bit_of_a_derived_tensor_is_found_in_its_block(shm: Path, at: int, bit: int) -> None:
    made = bound(shm / "arena")
    assert made.check_derived("ids") is None and made.check_derived("plain['offset']") is None  # type: ignore[attr-defined]
    made.module.ids[at] ^= torch.tensor(-(1 << 63) if bit == 63 else 1 << bit)  # type: ignore[attr-defined]
    found = made.check_derived("ids")  # type: ignore[attr-defined]
    assert found is not None and (found.tensor, found.block) == ("ids", at // BLOCK_VALUES)
    assert found.expected != found.found and made.check_derived("plain['offset']") is None  # type: ignore[attr-defined]


def test_a_derived_tensor_that_is_gone_or_has_another_size_is_damage(shm: Path) -> None:
    made = bound(shm / "arena")
    made.module.plain["offset"] = torch.zeros(BLOCK_VALUES * 4)  # type: ignore[attr-defined]
    assert made.check_derived("plain['offset']").found == "2 blocks"  # type: ignore[attr-defined]
    del made.module.plain["offset"]  # type: ignore[attr-defined]
    assert made.check_derived("plain['offset']").found == "no such tensor"  # type: ignore[attr-defined]


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[ScrubScene]:
    made = ScrubScene(tmp_path, shm)
    yield made
    made.close()


def call(scene: ScrubScene, ends: bool = True, slot: int = 0, checksum: str = "") -> CheckDerived:
    return CheckDerived(7, "search", slot, checksum or scene.versions[1].target.checksum, ends)


DAMAGE = DerivedDamage("table", 3, "1:2", "3:4")


def test_a_module_of_which_a_derived_tensor_changed_computes_nothing_more(scene: ScrubScene) -> None:
    assert scene.host.derived_of(call(scene)) == ("table",)
    assert scene.host.check_derived(call(scene), "table") is None
    EndsEngine.made[0].damage["table"] = DAMAGE
    assert scene.host.check_derived(call(scene, ends=False), "table") == DAMAGE
    assert scene.answer() == GOOD, "it was only asked"
    assert scene.host.check_derived(call(scene), "table") == DAMAGE
    assert scene.answer() == NOT_LOADED, "another worker answers, or this one's successor"
    assert scene.host.derived_of(call(scene)) is None
    assert scene.host.check_derived(call(scene), "table") is None


def test_only_the_module_that_was_asked_about_is_looked_at(scene: ScrubScene) -> None:
    assert scene.host.derived_of(call(scene, slot=1)) is None
    assert scene.host.derived_of(call(scene, checksum="f" * 64)) is None
    assert scene.host.derived_of(CheckDerived(1, "other", 0, "", True)) is None


def under_a_worker(scene: ScrubScene, work: Callable[[Link, list[int]], object]) -> None:
    async def whole() -> None:
        values = {"node": "n1", "zone": "a", "member_urls": ["http://127.0.0.1:1"], "store_dir": scene.memory.root}
        runtime = Runtime(AgentConfig(**values), "boot-1", 8100)  # type: ignore[arg-type]
        runtime.run_dir.mkdir(parents=True, exist_ok=True)
        left: list[int] = []
        running = asyncio.create_task(Worker(0, scene.host, Meter(), left.append).run(runtime))
        link = Link(lambda push: None, lambda: None)
        async with asyncio.timeout(10):
            while not link.connected:
                try:
                    await link.connect(runtime.worker_socket(0))
                except OSError:
                    await asyncio.sleep(0.01)
        await work(link, left)  # type: ignore[misc]
        await link.close()
        EndsEngine.made.clear()
        runtime.stopping.set()
        await running

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_worker_that_finds_damage_in_its_own_memory_says_so_and_ends_after_its_answer(scene: ScrubScene) -> None:
    async def work(link: Link, left: list[int]) -> None:
        asked = call(scene)
        assert await link.call(lambda n: CheckDerived(n, "search", 0, asked.checksum, True), 10) == DerivedChecked(1, (), False)
        EndsEngine.made[0].damage["table"] = DAMAGE
        assert await link.call(lambda n: CheckDerived(n, "search", 0, asked.checksum, False), 10) == DerivedChecked(2, (DAMAGE,), False)
        assert left == []
        assert await link.call(lambda n: CheckDerived(n, "search", 0, asked.checksum, True), 10) == DerivedChecked(3, (DAMAGE,), True)
        async with asyncio.timeout(10):
            while not left:
                await asyncio.sleep(0.01)
        assert left == [EXIT_DAMAGED]
        with pytest.raises((CallFailed, ConnectionLost), match=NOT_LOADED):
            await link.call(lambda n: CheckDerived(n, "search", 0, asked.checksum, True), 10)

    under_a_worker(scene, work)
