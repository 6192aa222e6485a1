"""The one safe way to touch a disk.

`Disk` is the short list of system calls that everything durable is built on; `OsDisk` makes them, tests put a disk in memory in its
place that loses power between any two of them. `write_file` replaces a whole small file: temporary name, digest, fsync, read back,
rename, fsync of the directory; `read_file` returns exactly what was written or raises. `lock_directory` gives a directory to one process.

An `OSError` leaves this module only as `DiskFull` (nothing was lost, free some space) or `DiskFailed` (what the disk holds is unknown).
Nothing here retries a failed sync: the kernel forgets the pages that it could not write, so a second sync would succeed without them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from raftmeta.core.errors import RaftmetaError

MAX_FILE_BYTES = 64 << 20  # of `write_file`; larger things have formats of their own
LOCK_NAME = "lock"

# Slowest sync beside a file of 257 MB that goes, on ext4 that discards: 130 to 200 ms at once, 17 to 29 ms in such steps, 9 to 17 ms alone.
_FREED_BYTES = 8 << 20
_FREED_PAUSE_S = 0.001

_TRAILER = struct.Struct("<8sQ32s")  # magic, length of the data, SHA-256 of the data
_MAGIC = b"rmfile01"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class DiskError(RaftmetaError):
    """A system call on a file failed. `errno` is the operating system's."""

    def __init__(self, code: str, detail: str, number: int) -> None:
        super().__init__(code, detail)
        self.errno = number


class DiskFull(DiskError):
    """There is no room. Nothing that was acknowledged is affected."""

    def __init__(self, detail: str, number: int = errno.ENOSPC) -> None:
        super().__init__("disk_full", detail, number)


class DiskFailed(DiskError):
    """A read, write or sync failed. What the disk holds is unknown, so the process that sees it ends."""

    def __init__(self, detail: str, number: int = errno.EIO) -> None:
        super().__init__("internal", detail, number)


class FileDamaged(RaftmetaError):
    """A file written by `write_file` does not read back as it was written."""

    def __init__(self, path: Path, expected: str, found: str) -> None:
        super().__init__("integrity", f"{path}: expected {expected}, found {found}")
        self.path = path


class DirectoryRefused(RaftmetaError):
    """The directory belongs to another process or user. No file in it was touched."""


class File(NamedTuple):
    """An open file. `path` is where it was opened; a rename does not follow it."""

    fd: int
    path: Path


class Disk(Protocol):
    """The system calls that durability needs. Each raises DiskFull or DiskFailed, nothing else."""

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open for reading and writing. With `create` the file is new: an older one of this name is emptied.

        DiskFull when there is no descriptor for a new file: nothing was changed, and what is known to want room may wait for it.
        """

    def close(self, file: File) -> None: ...

    def preallocate(self, file: File, size: int) -> None:
        """Make the file at least `size` bytes long with room behind every byte; DiskFull leaves it as it was or shorter."""

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data`."""

    def pread(self, file: File, size: int, offset: int) -> bytes:
        """Up to `size` bytes, fewer only at the end of the file."""

    def fdatasync(self, file: File) -> None: ...

    def fsync(self, file: File) -> None: ...

    def size(self, file: File) -> int: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there counts as removed."""

    def unlink_large(self, path: Path) -> None:
        """The same in small steps, which take their time; not on a thread that others wait for."""

    def exists(self, path: Path) -> bool: ...

    def listdir(self, directory: Path) -> list[str]:
        """Names in the directory, sorted."""

    def make_directory(self, directory: Path) -> None:
        """Create the directory and its parents where missing."""

    def sync_directory(self, directory: Path) -> None: ...

    def free_bytes(self, directory: Path) -> int: ...


class OsDisk:
    """The operating system's files. Has no state."""

    def open(self, path: Path, *, create: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if create:
            flags |= os.O_CREAT | os.O_TRUNC
        try:
            return File(os.open(path, flags, 0o600), path)
        except OSError as cause:
            if create and cause.errno in _NO_DESCRIPTOR:
                raise DiskFull(f"cannot create {path}: {os.strerror(cause.errno)}", cause.errno) from cause
            raise _error("open", path, cause) from cause

    def close(self, file: File) -> None:
        with _wrapped("close", file.path):
            os.close(file.fd)

    def preallocate(self, file: File, size: int) -> None:
        with _wrapped(f"reserve {size} bytes for", file.path):
            os.posix_fallocate(file.fd, 0, size)

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, offset: int) -> None:
        try:
            written = os.pwrite(file.fd, data, offset)
            if written == len(data):
                return
            view = memoryview(data)
            while written < len(view):  # a short write is followed by progress or by the error that stopped it
                step = os.pwrite(file.fd, view[written:], offset + written)
                if step == 0:
                    raise OSError(errno.EIO, "a write made no progress")
                written += step
        except OSError as cause:
            raise _error(f"write {len(data)} bytes at {offset} of", file.path, cause) from cause

    def pread(self, file: File, size: int, offset: int) -> bytes:
        try:
            data = os.pread(file.fd, size, offset)
            if len(data) == size or not data:
                return data
            parts = [data]
            got = len(data)
            while got < size and (data := os.pread(file.fd, size - got, offset + got)):
                parts.append(data)
                got += len(data)
            return b"".join(parts)
        except OSError as cause:
            raise _error(f"read {size} bytes at {offset} of", file.path, cause) from cause

    def fdatasync(self, file: File) -> None:
        try:
            os.fdatasync(file.fd)
        except OSError as cause:
            raise _error("fdatasync", file.path, cause) from cause

    def fsync(self, file: File) -> None:
        with _wrapped("fsync", file.path):
            os.fsync(file.fd)

    def size(self, file: File) -> int:
        with _wrapped("stat", file.path):
            return os.fstat(file.fd).st_size

    def rename(self, source: Path, target: Path) -> None:
        with _wrapped(f"rename {source} to", target):
            source.rename(target)

    def unlink(self, path: Path) -> None:
        with _wrapped("unlink", path):
            path.unlink(missing_ok=True)

    def unlink_large(self, path: Path) -> None:
        """The name goes first; then the file shrinks, for a file system that frees many blocks at once keeps every sync waiting."""
        with _wrapped("unlink", path):
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            except OSError as cause:
                if cause.errno not in _NO_DESCRIPTOR:
                    raise
                path.unlink(missing_ok=True)
                return
            try:
                path.unlink(missing_ok=True)
                for size in range(os.fstat(fd).st_size - _FREED_BYTES, 0, -_FREED_BYTES):
                    os.ftruncate(fd, size)
                    time.sleep(_FREED_PAUSE_S)
            finally:
                os.close(fd)

    def exists(self, path: Path) -> bool:
        with _wrapped("stat", path):
            try:
                path.lstat()
            except FileNotFoundError:
                return False
            return True

    def listdir(self, directory: Path) -> list[str]:
        with _wrapped("list", directory):
            return sorted(entry.name for entry in directory.iterdir())

    def make_directory(self, directory: Path) -> None:
        if self.exists(directory):
            return
        self.make_directory(directory.parent)
        with _wrapped("create directory", directory):
            directory.mkdir(mode=0o700, exist_ok=True)
        self.sync_directory(directory.parent)

    def sync_directory(self, directory: Path) -> None:
        with _wrapped("sync directory", directory):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def free_bytes(self, directory: Path) -> int:
        with _wrapped("statvfs", directory):
            stat = os.statvfs(directory)
            return stat.f_bavail * stat.f_frsize


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Replace the whole file, durably: after a crash it holds the old or the new bytes. One writer per path at a time."""
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {len(data)} bytes, the limit of a checked file is {MAX_FILE_BYTES}")
    image = data + _TRAILER.pack(_MAGIC, len(data), hashlib.sha256(data).digest())
    temporary = path.with_name(f".{path.name}.tmp")
    file = disk.open(temporary, create=True)
    try:
        disk.pwrite(file, image, 0)
        disk.fsync(file)
        if disk.pread(file, len(image) + 1, 0) != image:
            raise FileDamaged(temporary, "the bytes just written", "others")
    finally:
        disk.close(file)
    disk.rename(temporary, path)
    disk.sync_directory(path.parent)


def read_file(disk: Disk, path: Path) -> bytes | None:
    """What `write_file` wrote, or None when there is no such file. Anything else than the exact bytes raises FileDamaged."""
    if not disk.exists(path):
        return None
    file = disk.open(path)
    try:
        size = disk.size(file)
        if not _TRAILER.size <= size <= MAX_FILE_BYTES + _TRAILER.size:
            raise FileDamaged(path, f"{_TRAILER.size} to {MAX_FILE_BYTES + _TRAILER.size} bytes", f"{size} bytes")
        image = disk.pread(file, size, 0)
    finally:
        disk.close(file)
    data, trailer = image[: -_TRAILER.size], image[-_TRAILER.size :]
    magic, length, digest = _TRAILER.unpack(trailer)
    if magic != _MAGIC or length != len(data):
        raise FileDamaged(path, f"a trailer for {len(data)} bytes", f"{trailer[:16].hex()}")
    actual = hashlib.sha256(data).digest()
    if actual != digest:
        raise FileDamaged(path, f"SHA-256 {digest.hex()}", actual.hex())
    return data


class DirectoryLock:
    """Holds a directory for this process until it is released or the process ends, however it ends."""

    def __init__(self, fd: int, directory: Path) -> None:
        self._fd = fd
        self.directory = directory

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def lock_directory(path: Path) -> DirectoryLock:
    """Take the directory for this process, creating it where missing. Raises DirectoryRefused and touches nothing otherwise."""
    OsDisk().make_directory(path)
    _refuse_other_owner(path)
    lock = path / LOCK_NAME
    with _wrapped("lock", lock):
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            os.close(fd)
            holder = f"process {pid}" if pid.isdigit() else "another process"
            raise DirectoryRefused(
                "directory_refused", f"{path} is in use by {holder}; one directory serves one process at a time"
            ) from cause
        with contextlib.suppress(OSError):  # the number is for people; a full disk must not keep a member from starting
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return DirectoryLock(fd, path)


def _refuse_other_owner(path: Path) -> None:
    """Files of two users in one directory end as an empty database for one of them, so the owner must be the user of the process."""
    me = os.geteuid()
    with _wrapped("stat", path):
        if not path.is_dir():
            raise DirectoryRefused("directory_refused", f"{path} is not a directory")
        owners = {path: path.stat().st_uid}
        if owners[path] == me:
            owners.update({entry: entry.lstat().st_uid for entry in path.iterdir() if entry.name != "lost+found"})
    for entry, owner in owners.items():
        if owner != me:
            detail = (
                f"{entry} belongs to user id {owner}, this process runs as user id {me}; run it as the owner or give it another directory"
            )
            raise DirectoryRefused("directory_refused", detail)


def _error(what: str, path: Path, cause: OSError) -> DiskError:
    detail = f"cannot {what} {path}: {os.strerror(cause.errno or 0)}"
    kind = DiskFull if cause.errno in _NO_SPACE else DiskFailed
    return kind(detail, cause.errno or 0)


@contextlib.contextmanager
def _wrapped(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise _error(what, path, cause) from cause
