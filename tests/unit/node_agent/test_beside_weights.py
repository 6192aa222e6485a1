"""What lies beside the weights in shared memory, damaged: control writes it again, and the scrub goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from node_agent.device.arena import Arena
from node_agent.device.control_block import NO_SLOT, ControlBlock, pack_active
from node_agent.device.snapshot import Snapshots
from node_agent.refusal import Refusal
from node_agent.slots import ACTIVE, Switch, WorkerGate
from tests.support.scrub_scene import ScrubScene
from tests.unit.node_agent.test_supervisor import flip


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[ScrubScene]:
    made = ScrubScene(tmp_path, shm)
    yield made
    made.close()


def look(scene: ScrubScene) -> None:
    scene.active._station.beside_weights._lists_due_ns = 0
    scene.active._station.look(None, lambda slot, target: True)


@pytest.mark.parametrize("lost", [True, False])
def test_a_list_of_tensors_that_is_lost_is_written_again_and_stops_no_scrub(scene: ScrubScene, lost: bool) -> None:
    watched, station = scene.watched, scene.active._station
    (path,) = station._arena_path.parent.glob("*.slot0.*.json")
    path.chmod(0o640)
    if lost:
        path.unlink()
    else:
        flip(path, 10)
    assert scene.active.watched() == watched or scene.watched.record == watched.record
    digest = watched.record.snapshot_digest
    assert Snapshots(station._arena_path).load(0, digest) is None, "who did not see it before finds nothing"
    look(scene)
    assert Snapshots(station._arena_path).load(0, digest) is not None


def test_headers_are_written_again(scene: ScrubScene) -> None:
    station = scene.active._station
    for path in (station._arena_path, station.block.path):
        with open(path, "r+b") as file:
            file.seek(60)
            byte = file.read(1)
            file.seek(60)
            file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Refusal, match="foreign_control_block"):
        ControlBlock.open(station.block.path)
    with pytest.raises(Refusal, match="foreign_arena"):
        Arena.open(station._arena_path)
    look(scene)
    ControlBlock.open(station.block.path).close()
    Arena.open(station._arena_path).close()


def test_an_active_word_that_control_did_not_write_is_put_right_and_enters_no_worker_anywhere(scene: ScrubScene) -> None:
    station = scene.active._station
    before = station.block.words[ACTIVE]
    station.block.words[ACTIVE] = pack_active(2, 1)
    rows = station.block.words.tolist()
    gate = WorkerGate(ControlBlock.open(station.block.path), 9)
    with pytest.raises(Refusal, match="nothing_serves"):
        gate.enter()
    gate.detach()
    assert station.block.words.tolist() == rows
    look(scene)
    assert station.block.words[ACTIVE] == before


def test_a_control_process_that_finds_a_word_which_names_no_slot_starts_with_none(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    block.words[ACTIVE] = pack_active(77, 5)
    Switch(block)
    assert block.active() == (NO_SLOT, 6)
    block.close()
