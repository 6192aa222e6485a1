"""Two slots of weights in one file in shared memory, allocated once, with a header that never says more than is true.

The file is allocated (posix_fallocate), touched, kept out of core dumps and readable by the group, so that workers of another uid map it
read-only. Page 0 names the arena and its owner, pages 1 and 2 hold one checked record per slot. A record torn by a crash reads as empty;
bytes are writable only through `staging_view` of a slot whose record says dirty, and servable only when it says verified. A file that is
not an arena of this format, this boot and this size is refused by name and never mapped; `create` replaces it, if it is a plain file of
ours that nobody writes to. `multiprocessing.shared_memory` is not used: its resource tracker unlinks memory that others still need.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from node_agent.device import checked, headroom, mapped, numa
from node_agent.device.port import EMPTY_RECORD, SLOTS, SlotRecord, SlotState
from node_agent.device.process import ProcessId, boot_id, this_process
from node_agent.refusal import Refusal

FORMAT: Final = "raftmeta-arena-2"
_PAGE: Final = 4096
_MODE: Final = 0o640
_MAX_PATH: Final = 2048  # characters of a path in the header, which is a page
_DATA: Final = 1 << 16  # slots begin here: aligned to the largest page size in use (64 KiB on some arm machines)
_POPULATE_READ: Final = 22  # madvise, Linux 5.14; not in the mmap module of Python 3.11
_POPULATE_WRITE: Final = 23


class ArenaUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an arena is for, so that whoever finds the file knows whom to ask."""

    store_dir: str = ""
    node: str = ""
    deployment: str = ""

    @classmethod
    def of(cls, store_dir: Path, node: str, deployment: str = "") -> ArenaUse:
        return cls(str(store_dir.absolute())[:_MAX_PATH], node, deployment)


NO_USE: Final = ArenaUse()


class ArenaHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    arena_id: str
    boot_id: str
    slot_bytes: int
    owner: ProcessId  # who writes; says whom to ask, the lock on the file is what excludes
    use: ArenaUse = NO_USE


class Arena:
    """Use `create` or `open`. One writer at a time, any number of readers."""

    def __init__(self, path: Path, fd: int, header: ArenaHeader, readonly: bool, notice: str = "") -> None:
        self.path = path
        self.notice = notice  # what could not be had and is not needed
        self.header = header
        self.readonly = readonly
        self._fd = fd
        protection = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
        self._mapping = mmap.mmap(fd, _file_size(header.slot_bytes), mmap.MAP_SHARED, protection)
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        _populate(self._mapping, readonly)
        self._view = memoryview(self._mapping)

    @classmethod
    def create(cls, path: Path, slot_bytes: int, use: ArenaUse = NO_USE, numa_nodes: tuple[int, ...] = ()) -> Arena:
        """A fresh arena with two empty slots in place of any older file of ours. This process owns it until `close`.

        `numa_nodes` are where its pages should lie, none: anywhere; `notice` says why they do not.

        Raises Refusal no_headroom (nothing was allocated), arena_in_use, or foreign_arena when the path is not a plain file of this user.
        """
        if slot_bytes < 1:
            raise ValueError(f"slot_bytes is {slot_bytes}")
        slot_bytes = -(-slot_bytes // _DATA) * _DATA
        older = _lock_older(path)
        try:
            headroom.require(path.parent, _file_size(slot_bytes))
            header = ArenaHeader(FORMAT, secrets.token_hex(8), boot_id(), slot_bytes, this_process(), use)
            fd, notice = _allocate(path, header, numa_nodes)
        finally:
            if older is not None:
                os.close(older)
        return cls(path, fd, header, readonly=False, notice=notice)

    @classmethod
    def open(cls, path: Path, readonly: bool = True) -> Arena:
        """Raises Refusal foreign_arena, or arena_in_use when a writer is wanted and another one lives; FileNotFoundError."""
        fd = os.open(path, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            header = _checked_header(path, fd)
            if not mapped.announce(fd) or not os.fstat(fd).st_nlink:  # being removed, or gone in between
                raise FileNotFoundError(errno.ENOENT, "the arena is being removed", str(path))
            if not readonly:
                _lock(path, fd, str(header.owner))
                header = msgspec.structs.replace(header, owner=this_process())
                os.pwrite(fd, checked.encode(header, _PAGE), 0)
            return cls(path, fd, header, readonly)
        except BaseException:
            os.close(fd)
            raise

    @property
    def slot_bytes(self) -> int:
        return self.header.slot_bytes

    def mend_header(self) -> bool:
        """Write the header again when it is not as this process, the one that writes, knows it. True when it was not."""
        return checked.mend(self._view, self.header, _PAGE)

    def record(self, slot: int) -> SlotRecord:
        """What the slot holds; empty when its record does not check."""
        begin = _record_offset(slot)
        return checked.read(self._view[begin : begin + _PAGE], SlotRecord) or EMPTY_RECORD

    def verified(self, slot: int) -> SlotRecord:
        """The record of a slot that may serve. Raises Refusal slot_not_verified for anything else."""
        record = self.record(slot)
        if record.state is not SlotState.VERIFIED:
            raise Refusal("slot_not_verified", f"slot {slot} of {self.path}", SlotState.VERIFIED, record.state)
        return record

    def require_dirty(self, slot: int) -> SlotRecord:
        """The record of a slot that may be written to. Raises Refusal slot_not_dirty for anything else."""
        record = self.record(slot)
        if record.state is not SlotState.DIRTY:
            raise Refusal("slot_not_dirty", f"slot {slot} of {self.path}", SlotState.DIRTY, record.state)
        return record

    def mark_dirty(self, slot: int, record: SlotRecord) -> None:
        """Before the first byte changes: say what is about to be written."""
        self._write_record(slot, msgspec.structs.replace(record, state=SlotState.DIRTY, vector_root=""))

    def mark_verified(self, slot: int, vector_root: str, snapshot_digest: str) -> SlotRecord:
        """After the vector of the slot's bytes matched. Only what was marked dirty becomes verified."""
        record = self.require_dirty(slot)
        record = msgspec.structs.replace(record, state=SlotState.VERIFIED, vector_root=vector_root, snapshot_digest=snapshot_digest)
        self._write_record(slot, record)
        return record

    def begin_repair(self, slot: int, snapshot_digest: str, until_ns: int) -> SlotRecord:
        """Before a block of a slot that serves is written again: nobody may compute from it until `end_repair`. Gives the record of before.

        `snapshot_digest`: of the list of tensors that stay untouched; `until_ns`: when whoever waits may give up. Raises Refusal.
        """
        before = self.verified(slot)
        self.mark_dirty(slot, msgspec.structs.replace(before, snapshot_digest=snapshot_digest, repair_until_ns=until_ns))
        return before

    def end_repair(self, slot: int, before: SlotRecord) -> SlotRecord:
        """After the block was found right again, or was not touched. The record tells that there was a repair."""
        dirty = self.require_dirty(slot)
        if not dirty.repair_until_ns or dirty.checksum != before.checksum:
            expected, found = f"a repair of {before.version}", f"{dirty.version}, not in repair"
            raise Refusal("slot_not_dirty", f"slot {slot} of {self.path}", expected, found)
        record = msgspec.structs.replace(before, repairs=before.repairs + 1)
        self._write_record(slot, record)
        return record

    def mark_empty(self, slot: int) -> None:
        self._write_record(slot, EMPTY_RECORD)

    def slot_view(self, slot: int) -> memoryview:
        """The slot's bytes, read-only."""
        return self._slot(slot).toreadonly()

    def serving_view(self, slot: int) -> memoryview:
        """The slot's bytes for a worker, read-only. Raises Refusal slot_not_verified unless they may serve."""
        self.verified(slot)
        return self.slot_view(slot)

    def staging_view(self, slot: int) -> memoryview:
        """The slot's bytes to write to. Raises Refusal slot_not_dirty unless the header says so first."""
        self.require_dirty(slot)
        return self._slot(slot)

    def close(self) -> None:
        """Unmap and give the lock up. Raises BufferError while a view is in use."""
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:
            self._view = memoryview(self._mapping)  # the arena stays usable
            raise
        os.close(self._fd)

    def _slot(self, slot: int) -> memoryview:
        _record_offset(slot)
        begin = _DATA + slot * self.slot_bytes
        return self._view[begin : begin + self.slot_bytes]

    def _write_record(self, slot: int, record: SlotRecord) -> None:
        if self.readonly:
            raise Refusal("arena_in_use", f"arena {self.path}", "an arena opened for writing", "a read-only one")
        begin = _record_offset(slot)
        checked.write(self._view[begin : begin + _PAGE], record)


def _record_offset(slot: int) -> int:
    if not 0 <= slot < SLOTS:
        raise ValueError(f"slot {slot} is outside 0..{SLOTS - 1}")
    return _PAGE * (1 + slot)


def _file_size(slot_bytes: int) -> int:
    return _DATA + SLOTS * slot_bytes


def _allocate(path: Path, header: ArenaHeader, numa_nodes: tuple[int, ...]) -> tuple[int, str]:
    """Write the file under another name, locked, and rename it: nobody ever opens half an arena. Gives descriptor and notice."""
    fresh = path.with_name(f".{path.name}.fresh")
    fresh.unlink(missing_ok=True)  # left by a crash; the lock on `path` says that nobody else is creating one
    size = _file_size(header.slot_bytes)
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
    try:
        _lock(fresh, fd, str(header.owner))
        mapped.announce(fd)
        os.fchmod(fd, _MODE)
        notice = _place(fd, size, numa_nodes) if numa_nodes else ""
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, checked.encode(header, _PAGE), 0)
        for slot in range(SLOTS):
            os.pwrite(fd, checked.encode(EMPTY_RECORD, _PAGE), _record_offset(slot))
        fresh.rename(path)
    except OSError as cause:
        os.close(fd)
        fresh.unlink(missing_ok=True)
        if cause.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
            found = f"{errno.errorcode[cause.errno]} from posix_fallocate; raise the size of {path.parent} (mount option size=)"
            raise Refusal("no_headroom", f"arena {path}", f"{size} bytes", found) from cause
        raise
    return fd, notice


def _place(fd: int, size: int, numa_nodes: tuple[int, ...]) -> str:
    """Before the first page is allocated. Gives a notice, "" when it was done."""
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as mapping:
        return numa.bind(mapping, numa_nodes)


def _lock_older(path: Path) -> int | None:
    """Descriptor of the file that is about to be replaced, locked; None when there is none.

    The name is made of a digest of this node and store, so a plain file of this user under it is ours, whatever its header says now.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise Refusal("foreign_arena", f"file {path}", "a plain file of this user, or none", f"{cause.strerror}, left alone") from cause
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            found = f"mode {status.st_mode:o} of user {status.st_uid}, left alone"
            raise Refusal("foreign_arena", f"file {path}", f"a plain file of user {os.geteuid()}, or none", found)
        header = checked.read(os.pread(fd, _PAGE, 0), ArenaHeader)
        _lock(path, fd, "a process that this header does not name" if header is None else str(header.owner))
        if mapped.exclude(fd):
            os.ftruncate(fd, 0)  # nobody reads it: its memory counts towards the room for the new one
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(path: Path, fd: int, owner: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        raise Refusal("arena_in_use", f"arena {path}", "no other writer", owner) from cause


def _checked_header(path: Path, fd: int) -> ArenaHeader:
    status = os.fstat(fd)
    subject = f"arena {path}"
    if not stat.S_ISREG(status.st_mode):
        raise Refusal("foreign_arena", subject, "a plain file", f"mode {status.st_mode:o}")
    header = checked.read(os.pread(fd, _PAGE, 0), ArenaHeader)
    if header is None:
        raise Refusal("foreign_arena", subject, FORMAT, "a header that does not check")
    if header.format != FORMAT:
        raise Refusal("foreign_arena", subject, FORMAT, header.format)
    if header.boot_id != boot_id():
        raise Refusal("foreign_arena", subject, f"boot {boot_id()}", f"boot {header.boot_id}")
    if status.st_size != _file_size(header.slot_bytes):
        raise Refusal("foreign_arena", subject, f"{_file_size(header.slot_bytes)} bytes", f"{status.st_size} bytes")
    return header


def _populate(mapping: mmap.mmap, readonly: bool) -> None:
    """Map every page now, so that neither a request nor the switch pays for a page fault."""
    try:
        mapping.madvise(_POPULATE_READ if readonly else _POPULATE_WRITE)
    except OSError as cause:
        if cause.errno != errno.EINVAL:  # a kernel older than 5.14: touch each page instead
            raise
        pages = np.frombuffer(mapping, np.uint8)[::_PAGE]
        if readonly:
            pages.sum()
        else:
            pages |= 0
