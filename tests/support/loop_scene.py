"""A control process of a node in memory: its loop beside a control plane that answers from dictionaries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from node_agent.desired import Desired, Event, Identity
from node_agent.in_process import InProcess
from node_agent.journal import DeploymentRecord
from node_agent.loop import Bounds, Loop
from node_agent.metrics import Meter
from node_agent.observe import Observer
from node_agent.report import NodeFacts
from node_agent.station import Station
from node_agent.taking import Means
from raftmeta.client import Bookmark, Change, Reply
from raftmeta.core.errors import RaftmetaError
from tests.support.agent_fakes import FakeCrew, FakeProvider
from tests.support.agent_memory import NodeMemory
from tests.support.small_version import Version, make_version


class ScriptedPlane:
    """Answers from dictionaries. `tell` changes a record and sends it to whoever watches."""

    def __init__(self, versions: Mapping[str, Version]) -> None:
        self.versions = versions
        self.records: dict[str, dict[str, Any]] = {}
        self.rollouts: dict[str, dict[str, Any]] = {}
        self.revision = 10
        self.generation = 1
        self.cluster_id = "c-1"
        self.down: RaftmetaError | None = None
        self.missing = ""  # a field that no reply has
        self.interval_ms = 20  # between heartbeats
        self.lists = 0
        self.heartbeats: list[dict[str, Any]] = []
        self.attested: list[dict[str, Any]] = []
        self.evidence: list[dict[str, Any]] = []
        self._queue: asyncio.Queue[Change | Bookmark | RaftmetaError] = asyncio.Queue()

    def declare(self, name: str = "search", nodes: Sequence[str] = ("n1",), **fields: Any) -> dict[str, Any]:
        base = {"name": name, "model": "encoder", "primary": {"zone": "a", "nodes": list(nodes)}, "standby": None}
        defaults = {"version": "", "previous": "", "rollout_id": "", "order_revision": 0}
        self.records[name] = base | defaults | fields
        return self.records[name]

    def tell(self, *events: Event) -> None:
        self.revision += 1
        self._queue.put_nowait(Change(self.generation, self.revision, events))

    def fail_watch(self, error: RaftmetaError) -> None:
        self._queue.put_nowait(error)

    def _reply(self, body: Mapping[str, Any]) -> Reply:
        if self.down is not None:
            raise self.down
        body = {name: value for name, value in body.items() if name != self.missing}
        return Reply(dict(body), status=200, revision=self.revision, generation=self.generation)

    async def deployments(self) -> AsyncIterator[Mapping[str, Any]]:
        self.lists += 1
        self._reply({})
        for record in list(self.records.values()):
            yield record

    async def cluster(self) -> Reply:
        return self._reply({"cluster_id": self.cluster_id})

    async def get_rollout(self, rollout_id: str) -> Reply:
        return self._reply(self.rollouts[rollout_id])

    async def get_version(self, model: str, label: str) -> Reply:
        if label not in self.versions:
            raise RaftmetaError("unknown_version", f"no version {label!r}")
        target = self.versions[label].target
        return self._reply({"checksum": target.checksum, "vector_root": target.vector_root})

    async def get_manifest(self, model: str, label: str) -> Reply:
        return self._reply(msgspec.to_builtins(self.versions[label].manifest))

    async def heartbeat(self, node: str, status: Mapping[str, Any]) -> Reply:
        reply = self._reply({"interval_ms": self.interval_ms})
        self.heartbeats.append(dict(status))
        return reply

    async def attest(self, node: str, attestation: Mapping[str, Any]) -> Reply:
        reply = self._reply({})
        self.attested.append(dict(attestation))
        return reply

    async def record_evidence(self, node: str, evidence: Mapping[str, Any]) -> Reply:
        reply = self._reply({})
        self.evidence.append(dict(evidence))
        return reply

    async def watch(self, from_revision: int, resources: Sequence[str]) -> AsyncIterator[Change | Bookmark]:
        assert set(resources) == {"deployments", "rollouts"}
        while True:
            item = await self._queue.get()
            if isinstance(item, RaftmetaError):
                raise item
            yield item


class LoopScene:
    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.memory = NodeMemory(root / "store", arena_dir)
        self.versions = {f"{n}.0.0": make_version(root / f"v{n}", f"{n}.0.0", {"a": bytes([n]) * 500}) for n in (1, 2, 3)}
        self.plane = ScriptedPlane(self.versions)
        self.loop: Loop

    def begin(self, max_deployments: int = 4, start_wait_s: float = 60.0) -> None:
        """A control process begins."""
        facts = NodeFacts("n1", "a", "boot-1", "http://n1")
        desired = Desired(Identity("n1", "boot-1"))
        self.loop = Loop(facts, desired, self.memory.places, self.plane, Bounds(max_deployments, start_wait_s))
        self.crew = FakeCrew()
        self.provider = FakeProvider(self.memory, self.versions)

    async def until(self, holds: Callable[[], bool], what: str = "") -> None:
        """While the loop runs."""
        means = Means("n1", "boot-1", self.plane, self.provider, self.serve, Observer(Meter()))
        task = asyncio.create_task(self.loop.run(means))
        try:
            async with asyncio.timeout(15):
                while not holds():
                    if task.done():
                        task.result()
                    await asyncio.sleep(0.005)
        except TimeoutError as cause:
            raise AssertionError(f"not in time: {what}; {self.loop.status()}") from cause
        finally:
            self.status, self.kept = self.loop.status(), self.loop.keep()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for tender in self.loop.tenders.values():
                tender.serving.close()

    def serve(self, record: DeploymentRecord) -> InProcess:
        """The crew looks at the memory of the deployment that was taken over last."""
        self.crew.station = Station(record, self.memory.places)
        return InProcess(self.crew.station, self.crew, "kernel 1")

    def serving(self, name: str = "search") -> str:
        found = self.loop.status()["deployments"].get(name)
        return found["version"] if found and found["ready"] else ""


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Within a minute."""
    asyncio.run(asyncio.wait_for(work(), 60))
