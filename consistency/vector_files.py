"""The vectors of tensors in weights files: read once, piece by piece, through the gate that a publish has.

Nothing but the vector is computed, so this runs at the speed of the disk or of memory. A file that changes meanwhile, a tensor that stands
in two files, and whatever the gate refuses end it; there is no partial answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from io import FileIO
from pathlib import Path
from typing import Final

from consistency.artifact import merge
from consistency.artifact_files import WEIGHTS_SUFFIX, Found, Listing, list_file, list_files, open_inside, refuse, verify_unchanged
from consistency.artifact_reader import read_header
from consistency.vector import Backend, BlockVector, Words
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.safetensors import HeaderTensor

PIECE_BYTES: Final = 8 << 20  # read at a time, whole blocks: in the cache when the vector comes, large against a system call


@dataclass(frozen=True)
class TensorChecks:
    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    entry: str
    blocks: Words  # [blocks, 2]


def weights_of(target: Path) -> Listing:
    """The weights of a directory as `publish` takes it, or the one file. Raises RaftmetaError bad_field or bad_manifest."""
    if not target.is_dir():
        return list_file(target)
    listing = list_files(target)
    return Listing(listing.root, tuple(file for file in listing.files if file.name.endswith(WEIGHTS_SUFFIX)), listing.skipped)


def read(listing: Listing, using: Backend, told: Callable[[int], None], only: str | None = None) -> list[TensorChecks]:
    """Every tensor by name, or the one that is called `only`; `told` hears the bytes of each piece.

    Raises RaftmetaError: bad_manifest for files that may not be published, not_found for a tensor that is in none.
    """
    how = _Reading(memoryview(bytearray(PIECE_BYTES)), told, only, [])
    found = [tensor for file in listing.files for tensor in _read_file(listing.root, file, using, how)]
    if only is not None and not found:
        near = get_close_matches(only, how.seen, 1)
        raise RaftmetaError("not_found", f"no tensor is called {only[:80]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    tensors = merge(found)
    return [tensors[name] for name in sorted(tensors)]


@dataclass(frozen=True)
class _Reading:
    piece: memoryview
    told: Callable[[int], None]
    only: str | None
    seen: list[str]  # names of all tensors


def _read_file(root: Path, file: Found, using: Backend, how: _Reading) -> Iterator[TensorChecks]:
    try:
        with open_inside(root, file) as stream:
            _, header = read_header(file, stream)
            how.seen.extend(tensor.name for tensor in header.tensors)
            for tensor in header.tensors:
                if how.only is not None and tensor.name != how.only:
                    continue
                yield _read_tensor(file, stream, tensor, BlockVector(using), how)
    except OSError as cause:
        raise RaftmetaError("bad_manifest", f"{file.name!r} cannot be read: {cause.strerror}", file=file.name) from cause
    verify_unchanged(file)


def _read_tensor(file: Found, stream: FileIO, tensor: HeaderTensor, made: BlockVector, how: _Reading) -> TensorChecks:
    stream.seek(tensor.begin)
    left = tensor.end - tensor.begin
    while left:
        count = stream.readinto(how.piece[: min(left, len(how.piece))])
        if not count:
            refuse(file.name, f"changed while it was read: {left} bytes are missing in tensor {tensor.name!r}")
        made.update(how.piece[:count])
        how.told(count)
        left -= count
    found = made.finish(tensor.dtype, tensor.shape)
    return TensorChecks(tensor.name, file.name, tensor.dtype, tensor.shape, made.size_bytes, found.entry, found.blocks)
