"""Digests of what a version has beside its weights, from the files of its directory as they are now.

Workers read those files after they were compared with the manifest, so what serves was read from the right ones. What lies there since may
be others: the next worker would refuse them, and a node whose files differ has to say so before that. A file is hashed again when its stat
differs, so a question costs a walk over a few names.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from raftmeta.core.manifest import FileEntry, Manifest, config_digest, tokenizer_digest

MAX_VERSIONS = 4_096  # of this node that are remembered, without their tensors
EXTRA = "extra"  # role of a file that no manifest names

Stamp = tuple[int, ...]


class Store(Protocol):
    def manifest(self, checksum: str) -> Manifest | None: ...
    def version_dir(self, checksum: str) -> Path: ...


class Digests(NamedTuple):
    config: str
    tokenizer: str  # "" when no file makes one


class _Known(NamedTuple):
    plain: Manifest  # without tensors and weights
    files: dict[str, tuple[Stamp, str]]  # name -> stamp when it was hashed, SHA-256
    seen: tuple[tuple[str, Stamp], ...]
    digests: Digests


class Beside:
    """May be used from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, _Known] = {}  # by checksum
        self._lock = threading.Lock()

    def digests(self, checksum: str) -> Digests | None:
        """None when the manifest is not here. Blocks while files are read. Raises RaftmetaError or OSError."""
        with self._lock:
            known = self._known.get(checksum)
            plain = self._plain(checksum) if known is None else known.plain
            if plain is None:
                return None
            directory = self._store.version_dir(checksum)
            seen = tuple(_walk(directory))
            if known is not None and seen == known.seen:
                return known.digests
            while len(self._known) >= MAX_VERSIONS:
                self._known.pop(next(iter(self._known)))
            files = {name: _hashed(directory, name, stamp, known) for name, stamp in seen}
            found = _found(plain, files)
            self._known[checksum] = _Known(plain, files, seen, Digests(config_digest(found), tokenizer_digest(found)))
            return self._known[checksum].digests

    def _plain(self, checksum: str) -> Manifest | None:
        manifest = self._store.manifest(checksum)
        if manifest is None:
            return None
        return msgspec.structs.replace(manifest, tensors=(), files=tuple(file for file in manifest.files if file.role != "weights"))


def _walk(directory: Path) -> list[tuple[str, Stamp]]:
    """Every file below, by name, with what changes when it does; none when there is no directory."""
    found = []
    for parent, directories, names in os.walk(directory):
        links = [name for name in directories if Path(parent, name).is_symlink()]
        for name in (*names, *links):
            path = os.path.join(parent, name)
            made = os.lstat(path)
            stamp = (made.st_mode, made.st_dev, made.st_ino, made.st_size, made.st_mtime_ns, made.st_ctime_ns)
            found.append((Path(path).relative_to(directory).as_posix(), stamp))
    return sorted(found)


def _hashed(directory: Path, name: str, stamp: Stamp, known: _Known | None) -> tuple[Stamp, str]:
    before = None if known is None else known.files.get(name)
    if before is not None and before[0] == stamp:
        return before
    if not stat.S_ISREG(stamp[0]):
        return stamp, f"no file of its own: mode {stamp[0]:o}"
    with open(directory / name, "rb", buffering=0) as file:
        return stamp, hashlib.file_digest(file, "sha256").hexdigest()


def _found(plain: Manifest, files: dict[str, tuple[Stamp, str]]) -> Manifest:
    """The manifest that these files would have: of the names that it has in its order, then the others."""
    named = {file.name for file in plain.files}
    kept = [msgspec.structs.replace(file, sha256=files[file.name][1]) for file in plain.files if file.name in files]
    extra = [FileEntry(name, stamp[3], sha256, EXTRA) for name, (stamp, sha256) in files.items() if name not in named]
    return msgspec.structs.replace(plain, files=(*kept, *extra))
