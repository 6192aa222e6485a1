"""Power loss and death between any two calls: what was acknowledged comes back, and two suffixes never mix (D1, D2, D3)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from raftmeta.durable import DiskFailed, File
from raftmeta.log.journal import Journal, JournalCorrupt
from raftmeta.log.records import Header, cluster_digest, encode_header
from tests.support.journals import DIRECTORY, SEGMENT_BYTES, Expected, everything, fill, open_journal, payload, segment_paths, written
from tests.support.memory_disk import MemoryDisk, PowerLost


class Owner:
    """Drives a journal and its expectation together."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk
        self.expected = Expected()
        self.journal = open_journal(disk, tail_bytes=300)
        self.now = 0.0

    def append(self, count: int, size: int = 100) -> None:
        for _ in range(count):
            index, term = self.expected.last_index + 1, self.expected.hard[0]
            self.expected.log.append((term, payload(index, term, size)))
            self.journal.append(index, term, payload(index, term, size))

    def vote(self, term: int, voted_for: str) -> None:
        self.expected.hard = (term, voted_for)
        self.journal.set_hard_state(term, voted_for)

    def cut(self, index: int) -> None:
        self.expected.cut(index)
        self.journal.truncate_from(index)

    def sync(self) -> None:
        self.journal.sync()
        self.expected.synced()

    def compact(self, index: int) -> None:
        self.expected.compacted = max(self.expected.compacted, index)
        self.journal.compact_through(index)

    def reset(self, index: int, term: int) -> None:
        self.expected.reset(index, term)
        self.journal.reset(index, term)
        self.expected.synced()

    def quiet(self) -> None:
        self.now += 1.0
        self.journal.idle(self.now)
        self.journal.idle(self.now + 0.5)

    def come_back(self) -> None:
        self.journal = open_journal(self.disk, tail_bytes=300)
        self.expected.recovered(self.journal)


def script(owner: Owner) -> None:
    """Elections, batches over segment borders, a conflict, compaction, a snapshot from elsewhere."""
    owner.vote(1, "a")
    owner.append(3)
    owner.sync()
    owner.append(20, size=300)
    owner.sync()
    owner.quiet()
    owner.vote(2, "")
    owner.cut(9)
    owner.append(4)
    owner.sync()
    owner.append(30, size=200)
    owner.sync()
    owner.compact(12)
    owner.vote(3, "c")
    owner.cut(owner.expected.last_index)
    owner.cut(owner.expected.last_index - 1)
    owner.append(1)
    owner.sync()
    owner.append(2)
    owner.sync()
    owner.reset(90, 3)
    owner.append(2)
    owner.sync()
    owner.quiet()


def calls_of_the_script() -> int:
    disk = MemoryDisk()
    owner = Owner(disk)
    before = disk.calls
    script(owner)
    return disk.calls - before


def run_until(call: int, disk: MemoryDisk) -> Owner:
    owner = Owner(disk)
    disk.crash_at(call)
    with pytest.raises(PowerLost):
        script(owner)
    return owner


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_power_loss_before_any_call_of_a_run_loses_nothing_acknowledged(keep: float) -> None:
    total = calls_of_the_script()
    assert total > 100
    for call in range(total):
        disk = MemoryDisk(call)
        owner = run_until(call, disk)
        disk.crash(keep=keep)
        owner.come_back()
        owner.append(3)
        owner.sync()
        disk.crash(keep=keep)
        owner.come_back()


def test_power_loss_in_the_recovery_from_power_loss_loses_nothing_acknowledged() -> None:
    total = calls_of_the_script()
    for call in range(0, total, 4):
        for second in range(0, 20, 3):
            disk = MemoryDisk(call * 31 + second)
            owner = run_until(call, disk)
            disk.crash()
            disk.crash_at(second)
            try:
                open_journal(disk)
            except PowerLost:
                pass
            disk.crash()
            owner.come_back()


def test_death_of_the_process_between_any_two_calls_loses_nothing_acknowledged() -> None:
    for call in range(0, calls_of_the_script(), 2):
        disk = MemoryDisk(call)
        owner = run_until(call, disk)
        disk.kill()
        owner.come_back()
        disk.crash(keep=0.0)  # what was read after the death has become durable
        owner.come_back()


def test_d2_the_first_start_can_be_cut_off_anywhere() -> None:
    call = 0
    while True:
        disk = MemoryDisk(call)
        disk.crash_at(call)
        try:
            open_journal(disk)
            break
        except PowerLost:
            disk.crash()
        journal = open_journal(disk)
        assert (journal.last_index, journal.term) == (0, 0)
        call += 1
    assert call > 20


def test_d3_without_the_list_of_segments_in_both_slots_before_files_go_a_damaged_slot_would_lose_records() -> None:
    """After a change of the list either slot alone names every segment; after a vote only the mirror, one sync later, makes it so."""
    disk = MemoryDisk()
    owner = Owner(disk)
    owner.vote(1, "a")
    owner.append(60)
    owner.sync()
    owner.compact(40)
    for slot in (0, 1):
        damaged = disk.clone()
        damaged.flip(DIRECTORY / "hard-state", slot * (128 << 10) + 60)
        assert everything(open_journal(damaged)) == everything(owner.journal)


# a disk that fails


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_d4_an_error_inside_a_write_or_sync_is_final(call: str, number: int) -> None:
    disk = MemoryDisk()
    journal = written(disk)
    fill(journal, 10, 12)
    disk.fail(call, number)
    with pytest.raises(DiskFailed):
        journal.sync()
    assert journal.synced_index == 9
    uses: list[Callable[[], Any]] = [
        journal.sync,
        lambda: journal.append(13, 1, b""),
        lambda: journal.truncate_from(3),
        lambda: journal.has_room(1),
        lambda: journal.idle(0.0),
        lambda: journal.compact_through(3),
        lambda: journal.reset(20, 1),
    ]
    for use in uses:
        with pytest.raises(DiskFailed, match="an earlier error"):
            use()
    journal.close()


class ElidingDisk(MemoryDisk):
    """Skips a write of the bytes that are there already, as if opening did not write the newest records once more."""

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, offset: int) -> None:
        if self.pread(file, len(data), offset) != data:
            super().pwrite(file, data, offset)


@pytest.mark.parametrize("kind", [MemoryDisk, ElidingDisk])
def test_d4_records_seen_after_a_failed_sync_are_made_durable_before_they_count(kind: type[MemoryDisk]) -> None:
    """The kernel shows them, marked clean, although the disk never got them: a sync alone would succeed and do nothing."""
    disk = kind()
    journal = written(disk)
    fill(journal, 10, 12)
    disk.fail("fdatasync", errno.EIO)
    with pytest.raises(DiskFailed):
        journal.sync()
    disk.kill()
    journal = open_journal(disk)
    assert (journal.last_index, journal.synced_index) == (12, 12)
    disk.crash(keep=0.0)
    if kind is MemoryDisk:
        assert open_journal(disk).last_index == 12
    else:
        with pytest.raises(JournalCorrupt):
            open_journal(disk)


def test_d4_a_vote_seen_after_a_failed_sync_is_made_durable_before_it_counts() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.close()
    journal = open_journal(disk)
    journal.set_hard_state(2, "b")
    disk.fail("fdatasync", errno.EIO)
    with pytest.raises(DiskFailed):
        journal.sync()
    disk.kill()
    seen = open_journal(disk)
    disk.crash(keep=0.0)
    after = open_journal(disk)
    assert (after.term, after.voted_for) == (seen.term, seen.voted_for) == (2, "b")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_a_crash_in_a_cut_where_the_records_are_leaves_all_of_them_or_none(keep: float, seed: int) -> None:
    lengths = set()
    for call in range(40):
        disk = MemoryDisk(seed)
        journal = written(disk, batches=10)
        journal.idle(0.0)
        journal.idle(1.0)
        before = everything(journal)
        journal.set_hard_state(2, "")
        journal.truncate_from(6)
        disk.crash_at(call)
        try:
            journal.sync()
            ended = True
        except PowerLost:
            ended = False
        disk.crash(keep)
        again = open_journal(disk)
        lengths.add(again.last_index)
        assert everything(again) == before[: again.last_index]
        fill(again, again.last_index + 1, 32, term=3)
        again.sync()
        assert open_journal(disk).last_index == 32
        if ended:
            break
    assert ended and lengths == {30, 5}


def test_a_file_that_the_list_does_not_name_is_removed_and_others_are_left_alone() -> None:
    disk = MemoryDisk()
    written(disk).close()
    disk.put(DIRECTORY / "segment-000000000099", encode_header(Header(cluster_digest(""), 99, 10, 1, 0, SEGMENT_BYTES)))  # and no record
    for name in ("spare-000000000098.tmp", "spare-000000000097", "hard-state.tmp", "lost-segment-1", "notes"):
        disk.put(DIRECTORY / name, b"left over")
    journal = open_journal(disk)
    names = set(disk.listdir(DIRECTORY))
    assert {"lost-segment-1", "notes"} <= names
    assert not names & {"segment-000000000099", "spare-000000000098.tmp", "spare-000000000097", "hard-state.tmp"}
    assert journal.last_index == 9
    assert len(segment_paths(disk)) == 1


# any order of everything


class AnyOrder(RuleBasedStateMachine):
    """The journal against a plain list, with the power going at any call."""

    @initialize(seed=st.integers(0, 1 << 30))
    def start(self, seed: int) -> None:
        self.owner = Owner(MemoryDisk(seed))

    def guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except PowerLost:
            self.owner.disk.crash()
            self.owner.come_back()
        else:
            self.owner.expected.assert_same(self.owner.journal)

    @rule(calls=st.integers(0, 25))
    def plan_power_loss(self, calls: int) -> None:
        self.owner.disk.crash_at(calls)

    @rule(count=st.integers(1, 30), size=st.sampled_from([0, 30, 500]))
    def append(self, count: int, size: int) -> None:
        self.guarded(lambda: self.owner.append(count, size))

    @rule()
    def sync(self) -> None:
        self.guarded(self.owner.sync)

    @rule(count=st.integers(1, 5))
    def commit(self, count: int) -> None:
        def commit() -> None:
            self.owner.append(count)
            self.owner.sync()

        self.guarded(commit)

    @rule(voted_for=st.sampled_from(["", "a", "b"]))
    def vote(self, voted_for: str) -> None:
        self.owner.vote(self.owner.expected.hard[0] + 1, voted_for)

    @precondition(lambda self: self.owner.journal.last_index >= self.owner.journal.first_index)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        journal: Journal = self.owner.journal
        self.vote("")
        index = data.draw(st.integers(journal.first_index, journal.last_index))
        self.guarded(lambda: self.owner.cut(index))

    @rule(back=st.integers(0, 40))
    def compact(self, back: int) -> None:
        self.guarded(lambda: self.owner.compact(max(0, self.owner.journal.synced_index - back)))

    @rule(ahead=st.integers(0, 5))
    def reset(self, ahead: int) -> None:
        index = self.owner.expected.last_index + ahead
        self.guarded(lambda: self.owner.reset(index, self.owner.expected.hard[0]))

    @rule()
    def quiet(self) -> None:
        self.guarded(self.owner.quiet)

    @rule()
    def power_loss(self) -> None:
        self.owner.disk.crash()
        self.owner.come_back()

    @rule()
    def death(self) -> None:
        self.owner.disk.kill()
        self.owner.come_back()


AnyOrder.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestAnyOrderOfCallsAndCrashes = AnyOrder.TestCase
