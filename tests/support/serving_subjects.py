"""The two kinds of engine that the contract of the serving port is held against, each with what a test needs to see and to disturb.

Versions 1 and 2 answer as their probes say, 3 does not, 4 is larger than what is left beside one that serves. Needs torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from node_agent.crew import Crew
from node_agent.host import Host
from node_agent.in_process import InProcess
from node_agent.ipc import CallFailed
from node_agent.loading import Loader
from node_agent.messages import Acknowledge, Fault, Infer, Inferred, Load, Numbered, Prove, Release, Reply, Served, Tensor
from node_agent.plan import Order
from node_agent.prober import ProbePlaces, Prober
from node_agent.serving import Staging
from node_agent.station import Station
from node_agent.store import BlobFile, Store
from node_agent.taking import Serving
from raftmeta.core.probes import Probe, ProbeTensor
from tests.support.agent_memory import NodeMemory
from tests.support.first_byte import FakeEngine
from tests.support.owned_serving import OwnedServing
from tests.support.owning_server import OwningServer
from tests.support.small_version import Version, make_version

MEMORY_BYTES = 300_000
_INPUT = ProbeTensor("x", "INT64", (1,), bytes(8))


def make_versions(root: Path) -> dict[int, Version]:
    made = {}
    for number, answer in ((1, b"1"), (2, b"2"), (3, b"9"), (4, b"4")):
        probes = (Probe("first-byte", "close", (_INPUT,), (ProbeTensor("y", "UINT8", (1,), answer),)),)
        tensors = {"a": str(number).encode() * 100, "big": b"x" * (900_000 if number == 4 else 70_000)}
        made[number] = make_version(root / f"v{number}", f"{number}.0.0", tensors, probes=probes)
    return made


class Subject(Protocol):
    """One engine under test. `serving` is the port as the control process of this moment has it."""

    versions: dict[int, Version]
    memory: NodeMemory
    serving: Serving

    def take_over(self) -> None:
        """Control was killed: its successor makes the port anew over what goes on serving."""

    def answer(self, pinned: str = "") -> str:
        """What a request gets: the label and the answer, "" for none."""

    def hold(self) -> Callable[[], str]:
        """A request begins in the slot that serves. Call what this gives to let it end; that gives the label of its answer."""

    def slow_down(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """From now on staging does not end before what this gives was awaited."""

    def rot(self, slot: int) -> None:
        """A byte in memory is no longer what it was."""

    def close(self) -> None: ...


def work(subject: Subject, number: int, slot: int, change: str = "", revision: int = 1) -> Staging:
    version = subject.versions[number]
    return Staging(version.target, version.manifest, slot, Order(1, revision), change, 0)


def run(steps: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(steps(), 60))


async def bring_up(subject: Subject, number: int, slot: int) -> None:
    """Staged, tried and warm, but not switched to."""
    target = subject.versions[number].target
    await subject.serving.drain(slot, 5.0)
    await subject.serving.stage(work(subject, number, slot))
    await subject.serving.probe(target, slot)
    await subject.serving.warm(target, slot, "")


async def serve(subject: Subject, number: int, slot: int) -> None:
    await bring_up(subject, number, slot)
    await subject.serving.switch(subject.versions[number].target, slot)
    await subject.serving.answering(subject.versions[number].target, 5.0)


class SlowStore(Store):
    """Blobs are opened once the gate is."""

    gate: threading.Event | None = None

    def open(self, sha256: str, size_bytes: int) -> BlobFile:
        if self.gate is not None:
            assert self.gate.wait(30)
        return super().open(sha256, size_bytes)


class LocalPeer:
    """A worker or prober of the crew in this process: one computing thread, and one that loads beside it."""

    connected = True

    def __init__(self, host: Host | None, prober: Prober | None = None) -> None:
        self._host = host
        self._prober = prober
        self.compute = ThreadPoolExecutor(1)
        self._loading = ThreadPoolExecutor(1)

    @property
    def served(self) -> tuple[Served, ...]:
        return () if self._host is None else self._host.served()

    async def call(self, make: Callable[[int], Numbered], timeout_s: float) -> Reply:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            match make(1):
                case Load() as call if self._host is not None:
                    reply = await loop.run_in_executor(self._loading, self._host.load, call)
                case Prove() as call if self._prober is not None:
                    reply = await loop.run_in_executor(self._loading, self._prober.prove, call)
                case Release() as call if self._host is not None:
                    reply = await loop.run_in_executor(self.compute, self._host.release, call)
                case Acknowledge() as call if self._host is not None:
                    reply = await loop.run_in_executor(self.compute, self._host.acknowledge, call)
                case call:
                    raise AssertionError(call)
        if isinstance(reply, Fault):
            raise CallFailed(reply)
        return reply

    def close(self) -> None:
        self.compute.shutdown()
        self._loading.shutdown()


class InProcessSubject:
    """Slots in shared memory, one worker and a prober, all in this process."""

    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.versions = make_versions(root)
        self.memory = NodeMemory(root / "store", arena_dir)
        self.store = SlowStore(self.memory.root, 1 << 30)
        self.memory.places = dataclasses.replace(self.memory.places, store=self.store, slot_bytes=100_000)
        for version in self.versions.values():
            self.memory.fetch(version)
        self.station: Station = self.memory.station()
        FakeEngine.made.clear()
        loader = Loader(self.memory.store, {"fake": FakeEngine})
        self.host = Host(0, (self.memory.root, arena_dir), loader)
        self.worker = LocalPeer(self.host)
        self.prober = LocalPeer(None, Prober(ProbePlaces(self.memory.root, arena_dir, 5.0, "kernel 1", 1), loader))
        self.serving: Serving = self._serving()

    def _serving(self) -> InProcess:
        return InProcess(self.station, Crew([self.worker], self.prober, 10.0), "kernel 1")  # type: ignore[arg-type, list-item]

    def take_over(self) -> None:
        self.serving.close()
        self.station = self.memory.station()
        self.serving = self._serving()

    def answer(self, pinned: str = "") -> str:
        return _text(self.worker.compute.submit(self._infer, pinned).result(10))

    def hold(self, pinned: str = "") -> Callable[[], str]:
        began, go_on = threading.Event(), threading.Event()

        def during() -> None:
            began.set()
            assert go_on.wait(30)

        for instance in FakeEngine.made:
            instance.during = during
        reply = self.worker.compute.submit(self._infer, pinned)
        assert began.wait(10)
        for instance in FakeEngine.made:
            instance.during = lambda: None

        def let_go() -> str:
            go_on.set()
            return _text(reply.result(10))

        return let_go

    def slow_down(self) -> Callable[[], Coroutine[Any, Any, None]]:
        gate = self.store.gate = threading.Event()

        async def go_on() -> None:
            gate.set()
            await asyncio.to_thread(self._settled)

        return go_on

    def rot(self, slot: int) -> None:
        assert self.station._arena is not None
        self.station._arena._slot(slot)[5] ^= 1

    def close(self) -> None:
        self.worker.compute.submit(self.host.close).result(10)
        self.worker.close()
        self.prober.close()
        FakeEngine.made.clear()
        self.serving.close()

    def _settled(self) -> None:
        with self.station._turn_to_write():
            pass

    def _infer(self, pinned: str) -> Reply:
        return self.host.infer(Infer(1, "search", pinned, (Tensor("x", "INT64", (1,), bytes(8)),), ()))


class OwningSubject:
    """A server that owns its memory, behind an adapter."""

    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.versions = make_versions(root)
        self.memory = NodeMemory(root / "store", arena_dir)
        for version in self.versions.values():
            self.memory.fetch(version)
        self.server = OwningServer(MEMORY_BYTES)
        self.serving: Serving = OwnedServing(self.server, self.memory.store)

    def take_over(self) -> None:
        self.serving = OwnedServing(self.server, self.memory.store)

    def answer(self, pinned: str = "") -> str:
        names = [name for name, held in self.server.held.items() if held.label == pinned and held.ready]
        if pinned and not names:
            return ""
        label, data = self.server.infer(names[-1] if pinned else "") if pinned or self.server.active else ("", b"")
        return f"{label} {data.decode()}".strip()

    def hold(self) -> Callable[[], str]:
        stream = self.server.open_stream()
        return lambda: self._finish(stream)

    def _finish(self, stream: int) -> str:
        label = self.server.finish_stream(stream)
        return f"{label} {label[0]}" if label else ""

    def slow_down(self) -> Callable[[], Coroutine[Any, Any, None]]:
        gate = self.server.gate = asyncio.Event()

        async def go_on() -> None:
            gate.set()
            await self.server.settled()

        return go_on

    def rot(self, slot: int) -> None:
        name = next(name for name in self.server.held if name.startswith(f"{slot}/"))
        self.server.rot(name)

    def close(self) -> None: ...


def _text(reply: Reply) -> str:
    if not isinstance(reply, Inferred):
        return ""
    data = reply.outputs[0].data
    assert isinstance(data, bytes)
    return f"{reply.version} {data.decode()}"
