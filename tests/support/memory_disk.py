"""A disk in memory that forgets what it was not told to keep.

Implements `raftmeta.durable.Disk`. Un-synced writes live per 512-byte sector, un-synced creations, renames and removals per directory
entry. `crash()` cuts the power: each of them is kept, lost or, for sectors written several times, kept in an older version, as the seed
decides. `kill()` ends the process only: everything written stays readable, synced or not. `crash_at(n)` cuts the power inside the code
under test, before its n-th changing call; `fail()` makes a call raise; `flip`, `cut` and `put` damage what is stored. Equal seeds and
calls give equal bytes.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

from raftmeta.durable import DiskError, DiskFailed, DiskFull, File

SECTOR = 512
MAX_VERSIONS = 4  # older contents remembered per un-synced sector
MAX_LOG = 10_000


class PowerLost(BaseException):
    """The power went inside a call. Not an Exception: no code under test may survive it."""


class _Inode:
    """`data` is what reads see; `dirty` holds, per un-synced sector, what the platter may hold instead, durable version first."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable_size = 0
        self.dirty: dict[int, list[bytes]] = {}
        self.forgotten: set[int] = set()  # a failed sync marked them clean: later syncs skip them

    def copy(self) -> _Inode:
        other = _Inode()
        other.data = bytearray(self.data)
        other.durable_size = self.durable_size
        other.dirty = {sector: list(versions) for sector, versions in self.dirty.items()}
        other.forgotten = set(self.forgotten)
        return other

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        end = offset + len(data)
        for sector in range(offset // SECTOR, -(-end // SECTOR)):
            versions = self.dirty.setdefault(sector, [])
            if len(versions) < MAX_VERSIONS:
                versions.append(bytes(self.data[sector * SECTOR : (sector + 1) * SECTOR]))
            self.forgotten.discard(sector)
        if len(self.data) < end:
            self.data.extend(bytes(end - len(self.data)))
        self.data[offset:end] = data

    def sync(self) -> None:
        self.dirty = {sector: self.dirty[sector] for sector in self.forgotten}
        self.durable_size = len(self.data)

    def sync_failed(self) -> None:
        self.forgotten.update(self.dirty)

    def lose_power(self, random: Random, keep: float) -> None:
        size = len(self.data) if random.random() < keep else self.durable_size
        for sector, versions in sorted(self.dirty.items()):
            if random.random() < keep:
                continue
            old = versions[0] if keep == 0 else random.choice(versions)
            begin = sector * SECTOR
            self.data[begin : begin + SECTOR] = old.ljust(min(SECTOR, len(self.data) - begin), b"\0")
        del self.data[size:]
        self.dirty.clear()
        self.forgotten.clear()
        self.durable_size = size


class MemoryDisk:
    def __init__(self, seed: int = 0, *, capacity_bytes: int | None = None) -> None:
        self.random = Random(seed)
        self.capacity_bytes = capacity_bytes
        self.calls = 0  # changing calls so far
        self.log: deque[tuple[str, str]] = deque(maxlen=MAX_LOG)  # every call, reads included: (name, file name)
        self.on_call: Callable[[str, Path], None] | None = None
        self.off = False
        self._names: dict[Path, _Inode] = {}
        self._durable_names: dict[Path, _Inode] = {}
        self._pending: list[tuple[dict[Path, _Inode | None], set[Path]]] = []  # with the directories that are not synced since
        self._directories: set[Path] = set()
        self._open: dict[int, _Inode] = {}
        self._next_fd = 3
        self._crash_at = -1
        self._faults: list[list[object]] = []

    # what a test does to the disk

    def crash_at(self, call: int) -> None:
        """Lose power before the `call`-th changing call from now (0: the next one)."""
        self._crash_at = self.calls + call

    def crash(self, keep: float | None = None) -> None:
        """Power loss and reboot. `keep` is the share of un-synced changes that survive; by default none, all or some."""
        if keep is None:
            keep = self.random.choice((0.0, 1.0, 0.5, 0.5))
        for change, _ in self._pending:
            if self.random.random() < keep:
                self._apply(self._durable_names, change)
        self._pending.clear()
        for _, inode in sorted({id(inode): (str(path), inode) for path, inode in self._durable_names.items()}.values(), key=lambda x: x[0]):
            inode.lose_power(self.random, keep)
        self._names = dict(self._durable_names)
        self.kill()

    def kill(self) -> None:
        """The process ends and another may start: open files are gone, what was written is still there."""
        self._open.clear()
        self._crash_at = -1
        self.off = False

    def fail(self, call: str, number: int, *, name: str = "", skip: int = 0, times: int = 1) -> None:
        """Let `call` on files whose name contains `name` raise errno `number`, after `skip` good ones, `times` times."""
        self._faults.append([call, number, name, skip, times])

    def heal(self) -> None:
        self._faults.clear()

    def flip(self, path: Path, offset: int, mask: int = 1) -> None:
        self._names[path].data[offset] ^= mask

    def cut(self, path: Path, size: int) -> None:
        inode = self._names[path]
        del inode.data[size:]
        inode.durable_size = min(size, inode.durable_size)

    def remove(self, directory: Path) -> None:
        """Everything below it is gone for good, by somebody else's hand."""
        for names in (self._names, self._durable_names, *(change for change, _ in self._pending)):
            for path in [path for path in names if directory in path.parents]:
                del names[path]

    def put(self, path: Path, data: bytes, offset: int = 0) -> None:
        """Write behind the back of the code under test, durably. Creates the file where missing."""
        inode = self._names.setdefault(path, _Inode())
        self._durable_names[path] = inode
        inode.write(data, offset)
        inode.sync()

    def contents(self, path: Path) -> bytes:
        return bytes(self._names[path].data)

    def files(self) -> dict[Path, bytes]:
        """What reads see, of every file."""
        return {path: bytes(inode.data) for path, inode in sorted(self._names.items())}

    def used_bytes(self) -> int:
        return sum(len(inode.data) for inode in {id(inode): inode for inode in self._names.values()}.values())

    def clone(self) -> MemoryDisk:
        """An independent copy without open files, faults and planned crashes."""
        other = MemoryDisk(self.random.getrandbits(32), capacity_bytes=self.capacity_bytes)
        copies: dict[int, _Inode] = {}

        def copy(inode: _Inode) -> _Inode:
            return copies.setdefault(id(inode), inode.copy())

        other._names = {path: copy(inode) for path, inode in self._names.items()}
        other._durable_names = {path: copy(inode) for path, inode in self._durable_names.items()}
        other._pending = [({path: inode and copy(inode) for path, inode in change.items()}, set(left)) for change, left in self._pending]
        other._directories = set(self._directories)
        return other

    # the port

    def open(self, path: Path, *, create: bool = False) -> File:
        self._call("create" if create else "open", path, changes=create)
        if create:
            self._room(0)
            self._change({path: _Inode()})
        elif path not in self._names:
            raise DiskFailed(f"cannot open {path}: no such file", errno.ENOENT)
        self._next_fd += 1
        self._open[self._next_fd] = self._names[path]
        return File(self._next_fd, path)

    def close(self, file: File) -> None:
        self._open.pop(file.fd, None)

    def preallocate(self, file: File, size: int) -> None:
        inode = self._inode("preallocate", file)
        self._room(size - len(inode.data))
        if size > len(inode.data):
            inode.data.extend(bytes(size - len(inode.data)))

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, offset: int) -> None:
        error = self._call("pwrite", file.path, raises=False)
        inode = self._handle(file)
        if error is not None:
            inode.write(data[: self.random.randrange(len(data) + 1)], offset)
            raise error
        self._room(offset + len(data) - len(inode.data))
        inode.write(data, offset)

    def pread(self, file: File, size: int, offset: int) -> bytes:
        inode = self._inode("pread", file, changes=False)
        return bytes(inode.data[offset : offset + size])

    def fdatasync(self, file: File) -> None:
        self._sync("fdatasync", file)

    def fsync(self, file: File) -> None:
        self._sync("fsync", file)

    def size(self, file: File) -> int:
        return len(self._handle(file).data)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", target)
        if source not in self._names:
            raise DiskFailed(f"cannot rename {source}: no such file", errno.ENOENT)
        self._change({source: None, target: self._names[source]})

    def unlink(self, path: Path) -> None:
        self._call("unlink", path)
        if path in self._names:
            self._change({path: None})

    def unlink_large(self, path: Path) -> None:
        self.unlink(path)

    def exists(self, path: Path) -> bool:
        self._call("exists", path, changes=False)
        return path in self._names or path in self._directories

    def listdir(self, directory: Path) -> list[str]:
        self._call("listdir", directory, changes=False)
        return sorted(path.name for path in self._names if path.parent == directory)

    def make_directory(self, directory: Path) -> None:
        self._call("make_directory", directory)
        self._directories.add(directory)

    def sync_directory(self, directory: Path) -> None:
        self._call("sync_directory", directory)
        waiting = []
        for change, left in self._pending:
            left.discard(directory)
            if left:
                waiting.append((change, left))
            else:
                self._apply(self._durable_names, change)
        self._pending = waiting

    def free_bytes(self, directory: Path) -> int:
        self._call("free_bytes", directory, changes=False)
        return 1 << 50 if self.capacity_bytes is None else max(0, self.capacity_bytes - self.used_bytes())

    # inside

    def _call(self, name: str, path: Path, *, changes: bool = True, raises: bool = True) -> DiskError | None:
        if self.off:
            raise PowerLost
        if changes:
            if self.calls == self._crash_at:
                self.off = True
                raise PowerLost
            self.calls += 1
        self.log.append((name, path.name))
        if self.on_call is not None:
            self.on_call(name, path)
        error = self._fault(name, path)
        if error is not None and raises:
            raise error
        return error

    def _fault(self, name: str, path: Path) -> DiskError | None:
        for fault in self._faults:
            call, number, part, skip, times = fault
            assert isinstance(number, int) and isinstance(skip, int) and isinstance(times, int)
            if call != name or str(part) not in path.name or times == 0:
                continue
            if skip > 0:
                fault[3] = skip - 1
                continue
            fault[4] = times - 1
            kind = DiskFull if number in (errno.ENOSPC, errno.EDQUOT) else DiskFailed
            return kind(f"cannot {name} {path}: injected errno {number}", number)
        return None

    def _handle(self, file: File) -> _Inode:
        if self.off:
            raise PowerLost
        inode = self._open.get(file.fd)
        if inode is None:
            raise DiskFailed(f"{file.path} is not open", errno.EBADF)
        return inode

    def _inode(self, name: str, file: File, *, changes: bool = True) -> _Inode:
        self._call(name, file.path, changes=changes)
        return self._handle(file)

    def _sync(self, name: str, file: File) -> None:
        error = self._call(name, file.path, raises=False)
        inode = self._handle(file)
        if error is not None:
            inode.sync_failed()
            raise error
        inode.sync()

    def _room(self, more: int) -> None:
        if self.capacity_bytes is not None and more > 0 and self.used_bytes() + more > self.capacity_bytes:
            raise DiskFull(f"the disk in memory holds {self.used_bytes()} of {self.capacity_bytes} bytes, {more} more do not fit")

    def _change(self, change: dict[Path, _Inode | None]) -> None:
        self._apply(self._names, change)
        self._pending.append((change, {path.parent for path in change}))

    @staticmethod
    def _apply(names: dict[Path, _Inode], change: dict[Path, _Inode | None]) -> None:
        for path, inode in change.items():
            if inode is None:
                names.pop(path, None)
            else:
                names[path] = inode
