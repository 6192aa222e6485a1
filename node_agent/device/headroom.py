"""How much memory a file in shared memory may still take, and which setting to change when it is too little.

Asked before anything is allocated: a tmpfs that is larger than the machine, or a control group that is smaller, ends in the kernel's
out-of-memory killer instead of an error.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec

from node_agent.refusal import Refusal


class Limit(msgspec.Struct, frozen=True):
    what: str  # which limit, and the setting that moves it
    free_bytes: int


def require(directory: Path, size: int, limits: tuple[Limit, ...] | None = None) -> None:
    """Raises Refusal no_headroom naming every limit that is in the way."""
    short = [limit for limit in (tuple(find(directory)) if limits is None else limits) if limit.free_bytes < size]
    if short:
        found = "; ".join(f"{limit.free_bytes} bytes left in {limit.what}" for limit in short)
        raise Refusal("no_headroom", f"arena in {directory}", f"{size} bytes", found)


def require_memory(size: int, subject: str, limits: tuple[Limit, ...] | None = None) -> None:
    """For what processes allocate beside the arena, which is allocated already. Raises Refusal no_headroom, phase plan."""
    short = [limit for limit in (tuple(find_memory()) if limits is None else limits) if limit.free_bytes < size]
    if short:
        found = "; ".join(f"{limit.free_bytes} bytes left in {limit.what}" for limit in short)
        raise Refusal("no_headroom", subject, f"{size} bytes beside the arena", found, "plan")


def find(directory: Path) -> Iterator[Limit]:
    """Every limit that holds for a new file in this directory."""
    stats = os.statvfs(directory)
    yield Limit(
        f"the file system of {directory} (mount option size=, docker --shm-size, Kubernetes emptyDir sizeLimit)",
        stats.f_bavail * stats.f_frsize,
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:
        yield Limit("the file size limit of this process (RLIMIT_FSIZE, systemd LimitFSIZE=)", soft)
    yield from find_memory()


def find_memory() -> Iterator[Limit]:
    """Every limit that holds for memory of any kind."""
    yield Limit("the memory of this machine (MemAvailable of /proc/meminfo)", _available_bytes())
    yield from _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise Refusal("no_headroom", "/proc/meminfo", "a line MemAvailable", "none (kernel older than 3.14?)")


def _control_groups(membership: Path, root: Path) -> Iterator[Limit]:
    """Limits of this process's control group and those above it, version 2 (the file names of version 1 differ and are not read)."""
    for line in membership.read_text().splitlines() if membership.exists() else []:
        hierarchy, _, path = line.split(":", 2)
        if hierarchy != "0":
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            maximum, current = _number(group / "memory.max"), _number(group / "memory.current")
            if maximum is not None and current is not None:
                yield Limit(f"control group {group} (memory.max, systemd MemoryMax=, container memory limit)", maximum - current)
            group = group.parent


def _number(file: Path) -> int | None:
    """None when there is no such file or no limit in it."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
