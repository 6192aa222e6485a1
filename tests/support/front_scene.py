"""The front of a node in front of a worker and a control that the test plays, over their real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from node_agent.config import AgentConfig
from node_agent.front import Front
from node_agent.ipc import Server
from node_agent.journal import DeploymentRecord, Journal
from node_agent.messages import (
    NOT_LOADED,
    Fault,
    GaugeSample,
    GetEvidence,
    GetMetrics,
    GetVector,
    Infer,
    Inferred,
    Json,
    Metrics,
    Numbered,
    Reply,
    Served,
    SlotServed,
    Tensor,
    TensorSpec,
    WorkerState,
)
from node_agent.plan import Target
from node_agent.runtime import Runtime
from raftmeta.core.types import SideName

TEXT = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]}
SPECS = (TensorSpec("text", "BYTES", (-1,)),), (TensorSpec("embedding", "FP32", (-1, 2)),)
OLD_SPECS = (TensorSpec("text", "BYTES", (-1,)),), (TensorSpec("embedding", "FP32", (-1, 1)),)
PIN = Target("encoder", "1.0.0", "a" * 64, "b" * 64)
RECORD = DeploymentRecord("search", "encoder", SideName.PRIMARY, "x.arena", "x.control", pin=PIN)


class FakeWorker:
    """A worker process, played over its real socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = "1.0.0"
        self.calls: list[Infer] = []
        self.hold: asyncio.Event | None = None
        self.fault: tuple[int, str] | None = None
        self.blocked = ""
        self.is_loading = self.is_half_loaded = False
        self._server = Server(self._answer, self.state)

    def state(self) -> WorkerState:
        active, other = SlotServed(0, self.label, "c" * 64, *SPECS), SlotServed(1, "0.9.0", "d" * 64, *OLD_SPECS)
        slots = () if self.is_loading else (other,) if self.blocked else (active, other)
        slots = (active,) if self.is_half_loaded else slots
        is_loading = self.is_loading or self.is_half_loaded
        return WorkerState(0, 1, (Served("search", slots, 0, blocked=self.blocked, is_loading=is_loading),))

    async def start(self) -> None:
        await self._server.start(self.path)

    def say(self, blocked: str = "", is_loading: bool = False, is_half_loaded: bool = False) -> None:
        self.blocked, self.is_loading, self.is_half_loaded = blocked, is_loading, is_half_loaded
        self._server.push(self.state())

    async def die(self) -> None:
        await self._server.stop()
        self._server = Server(self._answer, self.state)

    async def _answer(self, call: Numbered) -> Reply:
        if isinstance(call, GetMetrics):
            return Metrics(call.number, (GaugeSample("worker_private_bytes", ("0",), 7.0),))
        assert isinstance(call, Infer)
        self.calls.append(call)
        if self.hold is not None:
            await self.hold.wait()
        if self.is_loading or (self.is_half_loaded and call.version not in ("", self.label)):
            return Fault(call.number, 503, NOT_LOADED, "not loaded in this worker yet")
        if self.fault is not None:
            return Fault(call.number, self.fault[0], "x", self.fault[1])
        data = np.array([[0.5, 0.25]], "<f4").tobytes()
        return Inferred(call.number, call.version or self.label, "c" * 64, (Tensor("embedding", "FP32", (1, 2), data),))


class FakeControl:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[Numbered] = []
        self.server = Server(self._answer, lambda: None)

    async def _answer(self, call: Numbered) -> Reply:
        self.asked.append(call)
        if isinstance(call, GetVector | GetEvidence) and call.deployment != "search":
            return Fault(call.number, 404, "unknown_deployment", "not here")
        if isinstance(call, GetMetrics):
            return Metrics(call.number, ())
        return Json(call.number, b'{"said":"control"}')


class Scene:
    def __init__(self, root: Path, **settings: Any) -> None:
        values = {"node": "n1", "zone": "a", "member_urls": ["http://127.0.0.1:1"], "store_dir": root, "request_deadline_s": 5}
        self.runtime = Runtime(AgentConfig(**(values | settings)), "boot-1", 8100)
        self.runtime.run_dir.mkdir(parents=True)
        self.journal = Journal(root, "n1")
        self.journal.put(RECORD)
        self.worker = FakeWorker(self.runtime.worker_socket(0))
        self.control = FakeControl(self.runtime.control_socket())

    async def __aenter__(self) -> Scene:
        await self.worker.start()
        await self.control.server.start(self.control.path)
        self.front = Front(self.runtime)
        await self.front.start()
        transport = httpx.ASGITransport(self.front)  # type: ignore[arg-type]
        self.http = httpx.AsyncClient(transport=transport, base_url="http://node")
        await self.until(lambda: self.front._workers[0].connected and self.front._control.connected and bool(self.front._workers[0].served))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.front.stop()
        await self.worker.die()
        await self.control.server.stop()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.005)

    async def infer(self, path: str = "/v2/models/search/infer", body: object = TEXT, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=data, headers={"content-type": "application/json"} | headers)


def run(tmp_path: Path, work: Callable[[Scene], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        async with Scene(tmp_path / "store", **settings) as scene:
            await work(scene)

    asyncio.run(asyncio.wait_for(whole(), 30))


async def refused_unread(scene: Scene, headers: list[tuple[bytes, bytes]]) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Status and headers of the answer to an inference request with these, of whose body nothing may be read."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": "POST", "raw_path": b"/v2/models/search/infer", "headers": headers, "query_string": b""}
    await scene.front(scope, receive, send)
    return sent[0]["status"], sent[0]["headers"]
