"""A member alone that dies at any call of 300 writes; `python -m tests.scenarios.killed_alone` tries every call, the suite every seventh.

The writes go on undisturbed on one disk. At a call that is tried, a copy of that disk loses its power with nothing un-synced left, and a
member starts on it, leads, and must hold all that was acknowledged until then.
"""

from __future__ import annotations

from pathlib import Path

import pysyncobj.syncobj

from raftmeta.log.exchange import ExchangeSettings
from tests.support.memory_disk import MemoryDisk
from tests.support.scripted_cluster import Members

WRITES = 300
ALONE = ("m1",)
SELDOM = ExchangeSettings(entries=120, keep_entries=2, keep_files=2)  # snapshots: a restart then costs some ten milliseconds
CHANGES = ("create", "preallocate", "pwrite", "fdatasync", "fsync", "rename", "unlink", "make_directory", "sync_directory")


class Deaths:
    def __init__(self, world: Members, every: int) -> None:
        self._world, self._every = world, every
        self.calls = self.tried = 0
        world.victim.disk.on_call = self._on_call

    def _on_call(self, call: str, path: Path) -> None:
        if call not in CHANGES:
            return
        self.calls += 1
        if self.calls % self._every == 0:
            self.tried += 1
            left = self._world.victim.disk.clone()
            left.crash(0.0)
            self._starts_again(left)
            pysyncobj.syncobj.monotonicTime = lambda: self._world.now

    def _starts_again(self, disk: MemoryDisk) -> None:
        """Fails when something that was acknowledged is not there."""
        after = Members(ALONE, exchange=SELDOM)
        after.now, after.victim.disk = self._world.now, disk
        after.acknowledged = dict(self._world.acknowledged)
        after.start()
        after.leader()


def write_and_die(writes: int, every: int, disk: MemoryDisk | None = None) -> Deaths:
    """Raises AssertionError naming what was lost."""
    world = Members(ALONE, disk=disk, exchange=SELDOM)
    world.start()
    world.leader()
    deaths = Deaths(world, every)
    for number in range(writes):
        world.write(f"v{number}")
    assert len(world.acknowledged) == writes
    return deaths


if __name__ == "__main__":
    print(f"{write_and_die(WRITES, every=1).tried} calls of {WRITES} writes, each of them the last one: nothing acknowledged was lost")
