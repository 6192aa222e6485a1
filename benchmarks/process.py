"""What a process holds and what a directory takes, read from outside."""

from __future__ import annotations

from pathlib import Path


def rss_mb(pid: int) -> float:
    """Resident memory in MB of 10**6 bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"process {pid} shows no resident memory")


def disk_mb(directory: Path) -> float:
    """Blocks allocated below the directory, in MB; a file that goes away meanwhile does not count."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total / 1e6
