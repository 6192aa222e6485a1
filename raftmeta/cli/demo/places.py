"""Where the demo puts its files: a work directory, and a directory in memory for the agents' arenas. Both are its own and go with it.

A demo that was killed cannot clean up after itself; the next one removes what it left in memory, known by the id of a process that is gone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raftmeta.cli.exits import UsageFault
from raftmeta.cli.output import size

MEMORY = Path("/dev/shm")
PREFIX = "raftmeta-demo-"
STOPPED = "stopped"  # a file that says why; its directory keeps the logs
_COPIES_ON_DISK = 6  # two further versions, and a store of all that changed in each of two agents
_COPIES_IN_MEMORY = 6  # two slots with a quarter of room, two agents, rounded up
_ROOM_BYTES = 300 << 20  # journals, logs


@contextmanager
def work_directory(named: Path | None, weights_bytes: int) -> Iterator[Path]:
    """The named one, which stays, or a temporary one, of which the logs of a stopped demo stay. Raises UsageFault."""
    if named is not None:
        if named.exists() and (not named.is_dir() or any(named.iterdir())):
            raise UsageFault(f"{named} is not an empty directory", "name one that does not exist yet")
        named.mkdir(parents=True, exist_ok=True)
        _check_room(named, weights_bytes)
        yield named.resolve()
        return
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        _check_room(path, weights_bytes)
        yield path
    finally:
        stopped = (path / STOPPED).exists()
        for child in path.iterdir():
            if child.is_dir() and not (stopped and child.name == "logs"):
                shutil.rmtree(child, ignore_errors=True)
        if not stopped:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def arena_directory(work: Path, weights_bytes: int, memory: Path = MEMORY) -> Iterator[Path]:
    """In shared memory when there is room for four slots; else, as in a container with 64 MB of it, in the work directory."""
    sweep(memory)
    if not memory.is_dir() or not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < _COPIES_IN_MEMORY * weights_bytes:
        path = work / "arenas"
        path.mkdir()
    else:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=memory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(memory: Path) -> None:
    """Remove arena directories of demos whose process is gone."""
    for path in memory.glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)


def _check_room(path: Path, weights_bytes: int) -> None:
    free, needed = shutil.disk_usage(path).free, _COPIES_ON_DISK * weights_bytes + _ROOM_BYTES
    if free < needed:
        raise UsageFault(f"{path} has {size(free)} free, the demo needs {size(needed)}", "choose another place with --dir")
