"""A member that starts with nothing does not vote until it holds again what its predecessor may have acknowledged.

A majority that counts a wiped disk is none: the member promised to hold entries and a vote that it no longer knows. So an empty directory
without a marker is marked as joining, durably and before its journal exists; the mark goes once a leader's commit index of the leader's own
term is applied here, since everything that was ever acknowledged with this member's help is then here again.
"""

from __future__ import annotations

from pathlib import Path

from raftmeta.durable import Disk, write_file

JOINING_NAME = "joining"


def mark_if_new(disk: Disk, data_dir: Path, has_marker: bool) -> bool:
    """Whether this member may not vote yet. Call before the journal is opened."""
    path = data_dir / JOINING_NAME
    if disk.exists(path):
        return True
    journal = data_dir / "journal"
    if has_marker or (disk.exists(journal) and disk.listdir(journal)):
        return False
    mark(disk, data_dir)
    return True


def mark(disk: Disk, data_dir: Path) -> None:
    """From here on it has no vote, until `clear`. Twice is fine."""
    disk.make_directory(data_dir)
    if not disk.exists(data_dir / JOINING_NAME):
        write_file(disk, data_dir / JOINING_NAME, b"joining\n")


def clear(disk: Disk, data_dir: Path) -> None:
    """It holds everything again. Twice is fine."""
    disk.unlink(data_dir / JOINING_NAME)
    disk.sync_directory(data_dir)
