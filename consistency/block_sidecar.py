"""The block checks of a version in a file beside its weights: made by `publish`, judged by every node, read when a block has to be named.

docs/wcv.md states the format: 16 bytes per 64 KiB of weights, every tensor in the manifest's order. The file follows from the weights
alone: the same weights have the same file. Nothing of it is believed unread: a tensor's checks are those that hash to its entry in the
manifest, and they are compared with it each time they are read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from consistency import vector
from consistency.vector import Words
from raftmeta.core import block_file
from raftmeta.core.block_file import CHECK_BYTES, HEAD_BYTES, MAGIC
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FileEntry, Manifest, TensorEntry


def pack(checks: Mapping[str, Words]) -> bytes:
    """The file's bytes from the block checks [blocks, 2] of every tensor, by name."""
    return b"".join((MAGIC, len(checks).to_bytes(8, "little"), *(vector.pack_blocks(checks[name]) for name in sorted(checks))))


def entry_of(content: bytes) -> FileEntry:
    """How a manifest names a file with this content."""
    sha256 = hashlib.sha256(content).hexdigest()
    return FileEntry(block_file.name_of(sha256), len(content), sha256, block_file.ROLE)


def naming(manifest: Manifest, content: bytes) -> Manifest:
    """The manifest with the file of this content among its files; its checksum is what it was."""
    files = sorted((*manifest.files, entry_of(content)), key=lambda file: file.name)
    return msgspec.structs.replace(manifest, files=tuple(files))


def judge(path: Path, manifest: Manifest) -> None:
    """Raises RaftmetaError integrity, with the tensor's name, unless the file holds the block checks of all of the manifest's entries."""
    with BlockChecks(path, manifest) as checks:
        for name in checks:
            checks[name]


class BlockChecks(Mapping[str, Words]):
    """Tensor name -> its block checks [blocks, 2], read and compared with the manifest's entry when asked for.

    Raises RaftmetaError integrity for a file that is not this manifest's, internal when it cannot be read. Any number of threads may ask;
    close it, or use it as a context manager.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._places = dict(_places(manifest))
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as cause:
            raise RaftmetaError("internal", f"block checks cannot be opened: {cause}") from cause
        try:
            self._check_head(manifest)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BlockChecks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Does nothing the second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __getitem__(self, name: str) -> Words:
        offset, tensor = self._places[name]
        data = self._read(offset, CHECK_BYTES * block_file.blocks_of(tensor.size_bytes))
        blocks = vector.unpack_blocks(data)
        found = vector.entry_of(tensor.dtype, tensor.shape, tensor.size_bytes, blocks)
        if found != tensor.entry:
            detail = f"block checks of tensor {name!r} in {self._path}: expected those of entry {tensor.entry}, found those of {found}"
            raise RaftmetaError("integrity", detail, tensor=name, expected=tensor.entry, found=found)
        return blocks

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _check_head(self, manifest: Manifest) -> None:
        need = block_file.size_of(tensor.size_bytes for tensor in manifest.tensors)
        size = os.fstat(self._fd).st_size
        expected = MAGIC + len(manifest.tensors).to_bytes(8, "little")
        if size != need or self._read(0, HEAD_BYTES) != expected:
            what = f"{need} bytes for {len(manifest.tensors)} tensors"
            raise RaftmetaError("integrity", f"{self._path}: expected block checks of {what}, found another file of {size} bytes")

    def _read(self, offset: int, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = os.pread(self._fd, size - len(parts), offset + len(parts))
            except OSError as cause:
                raise RaftmetaError("internal", f"{self._path}: {cause}") from cause
            if not part:
                raise RaftmetaError("integrity", f"{self._path} ended at byte {offset + len(parts)}")
            parts += part
        return bytes(parts)


def read(path: Path, manifest: Manifest) -> BlockChecks:
    """The file of this manifest, open for reading. Raises RaftmetaError integrity or internal."""
    return BlockChecks(path, manifest)


def _places(manifest: Manifest) -> Iterator[tuple[str, tuple[int, TensorEntry]]]:
    """Where the checks of each tensor begin."""
    offset = HEAD_BYTES
    for tensor in manifest.tensors:
        yield tensor.name, (offset, tensor)
        offset += CHECK_BYTES * block_file.blocks_of(tensor.size_bytes)
