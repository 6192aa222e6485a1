"""One file of a member is an older copy of itself, another member's, or missing: that is noticed before anything is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmeta import codec
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.state import State
from raftmeta.log import recovery
from raftmeta.log.boot import StateLoader, recover
from raftmeta.log.hard_state import HardStateFile, Owner
from raftmeta.log.journal import HardStateCorrupt, Journal, JournalCorrupt, Tuning, WrongCluster, WrongMember
from raftmeta.log.opening import Openers, Whose, open_log
from raftmeta.log.records import BLOCK_BYTES, Known, Mark, decode_mark, encode_mark
from raftmeta.log.snapshots import SnapshotStore
from tests.support.journals import DIRECTORY, everything, fill, open_journal, segment_paths, written
from tests.support.memory_disk import MemoryDisk, PowerLost

HARD_STATE = DIRECTORY / "hard-state"
DATA = Path("/data")
OWNER = Owner("one", "a")
SEGMENT_BYTES = 16 << 10


def quiet(journal: Journal, now: float) -> None:
    journal.idle(now)
    journal.idle(now + 1.0)


def put_back(disk: MemoryDisk, path: Path, old: bytes) -> dict[Path, bytes]:
    """The older copy is in place; what the disk then holds."""
    disk.put(path, old)
    return disk.files()


def written_on() -> tuple[MemoryDisk, Path, bytes]:
    """A disk whose open segment was quiet at record 9 and at 12; its path, and what it held at 9."""
    disk = MemoryDisk()
    journal = written(disk)
    quiet(journal, 0.0)
    path = segment_paths(disk)[-1]
    old = disk.contents(path)
    fill(journal, 10, 12)
    journal.sync()
    quiet(journal, 2.0)
    return disk, path, old


def test_d10_an_older_copy_of_the_open_segment_is_damage_after_a_quiet_moment() -> None:
    disk, path, old = written_on()
    before = put_back(disk, path, old)
    with pytest.raises(JournalCorrupt) as caught:
        open_journal(disk)
    assert (caught.value.index, caught.value.damage.through) == (10, 12)
    assert disk.files() == before


def test_d10_an_older_copy_of_the_open_segment_is_damage_under_writes_without_a_pause() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    path, old = segment_paths(disk)[-1], b""
    for number in range(20):
        fill(journal, 10 + number, 10 + number, size=20)
        journal.sync()
        journal.idle(number / 10)
        old = old or disk.contents(path)
    put_back(disk, path, old)
    with pytest.raises(JournalCorrupt):
        open_journal(disk)


def forget_the_end(disk: MemoryDisk) -> None:
    """The hard state as it is without knowing how far the open segment goes."""
    hard = HardStateFile.load(disk, DIRECTORY)
    rows = [
        row if row.sealed else type(row)(row.serial, row.first_index, row.previous_term, row.previous_crc) for row in hard.state.segments
    ]
    hard.write_settled(hard.state.promise, tuple(rows))


def test_without_the_end_in_the_hard_state_an_older_copy_of_the_open_segment_loses_records_silently() -> None:
    disk, path, old = written_on()
    forget_the_end(disk)
    disk.put(path, old)
    assert open_journal(disk).last_index == 9


def test_d7_an_older_hard_state_that_misses_a_segment_is_refused_and_the_segment_stays() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    old = disk.contents(HARD_STATE)
    fill(journal, 10, 60)
    journal.sync()
    assert len(segment_paths(disk)) > 1
    before = put_back(disk, HARD_STATE, old)
    with pytest.raises(HardStateCorrupt, match=r"a list that names segment-\d+, which is not empty, found one that ends with segment 1"):
        open_journal(disk)
    assert disk.files() == before


def test_d7_an_older_hard_state_that_knows_another_vote_is_refused() -> None:
    """Its list of segments is still right, and its term is that of the last record: only the vote went."""
    disk = MemoryDisk()
    journal = written(disk)
    quiet(journal, 0.0)
    old = disk.contents(HARD_STATE)
    journal.set_hard_state(7, "b")
    journal.sync()
    quiet(journal, 2.0)
    before = put_back(disk, HARD_STATE, old)
    with pytest.raises(HardStateCorrupt, match=r"or a later one, as segment 1 says"):
        open_journal(disk)
    assert disk.files() == before
    path = segment_paths(disk)[0]
    for slot in (0, 1):
        mark = decode_mark(disk.contents(path)[BLOCK_BYTES * (1 + slot) :])
        assert mark is not None
        disk.put(path, encode_mark(Mark(mark.sequence, mark.cursor, Known())), BLOCK_BYTES * (1 + slot))
    assert open_journal(disk).voted_for == "a"  # with the number off


def test_d7_one_damaged_slot_of_a_settled_hard_state_is_not_taken_for_an_older_one() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.set_hard_state(7, "b")
    journal.sync()
    quiet(journal, 0.0)
    newest = HardStateFile.load(disk, DIRECTORY).state.sequence % 2
    damaged = disk.clone()
    damaged.flip(HARD_STATE, newest * (128 << 10) + 50)
    assert open_journal(damaged).voted_for == "b"


def journal_of(disk: MemoryDisk, owner: Owner, accept: StateLoader | None = None) -> Journal:
    tuning = Tuning(owner=owner, accept=accept.check) if accept else Tuning(owner=owner)
    return Journal.open(disk, DATA / "journal", segment_bytes=SEGMENT_BYTES, tuning=tuning)


def test_the_hard_state_of_another_member_is_refused() -> None:
    disk, other = MemoryDisk(), MemoryDisk()
    journal_of(disk, OWNER).close()
    journal_of(other, Owner("one", "b")).close()
    before = put_back(disk, DATA / "journal/hard-state", other.contents(DATA / "journal/hard-state"))
    with pytest.raises(WrongMember, match=r"expected member 'a'.*found member 'b'"):
        journal_of(disk, OWNER)
    assert disk.files() == before


# snapshots


def with_snapshot(index: int, *, cluster_id: str = "one", awaited: bool = False) -> MemoryDisk:
    """A journal of five records, and a snapshot of term 1 that nobody took here."""
    disk = MemoryDisk()
    journal = journal_of(disk, OWNER)
    journal.set_hard_state(1, "a")
    for number in range(1, 6):
        journal.append(number, 1, b"\x01")
    journal.sync()
    if awaited:
        journal.await_snapshot(index, 1)
    journal.close()
    SnapshotStore(disk, DATA / "snapshots", cluster_id).write(index, 1, b"\x91\x90", codec.snapshot_chunks(State.empty()))
    return disk


def opened(disk: MemoryDisk) -> Journal:
    loader = StateLoader(SnapshotStore(disk, DATA / "snapshots", "one"))
    openers = Openers(lambda: journal_of(disk, OWNER, loader), lambda journal: recover(journal, loader, None))
    return open_log(disk, DATA, openers, Whose(OWNER, has_peers=False))[0]


@pytest.mark.parametrize("index", [3, 5000])
def test_d6_a_snapshot_of_another_cluster_is_refused_and_the_journal_stays(index: int) -> None:
    disk = with_snapshot(index, cluster_id="two")
    before = disk.files()
    with pytest.raises(WrongCluster):
        opened(disk)
    assert disk.files() == before
    for name in disk.listdir(DATA / "snapshots"):
        disk.unlink(DATA / "snapshots" / name)
    assert opened(disk).last_index == 5


def test_d2_a_snapshot_that_reaches_beyond_the_journal_is_refused_unless_the_journal_awaits_it() -> None:
    disk = with_snapshot(9)
    before = disk.files()
    with pytest.raises(RaftmetaError, match=r"snapshot 9 of term 1 is not in the journal, which ends at 5 and awaits none") as refused:
        opened(disk)
    assert refused.value.code == "integrity"
    assert disk.files() == before
    journal = opened(with_snapshot(9, awaited=True))
    assert (journal.first_index, journal.last_index, journal.awaited) == (10, 9, (0, 0))


def test_a_worker_that_outlives_its_member_publishes_nothing() -> None:
    disk = MemoryDisk()
    store = SnapshotStore(disk, DATA / "snapshots")
    chunks = iter(codec.snapshot_chunks(State.empty()))
    with pytest.raises(RaftmetaError, match="not this store's any more"):
        store.write(1, 1, b"", chunks, store.close)
    assert not [name for name in disk.listdir(DATA / "snapshots") if name.startswith("snapshot-")]


# the whole journal


def test_a_missing_journal_of_a_member_that_has_started_before_is_refused() -> None:
    disk = MemoryDisk()
    openers = Openers(lambda: journal_of(disk, OWNER), lambda journal: recover(journal, StateLoader(SnapshotStore(disk, DATA)), None))
    open_log(disk, DATA, openers, Whose(OWNER, has_peers=False))[0].close()
    for path in disk.files():
        disk.unlink(path)
    with pytest.raises(HardStateCorrupt, match="a file, since this member has started before, found none"):
        open_log(disk, DATA, openers, Whose(OWNER, has_peers=False, began=True))
    assert open_log(disk, DATA, openers, Whose(OWNER, has_peers=False))[0].last_index == 0  # as it was before anybody looked


def test_what_was_known_to_be_committed_is_known_after_a_restart() -> None:
    disk = MemoryDisk()
    journal = written(disk)
    journal.note_committed(8)
    quiet(journal, 0.0)
    disk.crash(keep=0.0)
    again = open_journal(disk)
    assert again.committed_index == 8
    with pytest.raises(ValueError, match="what is committed, 8"):
        again.truncate_from(8)
    again.set_hard_state(2, "")
    again.truncate_from(9)
    again.close()
    assert (open_journal(disk).last_index, open_journal(disk).committed_index) == (8, 8)
    assert len(everything(open_journal(disk))) == 8


def test_an_older_hard_state_is_found_before_a_missing_segment_is_taken_for_damage() -> None:
    """Set aside with an older term and vote, the member could vote twice."""
    disk = MemoryDisk()
    journal = written(disk)
    fill(journal, 10, 60)
    journal.sync()
    old = disk.contents(HARD_STATE)
    journal.compact_through(40)
    quiet(journal, 0.0)
    disk.put(HARD_STATE, old)
    with pytest.raises(HardStateCorrupt):
        recovery.inspect(disk, DIRECTORY, Owner(), SEGMENT_BYTES)


def test_a_crash_between_a_cut_and_what_replaces_it_leaves_nothing_committed_that_is_not_there() -> None:
    """Another leader's entries replace those from 20 on and are committed at once; the power goes between the cut and their write."""
    for call in range(1, 40):
        disk = MemoryDisk(call)
        journal = written(disk)
        fill(journal, 10, 60)  # in two segments, so that the cut begins a third
        journal.sync()
        disk.crash_at(call)
        try:
            journal.set_hard_state(2, "")
            journal.truncate_from(20)
            fill(journal, 20, 25, term=2)
            journal.note_committed(25)
            journal.sync()
            ended = True
        except PowerLost:
            ended = False
        disk.crash(keep=1.0)
        again = open_journal(disk)
        assert again.committed_index <= again.last_index
        if ended:
            return
    raise AssertionError("never finished")
