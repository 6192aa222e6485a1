"""Where a run on a device stages to: memory that a keeper shares, on a GPU, or rehearsed with a tensor of the host; and made-up weights."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from node_agent.device.arena import Arena
from node_agent.device.keeper_client import KeeperClient
from node_agent.device.snapshot import Snapshots
from node_agent.device.streamed import StreamedDevice
from node_agent.layout import align
from node_agent.pour import Pace
from node_agent.refusal import Refusal
from node_agent.staging import Manner, Staged, StageOrder, stage
from raftmeta.core.manifest import weights_digest
from tests.support.shm import shm_directory
from tests.support.versions import MemoryBlobs, manifest_of
from tests.support.weights import Tensors

ROWS = COLUMNS = 1024  # of each weight, float32: 4 MiB
WIDE = 4 * ROWS * COLUMNS


def weights(tensors: int, seed: int, like: Tensors | None = None) -> Tensors:
    """Matrices that keep a chain of them finite; with `like`, every fourth one is replaced."""
    rng = np.random.default_rng(seed)

    def made() -> tuple[str, tuple[int, ...], bytes]:
        return "F32", (ROWS, COLUMNS), (rng.standard_normal((ROWS, COLUMNS), np.float32) / 32).tobytes()

    return {f"w{n:03}": made() if like is None or n % 4 == 0 else like[f"w{n:03}"] for n in range(tensors)}


@dataclass
class Place:
    device: StreamedDevice
    memory: torch.Tensor
    records: Arena
    active: int | None = None

    def stage(self, slot: int, tensors: Tensors, threads: int = 2) -> Staged:
        return self.prepared(slot, tensors, threads)()

    def prepared(self, slot: int, tensors: Tensors, threads: int = 2) -> Callable[[], Staged]:
        """What publishing and fetching do is done; what is left is staging."""
        manifest, blobs = manifest_of(tensors), MemoryBlobs(tensors)
        checksum = hashlib.sha256(manifest.vector_root.encode()).hexdigest()

        def staging() -> Staged:
            order = StageOrder("1.0.0", checksum, manifest, weights_digest(manifest), slot, self.active, 1, 1)
            staged = stage(self.device, Snapshots(self.records.path), order, blobs, how=Manner(Pace(threads)))
            self.active = slot
            return staged

        return staging

    def views(self, slot: int, staged: Staged) -> list[torch.Tensor]:
        """The slot's matrices, where they lie."""
        base = slot * self.device.slot_bytes
        places = staged.layout.placements
        return [self.memory[base + p.offset : base + p.end].view(torch.float32).view(p.shape) for p in places]


@contextmanager
def place(device_name: str, tensors: int) -> Iterator[Place]:
    """`cpu` rehearses over a tensor of the host; `cuda:N` has a keeper process, a mapping and pinned memory."""
    slot_bytes = align(tensors * WIDE)
    with shm_directory() as directory:
        records = Arena.create(directory / "arena", 1)
        try:
            if device_name == "cpu":
                from node_agent.device.torch_feed import TorchFeed

                memory = torch.zeros(2 * slot_bytes, dtype=torch.uint8)
                yield Place(StreamedDevice("cpu", records, slot_bytes, [TorchFeed(memory) for _ in range(3)]), memory, records)
                return
            from node_agent.device.cuda import opened
            from node_agent.device.driver import Driver

            with keeper(device_name) as client, opened(Driver(device_name), records, client, slot_bytes) as there:
                yield Place(there.device, there.memory, records)
        finally:
            records.close()


@contextmanager
def keeper(device_name: str) -> Iterator[KeeperClient]:
    """A keeper process, until the end of the block."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "k.sock"
        command = [sys.executable, "-m", "node_agent.device.keeper_main", "--socket", str(path), "--limit-bytes", str(1 << 36)]
        command += ["--parent", str(os.getpid())]  # also when this run is given up
        process = subprocess.Popen([*command, "--device", device_name])
        try:
            client, deadline = KeeperClient(path), time.monotonic() + 30
            while True:
                try:
                    client.list()
                except Refusal as refusal:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"the keeper of {device_name} does not answer: {refusal}") from refusal
                    time.sleep(0.05)
                else:
                    break
            yield client
        finally:
            process.kill()
            process.wait()
