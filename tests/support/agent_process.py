"""A whole agent as processes, the versions it is given, and a client that asks it all the time and believes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from raftmeta.client import Client
from raftmeta.core.manifest import Manifest
from tests.support.fake_control_plane import FakeControlPlane

PATIENCE_S = 240.0  # for anything that processes do on a busy machine


class AgentProcess:
    """One node. `settings` are added to its configuration."""

    def __init__(self, root: Path, arena_dir: Path, member_url: str, node: str = "n1", **settings: Any) -> None:
        self.root = root
        self.store = root / "store"
        self._config = root / "agent.toml"
        self._log = root / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None
        values: dict[str, object] = {
            "node": node,
            "zone": "a",
            "member_urls": [member_url],
            "listen": "127.0.0.1:0",
            "store_dir": str(self.store),
            "arena_dir": str(arena_dir),
            "artifact_roots": [str(root.parent / "artifacts")],
            "request_deadline_s": PATIENCE_S,
            "queue_limit": 5000,  # a worker's restart takes as long as the machine is busy
            "start_wait_s": 3.0,
            "drain_s": 0.2,
        }
        root.mkdir(parents=True, exist_ok=True)
        self._config.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in (values | settings).items()))

    @property
    def url(self) -> str:
        return (self.store / "run" / "address").read_text().strip()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self, *words: str) -> None:
        """With more words on its command line. Returns when its front answers."""
        (self.store / "run" / "address").unlink(missing_ok=True)
        with open(self._log, "ab") as log:
            command = [sys.executable, "-m", "raftmeta.cli.main", "agent", "--config", str(self._config), *words]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.until(self._is_live, "the front answers")

    def run_to_end(self, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        """For a start that should be refused: the exit status and what it said."""
        command = [sys.executable, "-m", "raftmeta.cli.main", "agent", "--config", str(self._config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        return done.returncode, done.stderr

    @property
    def running(self) -> bool:
        return self._process is not None

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """The exit status of an agent that was told to stop."""
        assert self._process is not None
        status = self._process.wait(PATIENCE_S)
        self._process = None
        return status

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def child(self, role: str) -> int:
        """Pid of the process with this role, once there is one."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [pid for pid, name in self.children().items() if name == role]
            return bool(found)

        self.until(look, f"a process of role {role}")
        return found[0]

    def children(self) -> dict[int, str]:
        result = {}
        for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "--role" in words:
                    result[int(pid)] = words[words.index("--role") + 1]
        return result

    def kill(self, role: str) -> int:
        pid = self.child(role)
        os.kill(pid, signal.SIGKILL)
        return pid

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert self._process is None or self._process.poll() is None, f"the agent ended before {what}:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.log[-3000:]}"
            time.sleep(0.02)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S)

    def status(self) -> dict[str, Any]:
        reply = self.get("/raftmeta/v1/status")
        return reply.json() if reply.status_code == 200 else {}

    def until_ready(self) -> None:
        self.until(lambda: self.get("/v2/health/ready").status_code == 200, "the node is ready")

    def until_settled(self, label: str) -> None:
        """Control says that this version is committed, serves and is answered by every worker."""

        def settled() -> bool:
            found = self.status().get("deployments", {}).get("search", {})
            return bool(found.get("ready")) and found["version"] == found["committed"] == label

        self.until(settled, f"{label} serves")

    def _is_live(self) -> bool:
        try:
            return self.get("/livez").status_code == 200
        except (OSError, httpx.HTTPError):
            return False


class Driver:
    """What an operator does, and waits for."""

    def __init__(self, plane: FakeControlPlane) -> None:
        self._plane = plane

    def call(self, work: Callable[[Client], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            async with Client([self._plane.url], timeout_s=PATIENCE_S) as client:
                return await work(client)

        return asyncio.run(whole())

    def publish(self, label: str, manifest: Manifest) -> None:
        self.call(lambda client: client.publish("tiny", label, manifest))

    def declare(self, *nodes: str) -> None:
        body = {"model": "tiny", "primary": {"zone": "a", "nodes": list(nodes)}, "standby": None}
        self.call(lambda client: client.declare_deployment("search", body))

    def activate(self, label: str) -> dict[str, Any]:
        return self.finish(self.call(lambda client: client.activate("search", label))["rollout_id"])

    def roll_back(self) -> dict[str, Any]:
        return self.finish(self.call(lambda client: client.rollback("search"))["rollout_id"])

    def begin(self, label: str) -> str:
        return str(self.call(lambda client: client.activate("search", label))["rollout_id"])

    def finish(self, rollout_id: str) -> dict[str, Any]:
        """The rollout once it has ended."""
        self._plane.until(lambda state: state.rollouts[rollout_id].status != "running", f"rollout {rollout_id} ends", PATIENCE_S)
        result: dict[str, Any] = self.call(lambda client: client.get_rollout(rollout_id))
        return result

    @property
    def serving(self) -> str:
        found = self._plane.state.deployments.get("search")
        return "" if found is None else found.version


@dataclass
class Tally:
    sent: int = 0
    ok: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)


class OpenLoop:
    """Asks at a fixed rate whatever comes back, and compares every answer with what its version should say."""

    def __init__(self, url: str, body: Mapping[str, Any], expected: Mapping[str, Any], rate: float = 8.0) -> None:
        self.tally = Tally()
        self._url = url
        self._body = dict(body)
        self._expected = expected
        self._rate = rate
        self._stop = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> Any:
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=50)
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits) as http:
            task = asyncio.create_task(self._run(http))
            try:
                yield self.tally
            finally:
                self._stop.set()
                await task
                await asyncio.gather(*self._open)

    async def _run(self, http: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            task = asyncio.create_task(self._ask(http))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            await asyncio.sleep(1 / self._rate)

    async def _ask(self, http: httpx.AsyncClient) -> None:
        tally = self.tally
        tally.sent += 1
        started = time.monotonic()
        try:
            reply = await http.post("/v2/models/search/infer", json=self._body)
        except httpx.HTTPError as cause:
            tally.lost.append(f"{type(cause).__name__}: {cause}")
            return
        tally.latencies_ms.append((time.monotonic() - started) * 1000)
        if reply.status_code != 200:
            tally.lost.append(f"{reply.status_code}: {reply.text[:200]}")
            return
        tally.ok += 1
        label = reply.headers["x-raftmeta-version"]
        tally.versions[label] = tally.versions.get(label, 0) + 1
        if label != reply.json()["model_version"] or not is_answer_of(reply.json(), self._expected[label]):
            tally.wrong.append(label)


def embedding(answer: Mapping[str, Any]) -> Any:
    output = answer["outputs"][0]
    return np.array(output["data"]).reshape(output["shape"])


def is_answer_of(answer: Mapping[str, Any], expected: Any) -> bool:
    return bool(np.allclose(embedding(answer), expected, atol=1e-4))


def _toml(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
