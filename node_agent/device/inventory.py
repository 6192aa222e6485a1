"""Which arenas lie in a directory of shared memory, what each is, and how to give back those that nobody needs.

Arenas outlive their agents on purpose: the next start serves from them without loading anything. So a file that nobody maps is not waste;
it is waste when no record names it, when the machine was booted since, or when its format is another build's. Nothing here maps an arena:
headers are read, files are removed. Looking takes no lock, or an agent that starts at that moment would find its arena in use. A file that
is no arena at all is listed and left alone.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from node_agent.device import checked, mapped
from node_agent.device.arena import FORMAT, ArenaHeader, ArenaUse
from node_agent.device.port import EMPTY_RECORD, SLOTS, SlotRecord
from node_agent.device.process import boot_id
from node_agent.refusal import Refusal

PATTERN: Final = "raftmeta-*.arena"
_PAGE: Final = 4096


class ArenaState(StrEnum):
    IN_USE = "in use"  # a process maps it, the writer among them
    KEPT = "kept"  # nobody maps it; its agent serves from it when it starts again
    EARLIER_BOOT = "earlier boot"  # its bytes were verified before the machine was booted: never used again
    OTHER_FORMAT = "other format"  # of another build of the agent, which cannot read it back into use
    FOREIGN = "foreign"  # no arena, or its header does not check


RECLAIMABLE: Final = frozenset({ArenaState.KEPT, ArenaState.EARLIER_BOOT, ArenaState.OTHER_FORMAT})


class ArenaFile(msgspec.Struct, frozen=True):
    path: Path
    state: ArenaState
    size_bytes: int  # memory that removing it gives back
    use: ArenaUse = ArenaUse()
    detail: str = ""  # who owns it, or why it is what it is
    slots: tuple[SlotRecord, ...] = ()  # of an arena of this format and boot


class _AnyHeader(msgspec.Struct, frozen=True):
    """What every format of ours has."""

    format: str


def find(directory: Path) -> tuple[ArenaFile, ...]:
    """Every file that is named like an arena, by name. One that goes away meanwhile is left out."""
    return tuple(found for path in sorted(directory.glob(PATTERN)) if (found := look(path)) is not None)


def look(path: Path) -> ArenaFile | None:
    """One file, None when it is not there."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    size = status.st_blocks * 512
    if not stat.S_ISREG(status.st_mode):
        return ArenaFile(path, ArenaState.FOREIGN, size, detail="no plain file")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as cause:
        return ArenaFile(path, ArenaState.FOREIGN, size, detail=cause.strerror or str(cause))
    try:
        return _judge(path, fd, size, in_use=mapped.is_mapped(fd))
    finally:
        os.close(fd)


def reclaim(path: Path) -> int:
    """Remove an arena that nobody uses, with what lies beside it. Gives the bytes freed, 0 when somebody uses it or it is no arena."""
    with _alone(path) as found:
        if found is None or found.state not in RECLAIMABLE:
            return 0
        path.unlink()
    for beside in _beside(path):
        beside.unlink(missing_ok=True)
    return found.size_bytes


def abandoned(directory: Path, store_dir: Path, node: str, named: Collection[str]) -> tuple[ArenaFile, ...]:
    """Arenas of this node that its record does not name: it ended between giving a deployment up and giving the memory back."""
    return tuple(
        found
        for found in find(directory)
        if found.use == ArenaUse.of(store_dir, node, found.use.deployment) and found.path.name not in named and found.state in RECLAIMABLE
    )


def with_idle_arenas(refusal: Refusal, own: Path) -> Refusal:
    """Names the memory that other agents left behind, where there is too little for this one."""
    idle = [item for item in find(own.parent) if item.state in RECLAIMABLE and item.path != own]
    if refusal.kind != "no_headroom" or not idle:
        return refusal
    size = sum(item.size_bytes for item in idle)
    more = f"{size} bytes lie in {len(idle)} arenas that no process uses (`raftmeta agent reclaim --all-nodes --kept --dry-run` lists them)"
    return Refusal(refusal.kind, refusal.subject, refusal.expected, f"{refusal.found}; {more}", refusal.phase)


def _judge(path: Path, fd: int, size: int, in_use: bool) -> ArenaFile:
    page = os.pread(fd, _PAGE, 0)
    any_header = checked.read(page, _AnyHeader)
    if any_header is None or not any_header.format.startswith("raftmeta-arena-"):
        return ArenaFile(path, ArenaState.FOREIGN, size, detail="no header that checks")
    header = checked.read(page, ArenaHeader)
    if header is None or header.format != FORMAT:
        state = ArenaState.IN_USE if in_use else ArenaState.OTHER_FORMAT
        return ArenaFile(path, state, size, detail=any_header.format)
    if header.boot_id != boot_id():
        return ArenaFile(path, ArenaState.EARLIER_BOOT, size, header.use, f"boot {header.boot_id}")
    slots = tuple(checked.read(os.pread(fd, _PAGE, _PAGE * (1 + slot)), SlotRecord) or EMPTY_RECORD for slot in range(SLOTS))
    state = ArenaState.IN_USE if in_use else ArenaState.KEPT
    return ArenaFile(path, state, size, header.use, f"last written by {header.owner}", slots)


@contextmanager
def _alone(path: Path) -> Iterator[ArenaFile | None]:
    """The file, while nobody else can begin to use it; None when that cannot be had."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or not mapped.exclude(fd):
            yield None
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield _judge_alone(path, fd)
    finally:
        os.close(fd)


def _judge_alone(path: Path, fd: int) -> ArenaFile | None:
    """What the file is, for the one who holds both locks; None when the path names another file by now."""
    status = os.fstat(fd)
    if not status.st_nlink:
        return None
    return _judge(path, fd, status.st_blocks * 512, in_use=False)


def _beside(path: Path) -> Iterator[Path]:
    """Snapshots of its slots; the control block is replaced with the next start and is a page in size."""
    yield from path.parent.glob(f"{path.name}.slot*.json")
    yield path.with_suffix(".control")
