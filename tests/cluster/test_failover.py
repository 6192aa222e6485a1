"""A whole agent says what it serves and obeys a fail-over; the other side is played. Three members begin at the highest level."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

from raftmeta.core.state import SUPPORTED_FEATURE_LEVEL
from tests.support.agent_kinds import CHAIN
from tests.support.agent_node import Node
from tests.support.real_cluster import RealCluster
from tests.support.shm import shm_directory

pytestmark = pytest.mark.cluster

OTHER = "n2"


class Pair:
    """A real node n1 on the primary side; n2 on the standby side says whatever n1 would."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.call = node.driver.call
        self._told_ms = 1_000

    def declare(self) -> None:
        sides = {"primary": {"zone": "a", "nodes": ["n1"]}, "standby": {"zone": "b", "nodes": [OTHER]}}
        self.call(lambda client: client.declare_deployment("search", {"model": "tiny", **sides}))

    def other_says(self, label: str) -> None:
        """n2 is heard, and serves this version by its own word."""
        version = self.call(lambda client: client.get_version("tiny", label))
        status = {"node": OTHER, "zone": "b", "boot_id": "boot-2", "url": "http://127.0.0.1:1", "slots": [], "deployments": {}}
        self._told_ms += 1
        word = {"deployment": "search", "generation": 0, "order_revision": 0, "boot_id": "boot-2", "told_ms": self._told_ms}
        word |= {"version": label, "checksum": version["checksum"], "vector_root": version["vector_root"]}
        self.call(lambda client: client.heartbeat(OTHER, status))
        self.call(lambda client: client.record_evidence(OTHER, word))

    def proof(self, node: str) -> dict[str, Any]:
        shown = self.call(lambda client: client.evidence("search"))
        return next(dict(item) for item in shown["nodes"] if item["node"] == node)

    def could_serve(self, node: str) -> bool:
        """By its last heartbeat."""
        heard = {item["node"]: item for item in self.call(lambda client: client.nodes())["items"]}
        return node in heard and bool(heard[node]["deployments"]["search"]["ready"])

    def over(self, to: str) -> int:
        """The revision of the order."""
        body = {"to": to, "force": True}
        return int(self.call(lambda client: client.fail_over("search", body))["order_revision"])

    def infer(self) -> httpx.Response:
        return self.node.ask()


def test_a_node_says_what_it_serves_and_refuses_requests_once_the_other_side_serves(tmp_path: Path) -> None:
    with shm_directory() as arena_dir:
        node = Node(tmp_path, arena_dir, CHAIN)
        try:
            began = time.monotonic()
            node.agent.start()
            node.serve("1.0.0")
            _play(node, Pair(node), began)
        finally:
            node.close()


def _play(node: Node, pair: Pair, began: float) -> None:
    """`began`: by the monotonic clock, before anything was staged."""
    agent = node.agent
    agent.until(lambda: pair.proof("n1")["serves_decided"], "evidence of 1.0.0")
    said = pair.proof("n1")["evidence"]
    assert said["vector_from"] == "memory"
    assert said["verified_age_ms"] < (time.monotonic() - began) * 1000, "a busy machine may take minutes from staging to the switch"

    pair.declare()
    pair.other_says("1.0.0")
    order = pair.over("standby")
    agent.until(lambda: pair.infer().status_code == 503, "the fence")
    refused = pair.infer()
    assert refused.headers["x-raftmeta-serving-side"] == "standby" and refused.json()["error"].startswith("fenced: ")
    ready = agent.get("/v2/health/ready")
    assert (ready.status_code, "fenced" in ready.text) == (503, True)
    agent.until(lambda: pair.proof("n1")["evidence"]["order_revision"] == order, "the order of the fail-over is obeyed")
    assert pair.proof("n1")["serves_decided"], "it holds the decided bytes all the same"

    node.plane.stop()
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    agent.start()
    agent.until(
        lambda: agent.status().get("deployments", {}).get("search", {}).get("ready", False), "served from its pin without a control plane"
    )
    assert pair.infer().status_code == 503, "it remembers"
    node.plane.start()
    agent.until(lambda: pair.proof("n1")["standing"] == "current", "heard and said again under its new boot")
    agent.until(lambda: pair.could_serve("n1"), "and ready to answer, which a later heartbeat may be the first to say")

    pair.over("primary")
    agent.until(lambda: pair.infer().status_code == 200, "it serves again")
    agent.until_ready()


def test_three_members_begin_at_the_highest_level_and_take_what_needs_it(tmp_path: Path) -> None:
    with RealCluster(tmp_path) as cluster:
        cluster.wait_ready()
        assert cluster.publish("a", "1").status_code == 201
        seen = cluster.get("b", "/v1/cluster").json()
        assert (seen["feature_level"], {item["feature_level"] for item in seen["members"]}) == (
            SUPPORTED_FEATURE_LEVEL,
            {SUPPORTED_FEATURE_LEVEL},
        )
        body = {"model": "m", "primary": {"zone": "a", "nodes": ["n1"]}, "policy": {"drain_overdue": "cancel"}}
        assert cluster.put("c", "/v1/deployments/search", body).status_code == 200
        cluster.servers["c"].kill()
        again = cluster.put("b", "/v1/deployments/search", body)
        assert again.status_code == 200 and again.json()["policy"]["drain_overdue"] == "cancel"
