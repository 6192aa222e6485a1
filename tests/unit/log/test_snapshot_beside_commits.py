"""Taking a snapshot keeps no commit waiting: it is synced piece by piece, pauses after each chunk, and old files go in the worker."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

from raftmeta.core.apply import apply
from raftmeta.core.commands import SCHEMA, Command
from raftmeta.core.state import State
from raftmeta.log.configuration import Configuration
from raftmeta.log.engine import Engine
from raftmeta.log.exchange import ExchangeSettings, SnapshotExchange
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.snapshot_file import SYNC_BYTES
from raftmeta.log.snapshots import SnapshotStore
from raftmeta.log.spares import Done, Handle
from tests.support.memory_disk import MemoryDisk
from tests.support.trio import publish

T = TypeVar("T")
DIRECTORY = Path("/data/snapshots")


class LaterWorker:
    """Holds jobs back until a test runs them; notes which calls of the disk are made in them."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.busy = False

    def submit(self, fn: Callable[[], T], /) -> Handle[T]:
        ended: list[Done] = []
        self.waiting.append(lambda: ended.append(Done(fn(), None)))
        return cast("Handle[T]", SimpleNamespace(done=lambda: bool(ended), result=lambda: ended[0].result()))

    def run(self) -> None:
        self.busy = True
        for job in self.waiting:
            job()
        self.waiting.clear()
        self.busy = False


def test_a_large_snapshot_is_synced_piece_by_piece() -> None:
    disk = MemoryDisk()
    chunk = bytes(256 << 10)
    SnapshotStore(disk, DIRECTORY).write(1, 1, b"", [chunk] * 50)
    calls = [name for name, file in disk.log if file.startswith("writing-") and name in ("pwrite", "fdatasync", "fsync")]
    syncs = [-1, *(place for place, name in enumerate(calls) if name != "pwrite")]
    assert len(syncs) >= 4
    assert all((later - earlier - 1) * len(chunk) <= SYNC_BYTES + len(chunk) for earlier, later in pairwise(syncs))


def test_older_snapshots_go_in_the_worker_and_a_finished_one_costs_the_log_no_removal() -> None:
    disk, worker = MemoryDisk(), LaterWorker()
    removed: list[bool] = []  # whether in the worker
    journal = Journal.open(disk, Path("/data/journal"), segment_bytes=1 << 20, tuning=Tuning())
    journal.set_hard_state(1, "")
    pauses: list[None] = []
    exchange = SnapshotExchange(
        SnapshotStore(disk, DIRECTORY), worker, journal, ExchangeSettings(entries=10, keep_files=1), lambda: pauses.append(None)
    )
    state = State.empty()
    disk.on_call = lambda name, path: removed.append(worker.busy) if name == "unlink" else None
    for index in range(1, 31):
        state = apply(state, Command(SCHEMA, f"k{index}", "me", "m1", index, publish(f"v{index}"))).state
        journal.append(index, 1, b"\0x")
        journal.sync()
        engine = cast("Engine", SimpleNamespace(applied_index=index, configuration_at=lambda index: Configuration()))
        exchange.poll(engine, state, 0.0)
        worker.run()
        exchange.poll(engine, state, 0.0)
    assert exchange.index == 30
    assert removed == [True, True]
    assert len(pauses) == 3  # small states are one chunk each
    assert len(disk.listdir(DIRECTORY)) == 1
