"""Puts the file of block checks where the sources of a version serve it: into the directory that is published.

A manifest should name the file only if agents find it, for to make it themselves they read all weights once more; and the publisher sees no
source but the directory. So it is named where the directory is a source itself, and written there; where other places alone are sources,
only if it lay in the directory before, for then a copy that was made of the directory has it too. A directory that cannot be written is
published without it. What was asked for is done or refused.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from consistency import block_sidecar
from consistency.artifact import Artifact
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FileEntry, Manifest

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Placed:
    manifest: Manifest
    file: FileEntry | None  # as the manifest names it
    note: str  # for the publisher: who else needs the file, or why there is none


def place(directory: Path, artifact: Artifact, wanted: bool | None) -> Placed:
    """`wanted`: whether the manifest must name the file, None to decide it here. Raises RaftmetaError as `write` does."""
    manifest = artifact.manifest
    if wanted is False:
        return Placed(manifest, None, "none, as asked")
    file = block_sidecar.entry_of(artifact.blocks)
    is_source = any(_is_directory(source, directory) for source in manifest.sources)
    if wanted is None and not is_source and not _is_there(directory / file.name, artifact.blocks):
        return Placed(manifest, None, "none: the sources may lack it; `raftmeta vector DIR --write-blocks` before DIR is copied there")
    try:
        write(directory, artifact.blocks)
    except RaftmetaError as cause:
        if wanted or cause.code != "bad_field":
            raise
        return Placed(manifest, None, f"none: {cause.detail}")
    return Placed(block_sidecar.naming(manifest, artifact.blocks), file, "copies of DIR should have it, too")


def write(directory: Path, content: bytes) -> FileEntry:
    """The file is in the directory, whole, under its name; one that has these bytes already is left alone.

    Raises RaftmetaError bad_field where nothing can be written, disk_full, or internal.
    """
    entry = block_sidecar.entry_of(content)
    final = directory / entry.name
    building = directory / f".{entry.name}.{os.getpid()}.new"
    try:
        if _is_there(final, content):
            return entry
        building.unlink(missing_ok=True)  # of a process of this number that died
        try:
            _write_whole(building, content)
            building.rename(final)
            _sync_directory(directory)
        finally:
            building.unlink(missing_ok=True)
    except OSError as cause:
        detail = f"{final} cannot be written: {cause.strerror}"
        code = "bad_field" if cause.errno in _NOT_WRITABLE else "disk_full" if cause.errno in _NO_SPACE else "internal"
        raise RaftmetaError(code, detail) from cause
    return entry


def _is_there(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:  # it is not there, or no file that can be read, which writing it tells
        return False


def _write_whole(path: Path, content: bytes) -> None:
    """Readable for whom the umask allows, as the weights beside it: agents may be other users."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    with open(fd, "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_directory(source: str, directory: Path) -> bool:
    parts = urlsplit(source)
    return parts.scheme == "file" and Path(unquote(parts.path)).resolve() == directory.resolve()
