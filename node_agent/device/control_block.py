"""The few words that control and the workers of a node share: which slot is active, and who is inside which slot.

A small file of its own in shared memory. Word 0 is the active word (epoch and slot in one, so that both change at once), written by
control alone. Each worker has a row of its own in its own cache lines: who it is, one count of requests in flight per slot, the last epoch
it acknowledged, its heartbeat, since when it computes in which slot; written by that worker alone, and by `clear_dead` once the kernel says
that the worker has ended. A row that names no process says nothing; whoever takes it clears what lies there. Opening registers the process
for the barrier that the block was created with. The protocol over these words is in `slots`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
from pathlib import Path
from typing import Final

import msgspec

from node_agent.device import checked
from node_agent.device.membarrier import Kind, Membarrier
from node_agent.device.process import ProcessId, boot_id, has_ended, is_running, pid_of, this_process
from node_agent.device.words import CACHE_LINE, WORD, words
from node_agent.refusal import Refusal

FORMAT: Final = "raftmeta-control-1"
MAX_WORKERS: Final = 64
SLOTS: Final = 2
NO_SLOT: Final = 255  # nothing serves yet

_PAGE: Final = 4096
_ROW: Final = CACHE_LINE // WORD  # words per row; the active word has a row of its own
_SIZE: Final = _PAGE * 4
ACTIVE: Final = 0  # index of the active word
_PID, _START, _COUNTS, _ACKNOWLEDGED, _HEARTBEAT, _SINCE = 0, 1, 2, 2 + SLOTS, 3 + SLOTS, 4 + SLOTS  # words of a row
assert _SINCE + SLOTS <= _ROW


class _Header(msgspec.Struct, frozen=True):
    format: str
    block_id: str
    boot_id: str
    barrier: int


class WorkerRow(msgspec.Struct, frozen=True):
    """One look at a worker's row; the words are read one after another while the worker runs."""

    index: int
    process: ProcessId
    in_flight: tuple[int, ...]  # per slot
    acknowledged: int  # epoch
    heartbeat_ns: int  # the worker's monotonic clock, which all processes of a machine share
    since_ns: tuple[int, ...]  # per slot, by the same clock: when what computes there began, in the gate or beside it; 0 while nothing does


def pack_active(slot: int, epoch: int) -> int:
    return epoch << 8 | slot


def unpack_active(word: int) -> tuple[int, int]:
    """(slot, epoch)"""
    return word & 0xFF, word >> 8


def row_start(worker_index: int) -> int:
    """Index of the first word of a worker's row."""
    if not 0 <= worker_index < MAX_WORKERS:
        raise ValueError(f"worker {worker_index} is outside 0..{MAX_WORKERS - 1}")
    return _ROW * (1 + worker_index)


def count_index(worker_index: int, slot: int) -> int:
    return row_start(worker_index) + _COUNTS + slot


def since_index(worker_index: int, slot: int) -> int:
    return row_start(worker_index) + _SINCE + slot


class ControlBlock:
    """Use `create` (the supervisor, once per start of the agent) or `open` (everyone)."""

    def __init__(self, path: Path, fd: int, header: _Header, barrier: Membarrier) -> None:
        self.path = path
        self.block_id = header.block_id
        self._header = header
        self.barrier = barrier
        self._fd = fd
        self._mapping = mmap.mmap(fd, _SIZE)
        self.words = words(self._mapping, _PAGE, _ROW * (1 + MAX_WORKERS))

    @classmethod
    def create(cls, path: Path, mode: int = 0o660, ours: bool = False) -> ControlBlock:
        """A fresh block without active slot in place of any older one, unless a worker of that one still runs.

        `ours`: nobody else makes files of this name, so a plain one of this user that nobody has locked is replaced whatever it holds.

        Raises Refusal worker_alive, control_in_use, foreign_control_block when the path holds something else, or barrier_unavailable.
        """
        _refuse_older_in_use(path, ours)
        barrier = Membarrier()
        header = _Header(FORMAT, secrets.token_hex(8), boot_id(), barrier.kind)
        fresh = path.with_name(f".{path.name}.{header.block_id}")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            os.fchmod(fd, mode)
            os.posix_fallocate(fd, 0, _SIZE)
            os.pwrite(fd, checked.encode(header, _PAGE), 0)
            os.pwrite(fd, pack_active(NO_SLOT, 0).to_bytes(WORD, "little"), _PAGE)
            fresh.rename(path)
        except OSError:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        return cls(path, fd, header, barrier)

    @classmethod
    def open(cls, path: Path) -> ControlBlock:
        """Raises Refusal foreign_control_block, or barrier_unavailable when this process cannot take part in the block's barrier."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            header = _checked_header(path, fd)
            if header.boot_id != boot_id():
                raise Refusal("foreign_control_block", f"control block {path}", f"boot {boot_id()}", f"boot {header.boot_id}")
            return cls(path, fd, header, Membarrier(Kind(header.barrier)))
        except BaseException:
            os.close(fd)
            raise

    def lock_control(self) -> None:
        """Become the one process that writes the active word, until this object is closed. Raises Refusal control_in_use."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise Refusal("control_in_use", f"control block {self.path}", "no other control process", "one that holds its lock") from cause

    def mend_header(self) -> bool:
        """Write the header again when it is not as it was when this process opened the block. True when it was not."""
        with memoryview(self._mapping) as memory:
            return checked.mend(memory, self._header, _PAGE)

    def serve_nothing(self) -> None:
        """Nobody enters a slot until the next switch. While no control process has the lock."""
        self.words[ACTIVE] = pack_active(NO_SLOT, unpack_active(self.words[ACTIVE])[1] + 1)

    def active(self) -> tuple[int, int]:
        """(slot, epoch); slot is NO_SLOT before the first switch."""
        return unpack_active(self.words[ACTIVE])

    def row(self, worker_index: int) -> WorkerRow | None:
        """None when no worker is attached there."""
        start = row_start(worker_index)
        row = self.words[start : start + _ROW].tolist()
        if not row[_PID] or not row[_START]:
            return None
        return WorkerRow(
            index=worker_index,
            process=ProcessId(row[_PID], row[_START]),
            in_flight=tuple(row[_COUNTS : _COUNTS + SLOTS]),
            acknowledged=row[_ACKNOWLEDGED],
            heartbeat_ns=row[_HEARTBEAT],
            since_ns=tuple(row[_SINCE : _SINCE + SLOTS]),
        )

    def is_empty(self, worker_index: int) -> bool:
        """The row is nobody's: both words of its name are zero. One flipped bit makes at most one of a worker's so."""
        start = row_start(worker_index)
        return not self.words[start + _PID] and not self.words[start + _START]

    def attached(self) -> tuple[WorkerRow, ...]:
        return tuple(row for row in map(self.row, range(MAX_WORKERS)) if row is not None)

    def attach(self, worker_index: int) -> None:
        """Take an empty row for this process. Raises Refusal worker_alive while the row names another, running or not yet cleared."""
        row = self.row(worker_index)
        if row is not None:
            state = "running" if is_running(row.process) else "ended, but not cleared"
            raise Refusal("worker_alive", f"worker {worker_index}", "an empty row", f"{row.process}, {state}")
        process = this_process()
        start = row_start(worker_index)
        self._clear(worker_index)  # nobody looks at what an empty row holds, so it may have rotted
        self.words[start + _START] = process.start_ticks
        self.words[start + _PID] = process.pid  # last: a row counts as attached from here on

    def detach(self, worker_index: int) -> None:
        """Give the row back; only its own worker, with nothing in flight."""
        row = self.row(worker_index)
        if row is None or row.process != this_process() or any(row.in_flight):
            raise Refusal("slot_busy", f"worker {worker_index}", "own row with nothing in flight", f"{row}")
        self._clear(worker_index)

    def acknowledge(self, worker_index: int, epoch: int) -> None:
        self.words[row_start(worker_index) + _ACKNOWLEDGED] = epoch

    def beat(self, worker_index: int, now_ns: int) -> None:
        self.words[row_start(worker_index) + _HEARTBEAT] = now_ns

    def clear_dead(self, worker_index: int, pidfd: int) -> None:
        """Forget what an ended worker had in flight. Its pidfd must say that it ended: a worker that hangs still reads its slot."""
        row = self.row(worker_index)
        if row is None:
            return
        subject = f"worker {worker_index}, {row.process}"
        if not has_ended(pidfd) or is_running(row.process):
            raise Refusal("worker_alive", subject, "an ended process", "a running one")
        pid = pid_of(pidfd)
        if pid not in (-1, row.process.pid):
            raise Refusal("worker_alive", subject, f"a pidfd of {row.process.pid}", f"one of {pid}")
        self._clear(worker_index)

    def close(self) -> None:
        if self._fd >= 0:
            self.words.release()
            self._mapping.close()
            os.close(self._fd)
            self._fd = -1

    def _clear(self, worker_index: int) -> None:
        start = row_start(worker_index)
        self.words[start + _PID] = 0
        for word in range(start + 1, start + _ROW):
            self.words[word] = 0


def _checked_header(path: Path, fd: int) -> _Header:
    size = os.fstat(fd).st_size
    header = checked.read(os.pread(fd, _PAGE, 0), _Header) if size == _SIZE else None
    if header is None or header.format != FORMAT:
        found = f"{size} bytes of something else, which is left alone" if header is None else header.format
        raise Refusal("foreign_control_block", f"control block {path}", f"{FORMAT}, or no file", found)
    return header


def _is_free(path: Path, fd: int) -> bool:
    """A plain file of this user. Raises Refusal control_in_use where somebody has its lock."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        raise Refusal("control_in_use", f"control block {path}", "no other control process", "one that holds its lock") from cause
    return True


def _refuse_older_in_use(path: Path, ours: bool) -> None:
    """Workers of an older block may still read the slots: they must have ended before a new block forgets them."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        header = _checked_header(path, fd)
    except Refusal:
        if not ours or not _is_free(path, fd):
            raise
        return  # its rows are not believed either; a worker that is left had a supervisor, whose lock on the store is ours by now
    finally:
        os.close(fd)
    if header.boot_id != boot_id():
        return  # nothing of that boot runs
    old = ControlBlock.open(path)
    try:
        for row in old.attached():
            if is_running(row.process):
                raise Refusal("worker_alive", f"control block {path}", "no running worker", f"worker {row.index}, {row.process}")
    finally:
        old.close()
