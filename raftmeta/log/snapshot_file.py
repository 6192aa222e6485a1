"""The bytes of a snapshot file, and reading them without trust.

Image, little-endian: magic, format u32, digest of the cluster's id, index u64, term u64, length of the configuration u32, configuration,
SHA-256 of all that; then chunks of length u32, SHA-256, data; then a length of 0, the number of chunks u64, the sum of their lengths u64.
Behind the image: magic, image size u64, SHA-256 of the image. Members send each other the image, by offset, and know it by size and
SHA-256; so a byte that changed anywhere in the file, or a file that ends early or late, is found. The data of the chunks is the state
codec's and is not looked at.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, File
from raftmeta.log.faults import SnapshotCorrupt, WrongCluster

MAX_CHUNK_BYTES = 16 << 20
MAX_CONFIG_BYTES = 1 << 20
SYNC_BYTES = 4 << 20  # written between two syncs: a whole file at once would keep the journal's syncs waiting behind it

_MAGIC = b"rmsnap01"
_END_MAGIC = b"rmsnapOK"
_FORMAT = 2
_HEAD = struct.Struct("<8sI16sQQI")
_CHUNK = struct.Struct("<I32s")
_END = struct.Struct("<IQQ")
_TRAILER = struct.Struct("<8sQ32s")
_DIGEST_BYTES = 32

T = TypeVar("T")


class Head(msgspec.Struct, frozen=True):
    """What stands before the chunks."""

    cluster: bytes  # 16 bytes, see records.py
    index: int
    term: int
    config: bytes


class SnapshotMeta(msgspec.Struct, frozen=True):
    """A durable, verified snapshot of everything up to (index, term)."""

    index: int
    term: int
    config: bytes  # the members at `index`, opaque here
    size_bytes: int  # of the image
    sha256: bytes  # of the image


def write_image(disk: Disk, file: File, head: Head, chunks: Iterable[bytes], pause: Callable[[], None] | None) -> SnapshotMeta:
    """Write image and trailer; the last of it is not synced."""
    cluster, index, term, config = msgspec.structs.astuple(head)
    if len(config) > MAX_CONFIG_BYTES:
        raise ValueError(f"a configuration of {len(config)} bytes, the limit is {MAX_CONFIG_BYTES}")
    start = _HEAD.pack(_MAGIC, _FORMAT, cluster, index, term, len(config)) + config
    whole = hashlib.sha256()
    offset = _put(disk, file, start + hashlib.sha256(start).digest(), 0, whole)
    count = total = synced = 0
    for chunk in chunks:
        if not 0 < len(chunk) <= MAX_CHUNK_BYTES:
            raise ValueError(f"a snapshot chunk of {len(chunk)} bytes, the limit is {MAX_CHUNK_BYTES}")
        frame = _CHUNK.pack(len(chunk), hashlib.sha256(chunk).digest()) + chunk
        offset = _put(disk, file, frame, offset, whole)
        count, total = count + 1, total + len(chunk)
        if offset - synced >= SYNC_BYTES:
            disk.fdatasync(file)
            synced = offset
        if pause is not None:
            pause()
    offset = _put(disk, file, _END.pack(0, count, total), offset, whole)
    meta = SnapshotMeta(index, term, config, offset, whole.digest())
    write_trailer(disk, file, meta)
    return meta


def write_trailer(disk: Disk, file: File, meta: SnapshotMeta) -> None:
    disk.pwrite(file, _TRAILER.pack(_END_MAGIC, meta.size_bytes, meta.sha256), meta.size_bytes)


def verify(disk: Disk, path: Path, cluster: bytes) -> SnapshotMeta:
    """Read the whole file and check every digest. Raises SnapshotCorrupt, WrongCluster."""
    return read(disk, path, cluster, lambda chunks: None)[0]


def read(disk: Disk, path: Path, cluster: bytes, build: Callable[[Iterator[bytes]], T]) -> tuple[SnapshotMeta, T]:
    """Check every digest, and what `build` made of the data of the chunks on the way, which need not take them all.

    Raises SnapshotCorrupt, and WrongCluster for a sound head of another cluster's; what `build` raises only for a file that is whole.
    """
    file = disk.open(path)
    try:
        reader = _Reader(disk, file, path)
        head = reader.head()
        if head.cluster != cluster:
            raise WrongCluster(path, cluster.hex(), head.cluster.hex())
        chunks = reader.chunks()
        refused: RaftmetaError | None = None
        try:
            built = build(chunks)
        except SnapshotCorrupt:
            raise
        except RaftmetaError as fault:
            refused = fault
        for _ in chunks:
            pass
        digest, size = reader.whole.digest(), reader.offset
        found = disk.pread(file, _TRAILER.size + 1, size)
        if found != _TRAILER.pack(_END_MAGIC, size, digest):
            raise SnapshotCorrupt(path, f"a trailer for {size} bytes with SHA-256 {digest.hex()}", found.hex() or "the end of the file")
        if refused is not None:
            raise refused
        return SnapshotMeta(head.index, head.term, head.config, size, digest), built
    finally:
        disk.close(file)


class _Reader:
    """Walks an image from its start; `whole` digests what was read so far."""

    def __init__(self, disk: Disk, file: File, path: Path) -> None:
        self._disk, self._file, self._path = disk, file, path
        self.offset = 0
        self.whole = hashlib.sha256()

    def head(self) -> Head:
        start = self._take(_HEAD.size, "a header")
        magic, number, cluster, index, term, length = _HEAD.unpack(start)
        if magic != _MAGIC or number != _FORMAT or length > MAX_CONFIG_BYTES:
            raise SnapshotCorrupt(self._path, f"magic {_MAGIC!r} format {_FORMAT}", f"{magic!r} format {number}")
        config = self._take(length, "the configuration")
        self._check(start + config, self._take(_DIGEST_BYTES, "the digest of the header"), "the header")
        return Head(cluster, index, term, config)

    def chunks(self) -> Iterator[bytes]:
        count = total = 0
        while True:
            start = self._take(4, f"chunk {count}")
            length = int.from_bytes(start, "little")
            if length == 0:
                break
            if length > MAX_CHUNK_BYTES:
                raise SnapshotCorrupt(self._path, f"chunk {count} of at most {MAX_CHUNK_BYTES} bytes", f"{length} bytes")
            digest = self._take(_DIGEST_BYTES, f"the digest of chunk {count}")
            data = self._take(length, f"chunk {count}")
            self._check(data, digest, f"chunk {count}")
            count, total = count + 1, total + length
            yield data
        end = self._take(_END.size - 4, "the end of the chunks")
        if start + end != _END.pack(0, count, total):
            raise SnapshotCorrupt(self._path, f"{count} chunks of {total} bytes together", f"an end that says {end.hex()}")

    def _take(self, size: int, what: str) -> bytes:
        data = self._disk.pread(self._file, size, self.offset)
        if len(data) != size:
            raise SnapshotCorrupt(self._path, f"{what} of {size} bytes at offset {self.offset}", f"{len(data)} bytes")
        self.offset += size
        self.whole.update(data)
        return data

    def _check(self, data: bytes, digest: bytes, what: str) -> None:
        actual = hashlib.sha256(data).digest()
        if actual != digest:
            raise SnapshotCorrupt(self._path, f"{what} with SHA-256 {digest.hex()}", f"{actual.hex()} before offset {self.offset}")


def _put(disk: Disk, file: File, data: bytes, offset: int, whole: hashlib._Hash) -> int:
    disk.pwrite(file, data, offset)
    whole.update(data)
    return offset + len(data)
