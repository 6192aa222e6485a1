"""A serving node for benchmarks: a whole agent as processes, a control plane that it obeys, and versions of a small encoder."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.encoders import TEXTS, label_of, write_answers, write_versions
from consistency.artifact import build_manifest
from raftmeta.client import Client
from tests.support.agent_process import PATIENCE_S, AgentProcess
from tests.support.fake_control_plane import FakeControlPlane

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DEPLOYMENT = "search"


class ServingNode:
    def __init__(self, root: Path, arena_dir: Path, versions: int, **settings: Any) -> None:
        """`versions` of one model are published and may be activated by number, from 1."""
        self.root, self.arena_dir = root, arena_dir
        self.artifacts = root / "artifacts"
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it tells of streams that end with the control plane
        self.plane = FakeControlPlane()
        self.plane.start()
        self.agent = AgentProcess(root / "node", arena_dir, self.plane.url, log_level="warning", **settings)
        self.directories = write_versions(self.artifacts, versions)
        self.expected = root / "expected.npz"
        write_answers(self.directories, self.expected)
        self.publish("encoder", self.directories)
        self.declare(DEPLOYMENT, "encoder")
        self.agent.start()

    def call(self, work: Callable[[Client], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            async with Client([self.plane.url], timeout_s=PATIENCE_S) as client:
                return await work(client)

        return asyncio.run(whole())

    def publish(self, model: str, directories: Sequence[Path]) -> None:
        async def all_of_them(client: Client) -> None:
            for number, directory in enumerate(directories, 1):
                manifest = build_manifest(directory, sources=[directory.as_uri() + "/"], engine="hf", unbound=[])
                await client.publish(model, label_of(number), manifest)

        self.call(all_of_them)

    def declare(self, deployment: str, model: str) -> None:
        body = {"model": model, "primary": {"zone": "a", "nodes": ["n1"]}, "standby": None}
        self.call(lambda client: client.declare_deployment(deployment, body))

    def activate(self, number: int, deployment: str = DEPLOYMENT) -> dict[str, Any]:
        """The rollout once it is done. Raises RuntimeError when it fails."""
        return self.finish(self.call(lambda client: client.activate(deployment, label_of(number)))["rollout_id"])

    def finish(self, rollout_id: str) -> dict[str, Any]:
        self.plane.until(lambda state: state.rollouts[rollout_id].status != "running", f"rollout {rollout_id} ends", PATIENCE_S)
        found: dict[str, Any] = self.call(lambda client: client.get_rollout(rollout_id))
        if found["status"] != "done":
            raise RuntimeError(f"rollout {rollout_id} ended as {found['status']}: {found.get('reason', '')}")
        return found

    def service_time_s(self, requests: int = 50) -> float:
        """Median time of one request after the other."""
        body = {"inputs": [{"name": "text", "shape": [len(TEXTS)], "datatype": "BYTES", "data": list(TEXTS)}]}
        times = []
        with httpx.Client(base_url=self.agent.url, timeout=PATIENCE_S, trust_env=False) as http:
            for _ in range(requests):
                reply = http.post(f"/v2/models/{DEPLOYMENT}/infer", json=body)
                reply.raise_for_status()
                times.append(reply.elapsed.total_seconds())
        return sorted(times)[requests // 2]

    def pids(self) -> list[int]:
        return [self.agent.pid, *self.agent.children()]

    def close(self) -> None:
        self.agent.close()
        self.plane.close()


@contextmanager
def serving_node(versions: int, **settings: object) -> Iterator[ServingNode]:
    """A node that serves version 1."""
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory(dir="/dev/shm") as arena_dir:
        node = ServingNode(Path(root), Path(arena_dir), versions, **settings)
        try:
            node.activate(1)
            yield node
        finally:
            node.close()


def anonymous_mb(pid: int) -> float:
    """RssAnon in MB of 10**6 bytes; nothing for a process that just ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in text.splitlines() if line.startswith("RssAnon:")), 0.0)


def cpu_s(pid: int) -> float:
    """Processor time of a process and of its children that ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, words[11:15])) / TICKS_PER_S


def machine_busy_s() -> float:
    """Processor time that all processors together spent on anything, what the hypervisor took included."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, words)
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def processors() -> int:
    return len(os.sched_getaffinity(0))


def descendants() -> list[int]:
    """This process and everything that it started, directly or not."""
    found, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                todo += map(int, task.read_text().split())
            except (FileNotFoundError, ProcessLookupError):  # ended just now
                continue
    return found
