"""One check at a time: a lock that ends with the process that holds it, and says which that is.

A file per user and connection, locked by the kernel (`flock`), so that runs of cron that take longer than their interval do not pile up.
Nothing has to be cleaned up: the kernel lets go when the process ends, however that comes. What stands in the file only informs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from raftmeta.core.errors import RaftmetaError

MAX_NOTE_BYTES = 1 << 10


class CheckRunning(Exception):
    """Another process holds the lock."""

    code = "check_running"

    def __init__(self, path: Path, who: str) -> None:
        super().__init__(f"another check runs ({who}); its lock is {path}")


def path_for(directory: Path, urls: Sequence[str]) -> Path:
    """Where runs against these members meet. Makes the directory. Raises RaftmetaError when it is not this user's alone."""
    key = hashlib.sha256("\0".join(sorted({_place(url) for url in urls})).encode()).hexdigest()[:16]
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as cause:
        raise RaftmetaError("bad_field", f"no lock can be made in {directory}: {cause.strerror}; name another file with --lock") from cause
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RaftmetaError("bad_field", f"{directory} is not a directory of this user alone; name another file with --lock")
    return directory / f"check-{key}.lock"


def _place(url: str) -> str:
    """The same text for each way to write the address of one member."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:  # whoever connects says what is wrong with it
        return url
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}"


@contextmanager
def held(path: Path, now_ms: int | None = None) -> Iterator[None]:
    """Raises CheckRunning with who holds it, RaftmetaError when the file cannot be used."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as cause:
        raise RaftmetaError("bad_field", f"the lock {path} cannot be opened: {cause.strerror}") from cause
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise RaftmetaError("bad_field", f"the lock {path} is no regular file; name another one with --lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise CheckRunning(path, _told(os.pread(fd, MAX_NOTE_BYTES, 0))) from cause
        except OSError as cause:
            raise RaftmetaError("bad_field", f"the lock {path} cannot be taken: {cause.strerror}") from cause
        note = json.dumps({"pid": os.getpid(), "since_ms": time.time_ns() // 1_000_000 if now_ms is None else now_ms}).encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its note
            os.ftruncate(fd, 0)
            os.pwrite(fd, note, 0)
        yield
    finally:
        os.close(fd)  # which lets go


def _told(note: bytes) -> str:
    """Who says that it holds the lock. The file belongs to anybody who may write it, so nothing of it is taken for granted."""
    try:
        found = json.loads(note)
        pid, since_ms = int(found["pid"]), int(found["since_ms"])
        since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(since_ms / 1000))
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return "it does not say which"
    return f"process {pid}, since {since}"
