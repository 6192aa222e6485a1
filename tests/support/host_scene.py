"""A worker's host over real arenas, with versions whose modules answer with their first byte."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from node_agent.host import Host
from node_agent.loading import Loader
from node_agent.messages import (
    Fault,
    Infer,
    Inferred,
    Load,
    Tensor,
)
from node_agent.plan import Order
from node_agent.serving import Staging
from node_agent.station import Station
from tests.support.agent_memory import NodeMemory
from tests.support.first_byte import FakeEngine
from tests.support.small_version import Version, make_version


class Scene:
    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.memory = NodeMemory(root / "store", arena_dir)
        self.versions = {n: make_version(root / f"v{n}", f"{n}.0.0", {"a": str(n).encode() * 100, "b": b"b" * 50}) for n in (1, 2, 3)}
        for version in self.versions.values():
            self.memory.fetch(version)
        self.station: Station = self.memory.station()
        self.station.make_room(self.versions[1].manifest)
        FakeEngine.made.clear()
        self.host = self.fresh_host()

    def fresh_host(self, worker: int = 0) -> Host:
        return Host(worker, (self.memory.root, self.memory.arena_dir), Loader(self.memory.store, {"fake": FakeEngine}))

    def stage(self, number: int, slot: int) -> Version:
        version = self.versions[number]
        self.station.stage(Staging(version.target, version.manifest, slot, Order(1, number), "", 0))
        return version

    def load(self, number: int, slot: int) -> object:
        target = self.versions[number].target
        return self.host.load(Load(1, "search", slot, target.label, target.checksum))

    def switch(self, number: int, slot: int) -> None:
        self.station.note_warm(slot, "", {})
        self.station.switch(self.versions[number].target, slot)

    def close(self) -> None:
        FakeEngine.made.clear()
        self.host.close()
        self.station.close()

    def infer(self, version: str = "", name: str = "x") -> object:
        return self.host.infer(Infer(1, "search", version, (Tensor(name, "INT64", (1,), bytes(8)),), ()))


def answer(reply: object) -> tuple[str, bytes]:
    assert isinstance(reply, Inferred), reply
    data = reply.outputs[0].data
    assert isinstance(data, bytes)
    return reply.version, data


def code(reply: object) -> str:
    assert isinstance(reply, Fault), reply
    return reply.code
