"""Versions made of a few small tensors, and a store in memory that can lose, damage and interrupt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from consistency.vector import root, tensor_entry
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FORMAT, FileEntry, Manifest, TensorEntry
from tests.support.weights import Tensors


def manifest_of(tensors: Tensors, unbound: tuple[str, ...] = ()) -> Manifest:
    """The manifest of a version whose weights file holds these tensors one after another."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, (dtype, shape, data) in sorted(tensors.items()):
        sha256 = hashlib.sha256(data).hexdigest()
        entry = tensor_entry(data, dtype, shape).entry
        entries.append(TensorEntry(name, dtype, shape, "model.safetensors", offset, offset + len(data), sha256, entry))
        offset += len(data)
    return Manifest(
        format=FORMAT,
        engine="hf",
        files=(FileEntry("model.safetensors", offset, "0" * 64, "weights"),),
        tensors=tuple(entries),
        unbound=unbound,
        vector_root=root({tensor.name: tensor.entry for tensor in entries}),
        sources=(),
    )


class MemoryBlobs:
    """The store as staging sees it: blobs by SHA-256, and what was read from it."""

    def __init__(self, *versions: Tensors) -> None:
        self.blobs: dict[str, bytes] = {}
        self.reads: list[str] = []
        self.opened = 0  # and not closed yet
        self.interrupt_at: int | None = None  # the n-th read ends as if the process had been killed
        for tensors in versions:
            self.add(tensors)

    def add(self, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        for _, _, data in tensors.values():
            self.blobs[hashlib.sha256(data).hexdigest()] = data

    def open(self, sha256: str, size_bytes: int) -> MemoryBlob:
        data = self.blobs.get(sha256)
        if data is None or len(data) != size_bytes:
            raise RaftmetaError("not_found", f"blob {sha256} of {size_bytes} bytes")
        return MemoryBlob(self, sha256, data)


class MemoryBlob:
    def __init__(self, blobs: MemoryBlobs, sha256: str, data: bytes) -> None:
        self._blobs, self._sha256, self._data = blobs, sha256, data
        blobs.opened += 1

    def read_into(self, offset: int, into: memoryview) -> None:
        if len(self._blobs.reads) == self._blobs.interrupt_at:
            into[: len(into) // 2] = b"\xee" * (len(into) // 2)
            raise KeyboardInterrupt
        self._blobs.reads.append(self._sha256)
        into[:] = self._data[offset : offset + len(into)]

    def close(self) -> None:
        self._blobs.opened -= 1
