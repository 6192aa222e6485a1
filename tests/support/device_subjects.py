"""Devices under the contract of the device port: shared memory, and the fake whose streams end late; with what one can stage on them."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consistency.vector import BLOCK_BYTES
from node_agent.device.arena import Arena
from node_agent.device.cpu import CpuDevice
from node_agent.device.port import Device
from node_agent.device.snapshot import Snapshots
from node_agent.device.streamed import Patience, StreamedDevice
from node_agent.pour import Pace
from node_agent.staging import Manner, Staged, StageOrder, stage
from raftmeta.core.manifest import weights_digest
from tests.support.fake_device import FakeDevice
from tests.support.versions import MemoryBlobs, manifest_of
from tests.support.weights import Tensors

CHUNK = 2 * BLOCK_BYTES
SLOT_BYTES = 16 * BLOCK_BYTES


def version(seed: int) -> Tensors:
    """Four tensors that differ between seeds in one each: pieces of several sizes, tails, one that ends inside a word."""

    def made(name: str, size: int, of: int) -> tuple[str, tuple[int, ...], bytes]:
        return "U8", (size,), hashlib.shake_128(f"{name} {of}".encode()).digest(size)

    sizes = {"a": 5 * BLOCK_BYTES + 3, "b": 10, "c": 2 * BLOCK_BYTES, "d": CHUNK + 8}
    return {name: made(name, size, seed if index == seed % 4 else 0) for index, (name, size) in enumerate(sizes.items())}


V1, V2, V3 = version(0), version(1), version(2)


@dataclass
class Subject:
    """A device, its slots' records, and a look at its bytes that no stream holds up."""

    device: Device
    records: Arena
    bytes_of: Callable[[int], bytes]
    spoil: Callable[[int, int], None]  # slot, offset: flip a bit behind the device's back
    fake: FakeDevice | None = None
    active: int | None = None
    blobs: MemoryBlobs = field(default_factory=lambda: MemoryBlobs(V1, V2, V3))

    def order(self, slot: int, tensors: Tensors) -> StageOrder:
        manifest = manifest_of(tensors)
        return StageOrder("1.0.0", "c" * 64, manifest, weights_digest(manifest), slot, self.active, 1, 5)

    def stage(self, slot: int, tensors: Tensors, threads: int = 1) -> Staged:
        snapshots = Snapshots(self.records.path)
        return stage(self.device, snapshots, self.order(slot, tensors), self.blobs, how=Manner(Pace(threads)))

    def held(self, slot: int) -> Mapping[str, bytes]:
        snapshot = Snapshots(self.records.path).load(slot, self.records.record(slot).snapshot_digest)
        assert snapshot is not None
        memory = self.bytes_of(slot)
        return {place.name: memory[place.offset : place.end] for place in snapshot.layout.placements}


def raw(tensors: Tensors) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in tensors.items()}


def memory_subject(directory: Path) -> Subject:
    arena = Arena.create(directory / "arena", SLOT_BYTES)

    def spoil(slot: int, offset: int) -> None:
        with arena.path.open("r+b") as file:
            file.seek(arena.path.stat().st_size - (2 - slot) * SLOT_BYTES + offset)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))

    return Subject(CpuDevice(arena, CHUNK), arena, lambda slot: bytes(arena.slot_view(slot)), spoil)


def fake_subject(directory: Path, seed: int = 0) -> Subject:
    return over_fake(Arena.create(directory / "arena", 1), FakeDevice(2 * SLOT_BYTES, seed))


def over_fake(records: Arena, fake: FakeDevice) -> Subject:
    """A process that begins to use a device, whatever an earlier one left there."""
    ticks = iter(range(500_000))  # whoever waits on past his time finds no more of it
    patience = Patience(10_000.0, lambda: float(next(ticks)), lambda seconds: None)
    device = StreamedDevice("a fake device", records, SLOT_BYTES, [fake.feed(CHUNK + 100) for _ in range(2)], patience)

    def spoil(slot: int, offset: int) -> None:
        fake.memory[slot * SLOT_BYTES + offset] ^= 1

    return Subject(device, records, lambda slot: bytes(fake.memory[slot * SLOT_BYTES :][:SLOT_BYTES]), spoil, fake)


def torch_subject(directory: Path, device_name: str) -> Subject:
    """Feeds of torch over a tensor, of the host or of a GPU."""
    import torch

    from node_agent.device.torch_feed import TorchFeed

    records = Arena.create(directory / "arena", 1)
    memory = torch.full((2 * SLOT_BYTES,), 0xA5, dtype=torch.uint8, device=device_name)
    _ended(memory)  # a feed's stream does not wait for this one's
    device = StreamedDevice(device_name, records, SLOT_BYTES, [TorchFeed(memory, CHUNK + 100) for _ in range(2)])

    def spoil(slot: int, offset: int) -> None:
        memory[slot * SLOT_BYTES + offset] ^= 1
        _ended(memory)

    return Subject(device, records, lambda slot: memory[slot * SLOT_BYTES :][:SLOT_BYTES].cpu().numpy().tobytes(), spoil)


def _ended(memory: Any) -> None:
    import torch

    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def subject_of(kind: str, directory: Path) -> Subject:
    """`memory`, `fake SEED`, `torch`, or `cuda`."""
    match kind.split():
        case ["memory"]:
            return memory_subject(directory)
        case ["fake", seed]:
            return fake_subject(directory, int(seed))
        case ["torch"]:
            return torch_subject(directory, "cpu")
        case _:
            return torch_subject(directory, "cuda:0")


def why_not(kind: str) -> str:
    """Why this machine has no such subject, "" if it has."""
    if kind not in ("torch", "cuda"):
        return ""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if kind == "torch" or torch.cuda.is_available() else "torch sees no CUDA device"
