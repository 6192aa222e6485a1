"""The file of block checks that lies beside the weights: its name, its size, and its place in a manifest. Pure.

docs/wcv.md states the format. A manifest names the file among its others, with the role `weights` and without a tensor in it: weights enter
a version's digests tensor by tensor, so the file is part of neither the configuration digest nor the checksum, and a build that does not
know it reads the manifest, takes it for sound and fetches everything else. It is told from other files by its name, which carries the
beginning of its SHA-256, so that files for different weights can lie in one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raftmeta.core.manifest import FileEntry, Manifest

BLOCK_BYTES = 64 << 10  # of a tensor; the last block may be shorter
CHECK_BYTES = 16  # of one block
MAGIC = b"raftmeta-blocks1"
HEAD_BYTES = len(MAGIC) + 8  # and the number of tensors, u64 little-endian
ROLE = "weights"
_NAME = re.compile(r"raftmeta-blocks-([0-9a-f]{16})\.wcv\Z")


def name_of(sha256: str) -> str:
    """The name of a file with these bytes."""
    return f"raftmeta-blocks-{sha256[:16]}.wcv"


def is_name(name: str) -> bool:
    """A file of this name, without its directory, holds block checks."""
    return _NAME.match(name) is not None


def blocks_of(size_bytes: int) -> int:
    """How many blocks a tensor of this size has."""
    return -(-size_bytes // BLOCK_BYTES)


def size_of(tensor_sizes: Iterable[int]) -> int:
    """Bytes of the file for tensors of these sizes."""
    return HEAD_BYTES + CHECK_BYTES * sum(map(blocks_of, tensor_sizes))


def find(manifest: Manifest) -> FileEntry | None:
    """The file of block checks that a sound manifest names."""
    return next(iter(named_in(manifest)), None)


def faults(manifest: Manifest, found: Sequence[FileEntry]) -> Iterator[str]:
    """What is wrong with how the manifest names such files; `found`: those that it names."""
    if len(found) > 1:
        yield f"{len(found)} files of block checks, {found[0].name!r} first; a version has one at most"
    for file in found:
        if file.name != name_of(file.sha256):
            yield f"file {file.name!r}: its digest asks for the name {name_of(file.sha256)!r}"
        need = size_of(tensor.size_bytes for tensor in manifest.tensors)
        if file.size_bytes != need:
            yield f"file {file.name!r}: the tensors have block checks of {need} bytes, it has {file.size_bytes}"
        if any(tensor.file == file.name for tensor in manifest.tensors):
            yield f"file {file.name!r} holds block checks; a tensor is said to lie in it"


def named_in(manifest: Manifest) -> list[FileEntry]:
    """One at most in a sound manifest."""
    return [file for file in manifest.files if file.role == ROLE and _NAME.match(file.name)]
