"""A step that fails leaves nothing behind: what it had appended was synced for nobody and must not be found at the next start."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from raftmeta.log.journal import Journal
from raftmeta.log.peers import PeerEvent
from raftmeta.log.replica import Transmit
from raftmeta.log.runner import Ends, Identity, Runner
from tests.support.journals import everything, fill, open_journal
from tests.support.memory_disk import MemoryDisk
from tests.support.trio import Trio


class Silent:
    """A network without anybody."""

    def start(self) -> None: ...
    def poll(self, timeout_s: float) -> list[PeerEvent]:
        return []

    def send(self, peer: str, message: object) -> bool:
        return False

    def flush(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def test_a_journal_that_is_closed_after_a_fault_keeps_what_was_synced_and_nothing_more() -> None:
    for sync, last in ((True, 5), (False, 3)):
        disk = MemoryDisk(1)
        journal = open_journal(disk)
        journal.set_hard_state(1, "a")
        fill(journal, 1, 3)
        journal.sync()
        journal.set_hard_state(2, "b")
        fill(journal, 4, 5, term=2)
        journal.close(sync=sync)
        again = open_journal(disk)
        assert again.last_index == last and (again.term, again.voted_for) == ((2, "b") if sync else (1, "a"))
        assert len(everything(again)) == last


def test_what_a_failed_step_had_appended_is_not_there_at_the_next_start() -> None:
    box = Trio().boxes["m2"]
    failed = threading.Event()

    def step(events: Sequence[PeerEvent], transmit: Transmit) -> None:
        journal.set_hard_state(7, "")
        fill(journal, journal.last_index + 1, journal.last_index + 1, term=7)
        raise AssertionError("what it was sent could not be taken")

    disk = MemoryDisk(1)
    journal: Journal = open_journal(disk)
    box.replica.step = step  # type: ignore[method-assign]
    runner = Runner(Identity("m2", "c"), box.replica, journal, Silent(), Ends(lambda fault: failed.set(), lambda why: None))
    runner.start()
    assert failed.wait(10.0)
    runner.stop()
    again = open_journal(disk)
    assert (again.last_index, again.term) == (0, 0)
