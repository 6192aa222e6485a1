"""From a directory of weights to its manifest, reading every byte once. Publish side; an agent checks the same digests on its own.

Every file below the root is either in the manifest or reported as skipped with a reason. What could change the meaning of the published
bytes is refused: links that leave the root, special files, files that change while they are read, headers that fail the gate, tensors that
stand in two files, an index that contradicts its shards. The vector covers every tensor of the manifest, unbound ones included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

from consistency import vector
from consistency.artifact_files import Found, Listing, Skipped, list_files, open_inside, refuse, role_of, shown, verify_unchanged
from raftmeta import strict_json
from raftmeta.core import module_description, safetensors
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FORMAT, FileEntry, Manifest, TensorEntry, faults

_PIECE_BYTES = 4 << 20  # read at a time: large against a system call, small against the cache of both hashing threads
_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_NEEDED_FILES = {"hf": "config.json", "torch_module": module_description.FILE}  # engine -> a file without which it cannot bind

FindUnbound = Callable[[Path, Sequence[str]], Iterable[str]]  # root, tensor names -> those that no module takes


@dataclass(frozen=True)
class Progress:
    file: str
    done_bytes: int
    total_bytes: int


def _ignore(_: object) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """What the caller wants to hear and can find out. `find_unbound` is asked when the caller does not name the unbound tensors."""

    progress: Callable[[Progress], None] = _ignore
    skipped: Callable[[Skipped], None] = _ignore
    find_unbound: FindUnbound | None = None


def build_manifest(
    root: Path, *, sources: Sequence[str], engine: str, unbound: Sequence[str] | None, hooks: Hooks | None = None
) -> Manifest:
    """The manifest of the directory as it is now. Raises RaftmetaError bad_manifest, or bad_field when `unbound` is needed and unknown."""
    hooks = hooks or Hooks()
    if unbound is None and hooks.find_unbound is None:
        raise RaftmetaError(
            "bad_field", "the unbound tensors are not known and cannot be found out here: expected their names or an empty list"
        )
    listing = list_files(root)
    _check_needed(engine, root, [file.name for file in listing.files])
    for item in listing.skipped:
        hooks.skipped(item)
    with _Reader(listing, hooks.progress) as reader:
        for file in listing.files:
            reader.read(file)
    tensors = _merge(reader.tensors)
    for name, content in reader.indexes.items():
        _check_index(name, content, tensors)
    if engine == "torch_module":
        _check_description(listing.root, tensors, unbound or ())
    if unbound is None:
        assert hooks.find_unbound is not None
        unbound = tuple(hooks.find_unbound(listing.root, sorted(tensors)))
    _check_still_the_same(listing, root)
    return _assemble(reader.files, tensors, engine, (sources, unbound))


def _check_needed(engine: str, root: Path, names: Sequence[str]) -> None:
    """What the engine looks for at the top of the directory; one level too high is the usual mistake."""
    needed = _NEEDED_FILES.get(engine)
    if not needed or needed in names:
        return
    below = [PurePosixPath(name).parent for name in names if PurePosixPath(name).name == needed]
    found = f"it stands in {str(root / below[0])!r}: publish that directory" if below else f"found {shown(names)}"
    refuse(needed, f"is missing in {str(root)!r}; the engine {engine!r} cannot bind without it: {found}")


def _check_description(root: Path, tensors: dict[str, TensorEntry], unbound: Sequence[str]) -> None:
    """A node would refuse the version; this tells it while there is somebody who can mend it."""
    if unbound:
        refuse(module_description.FILE, f"asks for every tensor, and {unbound[0]!r} is declared unbound")
    with (root / module_description.FILE).open("rb") as file:
        data = file.read(module_description.MAX_BYTES + 1)
    try:
        described = module_description.read(strict_json.loads(data, module_description.MAX_BYTES, module_description.MAX_DEPTH))
    except RaftmetaError as cause:
        raise RaftmetaError("bad_manifest", cause.detail) from cause
    fault = module_description.tensor_fault(described.tensors, {name: (item.dtype, tuple(item.shape)) for name, item in tensors.items()})
    if fault:
        refuse(module_description.FILE, f"does not fit the tensors beside it: {fault}")


def _assemble(
    files: list[FileEntry], tensors: dict[str, TensorEntry], engine: str, declared: tuple[Sequence[str], Sequence[str]]
) -> Manifest:
    sources, unbound = declared
    manifest = Manifest(
        format=FORMAT,
        engine=engine,
        files=tuple(files),
        tensors=tuple(tensors[name] for name in sorted(tensors)),
        unbound=tuple(sorted(unbound)),
        vector_root=vector.root({name: tensor.entry for name, tensor in tensors.items()}),
        sources=tuple(sources),
    )
    found = faults(manifest)
    if found:
        raise RaftmetaError("bad_manifest", "; ".join(found))
    return manifest


def read_header(file: Found, stream: FileIO) -> tuple[bytes, safetensors.Header]:
    """The bytes before the tensors, and what they say. Raises RaftmetaError bad_manifest that names the file."""
    size = file.stamp.size_bytes
    head = _read_exactly(file, stream, min(safetensors.LENGTH_BYTES, size))
    try:
        head += _read_exactly(file, stream, safetensors.header_length(head, size))
        return head, safetensors.parse_header(head, size)
    except RaftmetaError as cause:
        raise RaftmetaError(cause.code, f"{file.name!r}: {cause.detail}", file=file.name, **cause.params) from cause


class _Reader:
    """Reads files in order and keeps what the manifest needs of them. One helper thread hashes files while this one hashes tensors."""

    def __init__(self, listing: Listing, progress: Callable[[Progress], None]) -> None:
        self.files: list[FileEntry] = []
        self.tensors: list[TensorEntry] = []
        self.indexes: dict[str, bytes] = {}
        self._root = listing.root
        self._total = listing.total_bytes
        self._done = 0
        self._progress = progress
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._helper = ThreadPoolExecutor(1, "hash-files")

    def __enter__(self) -> _Reader:
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
        tensors = _TensorHasher(file.name, header.tensors)
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

    def __init__(self, file: str, tensors: Sequence[safetensors.HeaderTensor]) -> None:
        self._file = file
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
            entry = self._vector.finish(tensor.dtype, tensor.shape).entry
            place = (self._file, tensor.begin, tensor.end)
            self._made.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, *place, self._sha.hexdigest(), entry))
            self._sha, self._vector = hashlib.sha256(), vector.BlockVector()


def _read_exactly(file: Found, stream: FileIO, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = stream.read(size - len(parts))
        if not part:
            refuse(file.name, f"changed while it was read: {size - len(parts)} bytes are missing at its beginning")
        parts += part
    return bytes(parts)


def _merge(tensors: Iterable[TensorEntry]) -> dict[str, TensorEntry]:
    merged: dict[str, TensorEntry] = {}
    for tensor in tensors:
        first = merged.setdefault(tensor.name, tensor)
        if first is not tensor:
            raise RaftmetaError(
                "bad_manifest",
                f"tensor {tensor.name!r} stands in {first.file!r} and in {tensor.file!r}; expected in one file",
                tensor=tensor.name,
            )
    return merged


def _check_index(index: str, content: bytes, tensors: dict[str, TensorEntry]) -> None:
    """The index of a sharded model must name exactly the tensors of its shards, each with the shard that holds it."""
    try:
        weight_map: Any = json.loads(content.decode())["weight_map"]
        folder = PurePosixPath(index).parent
        claimed = {name: (folder / shard).as_posix() for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise RaftmetaError("bad_manifest", f"{index!r} holds no readable weight_map: {cause!r}", file=index) from cause
    shards = set(claimed.values())
    actual = {name: tensor.file for name, tensor in tensors.items() if tensor.file in shards}
    for name in sorted(claimed.keys() | actual.keys()):
        if claimed.get(name) != actual.get(name):
            expected, found = claimed.get(name, "no file"), actual.get(name, "no file")
            raise RaftmetaError(
                "bad_manifest",
                f"{index!r} places tensor {name[:80]!r} in {expected!r}, the shards hold it in {found!r}",
                tensor=name[:80],
                expected=expected,
                found=found,
            )


def _check_still_the_same(listing: Listing, root: Path) -> None:
    """Nothing was added, removed, replaced or written since the listing."""
    again = list_files(root)
    before, after = set(listing.files), set(again.files)
    for file in sorted(before ^ after, key=lambda file: file.name):
        refuse(file.name, "was added, removed or written while the directory was read")
