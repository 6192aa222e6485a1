"""Reads the files of a listing once, each piece for all digests together: SHA-256 of the file, SHA-256 and vector of every tensor in it.

A weights file passes the gate for its header before a tensor is read; a file that changes while it is read is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO

from consistency import vector
from consistency.artifact_files import Found, Listing, open_inside, refuse, role_of, verify_unchanged
from raftmeta.core import safetensors
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FileEntry, TensorEntry

_PIECE_BYTES = 4 << 20  # read at a time: large against a system call, small against the cache of both hashing threads
_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class Progress:
    file: str
    done_bytes: int
    total_bytes: int


def read_header(file: Found, stream: FileIO) -> tuple[bytes, safetensors.Header]:
    """The bytes before the tensors, and what they say. Raises RaftmetaError bad_manifest that names the file."""
    size = file.stamp.size_bytes
    head = _read_exactly(file, stream, min(safetensors.LENGTH_BYTES, size))
    try:
        head += _read_exactly(file, stream, safetensors.header_length(head, size))
        return head, safetensors.parse_header(head, size)
    except RaftmetaError as cause:
        raise RaftmetaError(cause.code, f"{file.name!r}: {cause.detail}", file=file.name, **cause.params) from cause


class Reader:
    """Reads files in order and keeps what the manifest needs of them. One helper thread hashes files while this one hashes tensors."""

    def __init__(self, listing: Listing, progress: Callable[[Progress], None]) -> None:
        self.files: list[FileEntry] = []
        self.tensors: list[TensorEntry] = []
        self.checks: dict[str, vector.Words] = {}
        self.indexes: dict[str, bytes] = {}
        self._root = listing.root
        self._total = listing.total_bytes
        self._done = 0
        self._progress = progress
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._helper = ThreadPoolExecutor(1, "hash-files")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.shutdown()

    def read(self, file: Found) -> None:
        role = role_of(file.name)
        with open_inside(self._root, file) as stream:
            if role == "weights":
                digest = self._read_weights(file, stream)
            else:
                digest = self._read_plain(file, stream)
        verify_unchanged(file)
        self.files.append(FileEntry(file.name, file.stamp.size_bytes, digest, role))

    def _read_plain(self, file: Found, stream: FileIO) -> str:
        sha = hashlib.sha256()
        kept = bytearray()
        keep = file.name.endswith(_INDEX_SUFFIX)
        if keep and file.stamp.size_bytes > _MAX_INDEX_BYTES:
            refuse(file.name, f"has {file.stamp.size_bytes} bytes, an index has at most {_MAX_INDEX_BYTES}")
        left = file.stamp.size_bytes
        while left:
            piece = self._next(file, stream, left)
            sha.update(piece)
            if keep:
                kept += piece
            left -= len(piece)
        if keep:
            self.indexes[file.name] = bytes(kept)
        return sha.hexdigest()

    def _read_weights(self, file: Found, stream: FileIO) -> str:
        size = file.stamp.size_bytes
        head, header = read_header(file, stream)
        sha = hashlib.sha256(head)
        self._advance(file, len(head))
        tensors = _TensorHasher(file.name, header.tensors, self.checks)
        left = size - len(head)
        while left:
            piece = self._next(file, stream, left)
            hashing = self._helper.submit(sha.update, piece)
            try:
                tensors.feed(piece)
            finally:
                hashing.result()  # the buffer is reused
            left -= len(piece)
        self.tensors += tensors.finish()
        return sha.hexdigest()

    def _next(self, file: Found, stream: FileIO, left: int) -> memoryview:
        """The next piece, valid until the next call."""
        count = stream.readinto(self._piece[: min(left, _PIECE_BYTES)])
        if not count:
            refuse(file.name, f"changed while it was read: {left} bytes are missing at its end")
        self._advance(file, count)
        return self._piece[:count]

    def _advance(self, file: Found, count: int) -> None:
        self._done += count
        self._progress(Progress(file.name, self._done, self._total))


class _TensorHasher:
    """SHA-256 and vector of tensors that follow each other without a gap, from pieces of any size."""

    def __init__(self, file: str, tensors: Sequence[safetensors.HeaderTensor], checks: dict[str, vector.Words]) -> None:
        """`checks` is given the block checks of each tensor."""
        self._file = file
        self._checks = checks
        self._waiting = list(reversed(tensors))
        self._made: list[TensorEntry] = []
        self._sha = hashlib.sha256()
        self._vector = vector.BlockVector()

    def feed(self, piece: memoryview) -> None:
        while piece:
            tensor = self._waiting[-1]
            part = piece[: tensor.end - tensor.begin - self._vector.size_bytes]
            self._sha.update(part)
            self._vector.update(part)
            piece = piece[len(part) :]
            self._close_complete()

    def finish(self) -> list[TensorEntry]:
        self._close_complete()
        assert not self._waiting, "the gate let a file pass whose tensors do not cover it"
        return self._made

    def _close_complete(self) -> None:
        """Closes the tensor that has all its bytes, and empty ones after it."""
        while self._waiting and self._vector.size_bytes == self._waiting[-1].end - self._waiting[-1].begin:
            tensor = self._waiting.pop()
            found = self._vector.finish(tensor.dtype, tensor.shape)
            place = (self._file, tensor.begin, tensor.end)
            self._made.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, *place, self._sha.hexdigest(), found.entry))
            self._checks[tensor.name] = found.blocks
            self._sha, self._vector = hashlib.sha256(), vector.BlockVector()


def _read_exactly(file: Found, stream: FileIO, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = stream.read(size - len(parts))
        if not part:
            refuse(file.name, f"changed while it was read: {size - len(parts)} bytes are missing at its beginning")
        parts += part
    return bytes(parts)
