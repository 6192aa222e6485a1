"""When a snapshot is due and how much of the journal stays behind it: what a start has to apply again, and the disk, are bounded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from raftmeta.core.state import State
from raftmeta.log.configuration import Configuration
from raftmeta.log.engine import Engine
from raftmeta.log.exchange import WORTH_BYTES, ExchangeSettings, SnapshotExchange
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.snapshots import SnapshotStore
from raftmeta.log.spares import InlineWorker
from tests.support.memory_disk import MemoryDisk

ENTRY = bytes(1 << 20)
SEGMENT_BYTES = 4 << 20  # about three entries


class Log:
    """A journal of large entries and the snapshots beside it."""

    def __init__(self, settings: ExchangeSettings, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or MemoryDisk()
        self.journal = Journal.open(self.disk, Path("/data/journal"), segment_bytes=SEGMENT_BYTES, tuning=Tuning())
        store = SnapshotStore(self.disk, Path("/data/snapshots"))
        self.exchange = SnapshotExchange(store, InlineWorker(), self.journal, settings)
        found = store.load(1, list)
        self.exchange.recovered(found[0] if found else None)
        if self.journal.term == 0:
            self.journal.set_hard_state(1, "")

    def append(self, state_bytes: int = 0) -> None:
        self.journal.append(self.journal.last_index + 1, 1, ENTRY)
        self.journal.sync()
        self.poll(state_bytes)

    def poll(self, state_bytes: int = 0) -> None:
        index = self.journal.last_index
        engine = cast("Engine", SimpleNamespace(applied_index=index, configuration_at=lambda index: Configuration()))
        self.exchange.poll(engine, msgspec.structs.replace(State.empty(), size_bytes=state_bytes), 0.0)

    def until_snapshot(self, state_bytes: int = 0) -> int:
        """MiB that were written before one was taken."""
        before = self.exchange.index
        for written in range(1, 400):
            self.append(state_bytes)
            if self.exchange.index > before:
                return written
        raise AssertionError("no snapshot within 400 MiB")


@pytest.mark.parametrize(
    ("state_mib", "expected_mib"),
    [(0, WORTH_BYTES >> 20), (150, 50), (10_000, 256)],
)
def test_a_snapshot_is_due_when_applying_the_journal_again_costs_more_than_writing_the_state(state_mib: int, expected_mib: int) -> None:
    log = Log(ExchangeSettings())
    found = log.until_snapshot(state_mib << 20)
    assert expected_mib - 2 <= found <= expected_mib
    assert abs(log.until_snapshot(state_mib << 20) - found) <= SEGMENT_BYTES >> 20


def test_a_restart_does_not_put_the_next_snapshot_off() -> None:
    settings = ExchangeSettings()
    log = Log(settings)
    for _ in range(20):
        log.append()
    log.journal.close()
    again = Log(settings, log.disk)
    assert 20 + again.until_snapshot() <= (WORTH_BYTES >> 20) + (SEGMENT_BYTES >> 20)


def test_a_journal_that_takes_much_more_of_the_disk_than_it_holds_makes_a_snapshot_due_and_goes_with_it() -> None:
    """Each cut of more than a mebibyte ends a segment early."""
    log = Log(ExchangeSettings(journal_bytes=16 << 20))
    for term in range(2, 12):
        first = log.journal.last_index + 1
        for index in (first, first + 1):
            log.journal.append(index, log.journal.term, ENTRY)
        log.journal.append(first + 2, log.journal.term, bytes(1 << 19))
        log.journal.sync()
        log.journal.set_hard_state(term, "")
        log.journal.truncate_from(first + 1)
        log.journal.append(first + 1, term, b"small")
        log.journal.sync()
        log.poll()
    assert log.exchange.index > 0
    assert log.journal.unused_bytes < 16 << 20


def test_what_stays_for_slow_followers_is_bounded_in_entries_and_in_bytes() -> None:
    by_bytes = Log(ExchangeSettings(keep_bytes=8 << 20))
    by_bytes.until_snapshot()
    assert 8 << 20 <= by_bytes.journal.bytes <= (8 << 20) + SEGMENT_BYTES
    by_entries = Log(ExchangeSettings(keep_entries=3))
    by_entries.until_snapshot()
    assert by_entries.journal.last_index - by_entries.journal.first_index <= 3 + SEGMENT_BYTES // len(ENTRY)
    assert by_entries.exchange.index >= by_entries.journal.first_index - 1
