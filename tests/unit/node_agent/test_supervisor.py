"""Files of one deployment, and a record of the node, that are damaged under a supervisor: it goes on, and so do the other deployments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node_agent.config import AgentConfig
from node_agent.device.control_block import NO_SLOT, ControlBlock, pack_active
from node_agent.journal import DeploymentRecord, Journal
from node_agent.slots import ACTIVE
from node_agent.supervisor import Child, Supervisor
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import SideName
from tests.support.shm import line_of, python_process
from tests.unit.node_agent.test_control_block import ATTACHED_WORKER


def supervisor(root: Path, arena_dir: Path, *names: str) -> Supervisor:
    """Of a node with these deployments, each of which has a control block."""
    store = root / "store"
    store.mkdir()
    journal = Journal(store, "n1")
    for name in names:
        journal.put(DeploymentRecord(name, "encoder", SideName.PRIMARY, f"{name}.arena", f"{name}.control"))
        block = ControlBlock.create(arena_dir / f"{name}.control")
        block.words[ACTIVE] = pack_active(1, 7)
        block.close()
    config = AgentConfig(node="n1", zone="a", member_urls=("http://127.0.0.1:1",), store_dir=store, arena_dir=arena_dir)
    return Supervisor(config, root / "agent.toml")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def active(path: Path) -> tuple[int, int]:
    block = ControlBlock.open(path)
    try:
        return block.active()
    finally:
        block.close()


def test_a_control_block_that_is_damaged_or_not_ours_keeps_no_other_deployment_from_starting(tmp_path: Path, shm: Path) -> None:
    made = supervisor(tmp_path, shm, "a", "b", "c")
    flip(shm / "a.control", 60)
    (shm / "b.control").unlink()
    (shm / "b.control").mkdir()
    made._fresh_control_blocks()
    assert active(shm / "a.control") == active(shm / "c.control") == (NO_SLOT, 0)
    assert (shm / "b.control").is_dir()


def test_a_block_of_which_a_worker_still_runs_stays_and_nobody_enters_its_slots(tmp_path: Path, shm: Path) -> None:
    made = supervisor(tmp_path, shm, "a")
    with python_process(ATTACHED_WORKER, str(shm / "a.control"), "0") as worker:
        assert line_of(worker) == "1"
        made._fresh_control_blocks()
        assert active(shm / "a.control") == (NO_SLOT, 8)


def test_a_record_that_is_damaged_ends_a_start_and_no_supervisor_that_runs(tmp_path: Path, shm: Path) -> None:
    made = supervisor(tmp_path, shm, "a")
    flip(tmp_path / "store" / "node.state", 20)
    with pytest.raises(RaftmetaError, match="SHA-256"):
        made._fresh_control_blocks()
    flip(tmp_path / "store" / "node.state", 20)
    with python_process(ATTACHED_WORKER, str(shm / "a.control"), "0") as worker:
        assert line_of(worker) == "1"
        made._deployments()
        flip(tmp_path / "store" / "node.state", 20)
        child = Child("worker", 0, pidfd=os.pidfd_open(worker.pid))
        worker.kill()
        worker.wait()
    made._clear_worker(child)
    os.close(child.pidfd)
    block = ControlBlock.open(shm / "a.control")
    assert block.attached() == (), "the place of the dead worker is free"
    block.close()
