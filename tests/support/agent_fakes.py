"""Stand-ins for what tending a deployment takes: workers, a provider of versions, the call that attests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node_agent.crew import Crew, WorkersLag
from node_agent.fetch import BlobsRotten, Cancelled
from node_agent.messages import Measured, Proved
from node_agent.peers import Peer
from node_agent.plan import Target
from node_agent.station import Station
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest
from tests.support.agent_memory import NodeMemory
from tests.support.small_version import Version


class FakeCrew(Crew):
    """Workers that do as they are told, unless a test says otherwise."""

    def __init__(self) -> None:
        super().__init__([], Peer(Path("/nonexistent"), lambda: None), 1.0)
        self.proved: list[str] = []
        self.drift: Exception | None = None
        self.slots: dict[int, Target] = {}
        self.loads: list[tuple[int, str]] = []
        self.released: list[int] = []
        self.cancelled: list[tuple[int, int]] = []  # slot, worker
        self.on_cancel: Callable[[], None] = lambda: None
        self.behind: Callable[[], bool] = lambda: False  # a worker computes and does not answer
        self.refuse: Exception | None = None
        self.block: asyncio.Event | None = None  # loading waits for it
        self.station: Station | None = None

    def loaded(self, deployment: str, slot: int, target: Target) -> bool:
        held = self.slots.get(slot)
        return held is not None and (held.label, held.checksum) == (target.label, target.checksum)

    async def prove(self, deployment: str, slot: int, target: Target) -> Proved:
        self.proved.append(target.label)
        if self.drift is not None:
            raise self.drift
        return Proved(0, {}, 12, 345, (Measured("p", "y", "cosine", 1.0, 0.999, True),))

    async def load(self, deployment: str, slot: int, target: Target) -> dict[str, str]:
        self.loads.append((slot, target.label))
        if self.block is not None:
            await self.block.wait()
        if self.refuse is not None:
            raise self.refuse
        self.slots[slot] = target
        return {"position_ids": "0" * 64}

    async def release(self, deployment: str, slot: int, limit_s: float = 1.0) -> None:
        self.released.append(slot)
        if slot < 0:
            self.slots.clear()
        self.slots.pop(slot, None)

    async def cancel(self, deployment: str, slot: int, worker: int) -> bool:
        self.cancelled.append((slot, worker))
        self.on_cancel()
        return True

    async def acknowledged(self, deployment: str, target: Target, timeout_s: float) -> None:
        assert self.station is not None and self.station.active is not None
        held = self.slots.get(self.station.active)
        if held != target or self.behind():
            raise WorkersLag(f"they answer with {held}")


class FakeProvider:
    def __init__(self, memory: NodeMemory, versions: dict[str, Version]) -> None:
        self._memory = memory
        self.versions = versions
        self.fetched: list[str] = []
        self.refuse: Exception | None = None
        self.rotten = False
        self.readied: list[str] = []
        self.not_ready: Exception | None = None
        self.block: asyncio.Event | None = None
        self.cancelled = 0

    async def fetch(self, target: Target, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
        self.fetched.append(target.label)
        if self.refuse is not None:
            raise self.refuse
        while self.block is not None and not self.block.is_set():
            if cancelled():
                self.cancelled += 1
                raise Cancelled
            await asyncio.sleep(0.005)
        before = self._memory.store.used_bytes()
        self._memory.fetch(self.versions[target.label])
        return self._memory.store.used_bytes() - before

    async def manifest(self, target: Target) -> Manifest:
        return self.versions[target.label].manifest

    async def ready_files(self, target: Target, cancelled: Callable[[], bool]) -> None:
        if self.not_ready is not None:
            raise self.not_ready
        self.readied.append(target.label)

    async def discard_rotten(self, target: Target) -> None:
        if self.rotten:
            self.rotten = False
            raise BlobsRotten("1 blobs")


class FakePlane:
    def __init__(self) -> None:
        self.attested: list[dict[str, Any]] = []
        self.refuse: RaftmetaError | None = None

    async def attest(self, node: str, attestation: dict[str, Any]) -> object:
        if self.refuse is not None:
            raise self.refuse
        self.attested.append(attestation)
        return {}
