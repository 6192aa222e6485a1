"""Reports that other programs read while we write them: the whole old one or the whole new one, never half."""

from __future__ import annotations

import os
from pathlib import Path

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import DiskError, OsDisk

MODE = 0o644  # collectors run as somebody else

_DISK = OsDisk()


def require_writable(path: Path, option: str) -> None:
    """Before any work is done. Raises RaftmetaError bad_field."""
    directory = path.parent
    if path.is_dir() or not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise RaftmetaError("bad_field", f"{option} {path} cannot be written: its directory must exist and be writable")


def replace(path: Path, data: bytes) -> str:
    """Why it could not be written, "" when it was."""
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"  # no name that a collector takes for a page
    try:
        file = _DISK.open(temporary, create=True)
        try:
            _DISK.pwrite(file, data, 0)
            os.fchmod(file.fd, MODE)
            _DISK.fsync(file)
        finally:
            _DISK.close(file)
        _DISK.rename(temporary, path)
        _DISK.sync_directory(path.parent)
    except (DiskError, OSError) as cause:
        temporary.unlink(missing_ok=True)
        return f"{path}: {cause}"
    return ""
