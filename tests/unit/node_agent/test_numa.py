from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from node_agent.device import numa
from node_agent.device.arena import Arena


@pytest.mark.parametrize(("nodes", "words"), [((0,), [1]), ((1, 3), [0b1010]), ((64,), [0, 1]), ((0, 127), [1, 1 << 63])])
def test_every_node_has_its_bit(nodes: tuple[int, ...], words: list[int]) -> None:
    assert list(numa.mask_of(nodes)) == words


@pytest.mark.parametrize(
    ("refused", "why"), [(errno.EPERM, "container"), (errno.EINVAL, "no such memory node"), (errno.ENOSYS, "not implemented")]
)
def test_a_refusal_is_said_with_its_reason(refused: int, why: str) -> None:
    with mmap.mmap(-1, 4096) as mapping:
        assert why in numa.bind(mapping, (0, 2), lambda *_: -refused)


def test_the_whole_mapping_is_placed_and_the_mask_has_room_for_every_node() -> None:
    calls: list[tuple[int, ...]] = []
    with mmap.mmap(-1, 8192) as mapping:
        assert numa.bind(mapping, (70,), lambda address, length, mode, mask, bits: calls.append((length, mode, bits)) or 0) == ""
    assert calls == [(8192, 2, 129)]


def test_a_machine_without_a_known_number_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    with mmap.mmap(-1, 4096) as mapping:
        assert "pdp11" in numa.bind(mapping, (0,))


def test_an_arena_is_made_whether_its_nodes_exist_or_not(shm: Path) -> None:
    placed = Arena.create(shm / "placed", 1, numa_nodes=(0,))
    anywhere = Arena.create(shm / "anywhere", 1, numa_nodes=(1023,))
    assert anywhere.notice
    for arena in (placed, anywhere):
        assert arena.path.stat().st_blocks * 512 >= 2 * arena.slot_bytes, "allocated, not only promised"
        arena.close()
