"""A worker that stands still in the middle of a request to a slot that has to be rewritten: by the deployment's policy it is ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("transformers")

from node_agent import journal
from node_agent.device.control_block import ControlBlock
from tests.support.agent_kinds import ENCODER
from tests.support.agent_node import Node
from tests.support.agent_process import PATIENCE_S
from tests.support.shm import shm_directory

pytestmark = pytest.mark.cluster


def stand_still(node: Node, block: ControlBlock, pinned: str, slot: int) -> int:
    """Stop a worker while it computes a request that is pinned to the version of this slot. Gives its pid."""
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                node.ask(f"/versions/{pinned}")
            except httpx.HTTPError:
                return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for row in block.attached():
                if not row.since_ns[slot]:
                    continue
                os.kill(row.process.pid, signal.SIGSTOP)
                again = block.row(row.index)
                if again is not None and again.since_ns[slot]:
                    return row.process.pid
                os.kill(row.process.pid, signal.SIGCONT)
        raise AssertionError(f"no worker was met in slot {slot}")
    finally:
        done.set()


def test_a_worker_that_stands_still_in_a_slot_is_ended_and_the_next_version_serves(tmp_path: Path) -> None:
    with shm_directory() as arena_dir:
        node = Node(tmp_path, arena_dir, ENCODER, quiet_requests_per_s=1000, log_level="info")
        try:
            node.agent.start()
            sides = {"model": "tiny", "primary": {"zone": "a", "nodes": ["n1"]}, "standby": None}
            policy = {"drain_timeout_ms": 1_000, "drain_overdue": "cancel"}
            node.driver.call(lambda client: client.declare_deployment("search", {**sides, "policy": policy}))
            for label in ("1.0.0", "2.0.0"):
                node.serve(label)
            record = journal.read(node.agent.store)
            assert record is not None
            block = ControlBlock.open(arena_dir / record.deployments["search"].control_block)
            slot = 1 - block.active()[0]
            stopped = stand_still(node, block, "1.0.0", slot)
            assert node.driver.activate("3.0.0")["status"] == "done", node.agent.log[-3000:]
            assert stopped not in node.agent.children() and "worker_killed" in node.agent.log
            node.agent.until_settled("3.0.0")
            assert node.agent.status()["deployments"]["search"]["holders"] == []
            reply = node.ask()
            assert reply.status_code == 200 and reply.json()["model_version"] == "3.0.0"
            block.close()
            waited = [line for line in node.agent.log.splitlines() if '"event": "quiet"' in line]
            assert len(waited) == 3, "the gate on the rate of requests is on, and was passed by each version"
        finally:
            node.close()
