"""A version of made-up weights for benchmarks: a safetensors file, its manifest, its blobs in a store, and an arena to stage it into."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from consistency.artifact import build_manifest
from node_agent import layout as layouts
from node_agent.device.arena import Arena
from node_agent.device.cpu import CpuDevice
from node_agent.device.snapshot import Snapshots
from node_agent.staging import ALONE, Manner, Staged, StageOrder, stage
from node_agent.store import Store
from raftmeta.core import manifest as manifests
from raftmeta.core.manifest import Manifest

Weights = Mapping[str, NDArray[np.uint16]]  # bf16 as its two bytes
QUOTA_BYTES = 64 << 30


def make(tensors: int, shape: tuple[int, int], seed: int = 1) -> dict[str, NDArray[np.uint16]]:
    """Random bf16 tensors named as the layers of a transformer are."""
    rng = np.random.default_rng(seed)
    return {f"model.layers.{n:03}.mlp.weight": rng.integers(0, 1 << 15, shape, np.uint16) for n in range(tensors)}


def change(weights: Weights, share: float, seed: int) -> dict[str, NDArray[np.uint16]]:
    """The same with the given share of tensors replaced."""
    rng = np.random.default_rng(seed)
    names = sorted(weights)
    chosen = set(rng.choice(names, round(len(names) * share), replace=False))
    return {name: rng.integers(0, 1 << 15, data.shape, np.uint16) if name in chosen else data for name, data in weights.items()}


def write(directory: Path, weights: Weights) -> Manifest:
    """The artifact on disk, and what was published of it."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    tensors = {name: torch.from_numpy(data.view(np.int16)).view(torch.bfloat16) for name, data in weights.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "bench", "architectures": ["Bench"]}')
    return build_manifest(directory, sources=[directory.as_uri() + "/"], engine="hf", unbound=[])


def fill(store: Store, weights: Weights) -> None:
    """Every tensor as a blob that was checked on entry."""
    for data in weights.values():
        sha256 = hashlib.sha256(data.data).hexdigest()
        if not store.has(sha256, data.nbytes):
            writer = store.writer(sha256, data.nbytes)
            writer.write(data.data.cast("B"))
            writer.commit()


class Bench:
    """One store and one arena."""

    def __init__(self, directory: Path, arena_dir: Path, slot_bytes: int) -> None:
        self.store = Store(directory / "store", QUOTA_BYTES)
        self.arena = Arena.create(arena_dir / "raftmeta-bench.arena", slot_bytes)
        self.device = CpuDevice(self.arena)
        self.snapshots = Snapshots(self.arena.path)

    def stage(self, manifest: Manifest, slot: int, active: int | None = None, how: Manner = ALONE) -> Staged:
        checksum = manifests.checksum(manifests.config_digest(manifest), manifests.weights_digest(manifest))
        order = StageOrder("1.0.0", checksum, manifest, hashlib.sha256(b"").hexdigest(), slot, active, 1, 1)
        return stage(self.device, self.snapshots, order, self.store, how=how)

    def forget(self, slot: int) -> None:
        """The next staging finds nothing to keep."""
        self.arena.mark_empty(slot)

    def drop_cache(self, manifest: Manifest) -> None:
        """The blobs leave the page cache."""
        for tensor in manifest.tensors:
            fd = os.open(self.store.path(tensor.sha256), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        self.arena.close()
        self.arena.path.unlink()


def filled(directory: Path, arena_dir: Path, size_mib: int, tensors: int) -> tuple[Bench, Manifest]:
    """A version of that size in so many tensors, published in `directory`, with all its blobs in the store."""
    weights = make(tensors, (size_mib * (1 << 20) // tensors // 2 // 4096, 4096))
    manifest = write(directory / "artifact", weights)
    bench = Bench(directory, arena_dir, slot_bytes(manifest))
    fill(bench.store, weights)
    return bench, manifest


def slot_bytes(manifest: Manifest) -> int:
    return layouts.plan(manifest.tensors).total_bytes


@contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """A directory on the disk and one in shared memory, for as long as a benchmark runs."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir="/dev/shm") as arena_dir:
        yield Path(directory), Path(arena_dir)
