"""A quiet directory with one wrong byte comes back as it was, is refused untouched, or is set aside whole; and what happens otherwise."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from raftmeta.log.boot import Recovered
from raftmeta.log.hard_state import NAME, SLOT_BYTES, HardState, HardStateFile, SegmentRow
from raftmeta.log.journal import Journal
from raftmeta.log.records import BLOCK_BYTES, DATA_START, Cursor, Mark, encode_mark, encode_records
from raftmeta.log.spares import segment_path
from tests.scenarios.corruption import CUT, DIRECTORIES, FLIP, REFUSED, SAME, SET_ASIDE, Damage, flipped_bit, outcome, prepared, some
from tests.support.memory_disk import MemoryDisk
from tests.support.scripted_member import DATA, SEGMENT_BYTES, open_member

ALONE, _, OF_THREE, ASIDE = range(4)  # of DIRECTORIES
JOURNAL = DATA / "journal"
HARD_STATE = JOURNAL / NAME
MODES = [
    pytest.param(number, has_peers, id=f"{directory.name}, {'with' if has_peers else 'without'} peers")
    for number, directory in enumerate(DIRECTORIES)
    for has_peers in directory.modes
]


@pytest.mark.parametrize(("number", "has_peers"), MODES)
def test_a_wrong_byte_anywhere_is_never_a_silent_loss_or_change(number: int, has_peers: bool) -> None:
    """Some bytes of each file; `python -m tests.scenarios.corruption` tries all of them."""
    disk, expected, every = prepared(number)
    found: Counter[str] = Counter()
    for damage in some(every, 20):
        try:
            found[outcome(damage.on(disk), expected, has_peers=has_peers)] += 1
        except Exception as fault:
            fault.add_note(str(damage))
            raise
    assert set(found) == {SAME, REFUSED} | ({SET_ASIDE} if has_peers and number != ASIDE else set())


# the same with a protection off: the damage, and then what somebody who does not check would not see


def active(disk: MemoryDisk) -> tuple[Path, Cursor]:
    """The last segment, and where its records begin."""
    row = HardStateFile.load(disk, JOURNAL).state.segments[-1]
    return segment_path(JOURNAL, row.serial), Cursor(DATA_START, row.first_index - 1, row.previous_term, row.previous_crc)


def put_marks(disk: MemoryDisk, path: Path, cursor: Cursor) -> None:
    """Marks that say this, and a hard state that says nothing of the open segment."""
    for slot in (0, 1):
        disk.put(path, encode_mark(Mark(1000 + slot, cursor)), BLOCK_BYTES * (1 + slot))
    hard = HardStateFile.load(disk, JOURNAL)
    *sealed, row = hard.state.segments
    hard.write_settled(hard.state.promise, (*sealed, SegmentRow(row.serial, row.first_index, row.previous_term, row.previous_crc)))


def test_with_the_marks_off_a_cut_loses_acknowledged_records_silently() -> None:
    disk, expected, _ = prepared(ALONE)
    path, start = active(disk)
    records = [record for record in expected.records if record[0] > start.index]
    last = encode_records(records[:-1], 0, start, SEGMENT_BYTES, SEGMENT_BYTES).end
    cut = Damage(CUT, path, last.offset)
    assert outcome(cut.on(disk), expected, has_peers=False) == REFUSED
    unmarked = cut.on(disk)
    put_marks(unmarked, path, start)
    with pytest.raises(
        AssertionError, match=f"silently changed: .*records.*; {len(expected.records) - 1} of {len(expected.records)} records"
    ):
        outcome(unmarked, expected, has_peers=False)


def test_with_the_checksums_off_a_flipped_bit_changes_an_acknowledged_record_silently() -> None:
    disk, expected, _ = prepared(ALONE)
    path, start = active(disk)
    records = [record for record in expected.records if record[0] > start.index]
    index, term, payload = records[-1]
    end = encode_records(records, 0, start, SEGMENT_BYTES, SEGMENT_BYTES).end
    flip = Damage(FLIP, path, end.offset - 1)
    assert outcome(flip.on(disk), expected, has_peers=False) == REFUSED
    unchecked = flip.on(disk)
    flipped = unchecked.contents(path)[end.offset - len(payload) : end.offset]
    assert flipped != payload and flipped[:-1] == payload[:-1]
    again = encode_records([*records[:-1], (index, term, flipped)], 0, start, SEGMENT_BYTES, SEGMENT_BYTES)
    unchecked.put(path, again.data, DATA_START)
    put_marks(unchecked, path, again.end)
    with pytest.raises(AssertionError, match="silently changed: records, state_hash"):
        outcome(unchecked, expected, has_peers=False)


def test_with_the_digest_of_the_hard_state_off_a_flipped_bit_changes_the_term_silently() -> None:
    disk, expected, _ = prepared(ALONE)
    newest = HardStateFile.load(disk, JOURNAL).state.sequence % 2 * SLOT_BYTES
    slot = disk.contents(HARD_STATE)[newest : newest + SLOT_BYTES]
    body = slot[44 : 44 + int.from_bytes(slot[8:12], "little")]
    unchecked = disk.clone()
    for at in range(len(body)):
        flipped = body[:at] + bytes((body[at] ^ 1,)) + body[at + 1 :]
        if _term_in(flipped) not in (None, expected.term):
            break
    assert outcome(Damage(FLIP, HARD_STATE, newest + 44 + at).on(disk), expected, has_peers=False) == SAME
    unchecked.put(HARD_STATE, slot[:12] + hashlib.sha256(slot[:12] + flipped).digest() + flipped, newest)
    with pytest.raises(AssertionError, match="silently changed: term"):
        outcome(unchecked, expected, has_peers=False)


def _term_in(body: bytes) -> int | None:
    try:
        return msgspec.msgpack.decode(body, type=HardState).promise.term
    except msgspec.MsgspecError:
        return None


def test_with_the_digests_of_snapshots_off_a_flipped_bit_changes_the_members_silently() -> None:
    disk, expected, _ = prepared(OF_THREE)
    (path,) = (path for path in disk.files() if path.parent.name == "snapshots")
    zone = disk.contents(path).index(b"zone-m2")
    flip = Damage(FLIP, path, next(at for at in range(zone, zone + 7) if flipped_bit(at) != 0x80))  # still text
    assert outcome(flip.on(disk), expected, has_peers=True) == SET_ASIDE
    unchecked = flip.on(disk)
    image = bytearray(unchecked.contents(path)[:-48])
    head = 48 + int.from_bytes(image[44:48], "little")
    image[head : head + 32] = hashlib.sha256(image[:head]).digest()
    unchecked.put(path, bytes(image) + b"rmsnapOK" + len(image).to_bytes(8, "little") + hashlib.sha256(image).digest())
    with pytest.raises(AssertionError, match="silently changed: members"):
        outcome(unchecked, expected, has_peers=True)


def opened_without_looking_first(disk: MemoryDisk, *, has_peers: bool) -> tuple[Journal, Recovered]:
    return open_member(disk, has_peers=has_peers, look_first=False)


@pytest.mark.parametrize(
    ("has_peers", "met", "otherwise"), [(False, REFUSED, "refused, but changed"), (True, SET_ASIDE, "was not kept as it was")]
)
def test_a_damaged_snapshot_is_found_before_the_journal_is_touched(has_peers: bool, met: str, otherwise: str) -> None:
    disk, expected, _ = prepared(OF_THREE)
    (path,) = (path for path in disk.files() if path.parent.name == "snapshots")
    flip = Damage(FLIP, path, 100)
    assert outcome(flip.on(disk), expected, has_peers=has_peers) == met
    with pytest.raises(AssertionError, match=otherwise):
        outcome(flip.on(disk), expected, has_peers=has_peers, opened=opened_without_looking_first)
