"""A whole agent as processes beside a control plane that obeys a test, with three versions that it may be told to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.agent_kinds import Kind
from tests.support.agent_process import PATIENCE_S, AgentProcess, Driver, OpenLoop, Tally, embedding
from tests.support.fake_control_plane import FakeControlPlane
from tests.support.shm import shm_directory


class Node:
    """One agent with three versions published; v2 and v3 differ from v1 in their last layer only."""

    def __init__(self, root: Path, arena_dir: Path, kind: Kind, **settings: object) -> None:
        """`settings` are added to the agent's configuration."""
        self.kind = kind
        self.artifacts = root / "artifacts"
        self.arena_dir = arena_dir
        self.plane = FakeControlPlane()
        self.plane.start()
        self.agent = AgentProcess(root / "node", arena_dir, self.plane.url, **({"workers": 2, "engines": [kind.engine]} | settings))
        self.driver = Driver(self.plane)
        self.expected: dict[str, Any] = {}
        self.tally = Tally()
        kind.write(self.artifacts / "v1", 1)
        kind.write(self.artifacts / "v2", 2, changed_from=1)
        kind.write(self.artifacts / "v3", 3, changed_from=1)
        for number in (1, 2, 3):
            self.driver.publish(f"{number}.0.0", kind.manifest_of(self.artifacts / f"v{number}"))
        self.driver.declare("n1")

    def learn(self, label: str) -> None:
        """Activate a version in a quiet moment and note what it answers."""
        assert self.driver.activate(label)["status"] == "done", self.agent.log[-3000:]
        reply = self.ask(f"/versions/{label}")
        assert reply.status_code == 200, reply.text
        self.expected[label] = embedding(reply.json())

    def begin_again(self) -> None:
        """Run, whatever the test before did, and be at rest on the first version."""
        if not self.agent.running:
            self.agent.start()
        self.serve("1.0.0")

    def ask(self, version: str = "") -> httpx.Response:
        """`version`: of the path, `/versions/LABEL`."""
        return httpx.post(f"{self.agent.url}/v2/models/search{version}/infer", json=self.kind.body, timeout=PATIENCE_S)

    def serve(self, label: str) -> None:
        """Be at rest on this version."""
        if self.driver.serving != label:
            assert self.driver.activate(label)["status"] == "done", self.agent.log[-3000:]
        self.agent.until_settled(label)
        self.agent.until_ready()

    def under_load(self, work: Callable[[], Any], rate: float = 5.0) -> Tally:
        """Do something in a thread while a client asks all the time."""

        async def whole() -> Tally:
            loop = OpenLoop(self.agent.url, self.kind.body, self.expected, rate)
            self.tally = loop.tally
            async with loop.running() as tally:
                await asyncio.sleep(0.5)
                await asyncio.to_thread(work)
                await asyncio.sleep(0.5)
            return tally

        return asyncio.run(whole())

    def until_load_meets(self, label: str) -> None:
        """Wait, inside `under_load`, until the client has an answer of this version: a switch may be undone before it asks again."""
        self.agent.until(lambda: label in self.tally.versions, f"an answer of {label}")

    def close(self) -> None:
        self.agent.close()
        self.plane.close()


@contextmanager
def running(root: Path, kind: Kind) -> Iterator[Node]:
    """A node that has served each of its versions, so that what each answers is known."""
    with shm_directory() as arena_dir:
        node = Node(root, arena_dir, kind)
        try:
            node.agent.start()
            for label in ("1.0.0", "2.0.0", "3.0.0"):
                node.learn(label)
            yield node
        finally:
            node.close()
