"""Snapshot files: nothing counts before it is whole, durable and verified; nothing damaged is taken for whole."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import DiskFailed, DiskFull, File
from raftmeta.log.snapshots import SnapshotCorrupt, SnapshotGone, SnapshotMeta, SnapshotStore
from tests.support.memory_disk import MemoryDisk, PowerLost

DIRECTORY = Path("/member/snapshots")
CHUNKS = [b"alpha" * 40, b"b", bytes(700)]


def store_on(disk: MemoryDisk) -> SnapshotStore:
    return SnapshotStore(disk, DIRECTORY)


def write(disk: MemoryDisk, index: int, term: int = 1) -> SnapshotMeta:
    return store_on(disk).write(index, term, b"members", [*CHUNKS, b"%d" % index])


def newest(store: SnapshotStore, journal_first_index: int | None = None) -> SnapshotMeta | None:
    found = store.load(journal_first_index, no_state)
    return None if found is None else found[0]


def chunks_of(store: SnapshotStore) -> list[bytes]:
    """Of the newest one."""
    found = store.load(None, list)
    assert found is not None
    return found[1]


def no_state(chunks: Iterator[bytes]) -> None:
    """Whatever is in it."""


def image(disk: MemoryDisk, meta: SnapshotMeta) -> bytes:
    store = store_on(disk)
    return b"".join(store.read_chunk(meta, offset, 100) for offset in range(0, meta.size_bytes, 100))


def path_of(meta: SnapshotMeta) -> Path:
    return DIRECTORY / f"snapshot-{meta.index:020d}-{meta.term:020d}"


def test_a_written_snapshot_is_found_again_with_its_chunks_after_power_loss() -> None:
    disk = MemoryDisk()
    meta = write(disk, 7)
    disk.crash(keep=0.0)
    store = store_on(disk)
    assert newest(store) == meta
    assert (meta.index, meta.term, meta.config) == (7, 1, b"members")
    assert chunks_of(store) == [*CHUNKS, b"7"]


def test_a_snapshot_of_nothing_and_of_many_chunks_reads_back() -> None:
    store = store_on(MemoryDisk())
    store.write(1, 1, b"", [])
    assert chunks_of(store) == []
    pauses: list[None] = []
    store.write(2, 1, b"", (b"%d" % number for number in range(1000)), lambda: pauses.append(None))
    assert chunks_of(store) == [b"%d" % number for number in range(1000)]
    assert len(pauses) == 1000


def test_equal_content_gives_an_equal_digest() -> None:
    assert write(MemoryDisk(1), 7).sha256 == write(MemoryDisk(2), 7).sha256


def test_an_empty_directory_has_no_snapshot_and_needs_none_while_the_journal_begins_at_1() -> None:
    store = store_on(MemoryDisk())
    assert newest(store) is None
    assert newest(store, 1) is None


def test_d6_no_snapshot_although_the_journal_needs_one_is_refused() -> None:
    with pytest.raises(SnapshotCorrupt, match="a snapshot that reaches record 41"):
        newest(store_on(MemoryDisk()), 42)


def test_d6_every_flipped_byte_is_found() -> None:
    disk = MemoryDisk()
    meta = write(disk, 7)
    path = path_of(meta)
    for offset in range(len(disk.contents(path))):
        disk.flip(path, offset, 0x10)
        with pytest.raises(SnapshotCorrupt):
            newest(store_on(disk))
        disk.flip(path, offset, 0x10)
    assert newest(store_on(disk)) == meta


def test_d6_every_cut_and_every_extension_is_found() -> None:
    disk = MemoryDisk()
    path = path_of(write(disk, 7))
    whole = disk.contents(path)
    for size in range(len(whole)):
        cut = disk.clone()
        cut.cut(path, size)
        with pytest.raises(SnapshotCorrupt):
            newest(store_on(cut))
    disk.put(path, b"\0", len(whole))
    with pytest.raises(SnapshotCorrupt):
        newest(store_on(disk))


def test_d6_each_of_the_two_digests_finds_what_the_other_would_let_pass() -> None:
    """A byte changed together with its chunk's digest is found by the trailer; with the trailer made to fit too, it passes."""
    disk = MemoryDisk()
    meta = write(disk, 7)
    path = path_of(meta)
    data = bytearray(disk.contents(path))
    at = data.index(CHUNKS[0])
    data[at] ^= 1
    disk.put(path, bytes(data))
    with pytest.raises(SnapshotCorrupt, match="chunk 0"):
        newest(store_on(disk))
    data[at - 32 : at] = hashlib.sha256(data[at : at + len(CHUNKS[0])]).digest()
    disk.put(path, bytes(data))
    with pytest.raises(SnapshotCorrupt, match="trailer"):
        newest(store_on(disk))
    data[-32:] = hashlib.sha256(data[: meta.size_bytes]).digest()
    disk.put(path, bytes(data))
    assert newest(store_on(disk)) != meta


def refusing(chunks: Iterator[bytes]) -> None:
    raise RaftmetaError("integrity", f"no state begins with {next(chunks)[:5]!r}")


def test_what_refuses_a_whole_snapshot_is_told_and_no_older_one_is_taken_for_it() -> None:
    disk = MemoryDisk()
    write(disk, 7), write(disk, 9)
    with pytest.raises(RaftmetaError, match="no state begins with b'alpha'") as caught:
        store_on(disk).load(1, refusing)
    assert not isinstance(caught.value, SnapshotCorrupt)


def test_a_damaged_snapshot_is_damaged_whoever_refused_it_before_the_damage_was_reached() -> None:
    disk = MemoryDisk()
    older, newer = write(disk, 7), write(disk, 9)
    disk.flip(path_of(newer), newer.size_bytes + 20)  # in its trailer
    seen: list[bytes] = []
    assert store_on(disk).load(8, lambda chunks: seen.extend(chunks)) == (older, None)
    assert seen[-1] == b"7"
    disk.unlink(path_of(older))
    with pytest.raises(SnapshotCorrupt, match="trailer"):
        store_on(disk).load(None, refusing)


def test_a_damaged_newest_snapshot_falls_back_only_when_the_journal_reaches_the_older_one() -> None:
    disk = MemoryDisk()
    older, newer = write(disk, 7), write(disk, 9)
    disk.flip(path_of(newer), 20)
    store = store_on(disk)
    assert newest(store, 8) == older
    assert [fault.path for fault in store.damaged] == [path_of(newer)]
    for first_index in (9, 10, None):
        with pytest.raises(SnapshotCorrupt) as caught:
            newest(store, first_index)
        assert caught.value.path == path_of(newer)


def test_all_snapshots_damaged_is_refused_unless_the_journal_holds_everything() -> None:
    disk = MemoryDisk()
    disk.flip(path_of(write(disk, 7)), 20)
    assert newest(store_on(disk), 1) is None
    with pytest.raises(SnapshotCorrupt):
        newest(store_on(disk), 2)


def test_a_snapshot_under_the_name_of_another_is_refused() -> None:
    disk = MemoryDisk()
    data = disk.contents(path_of(write(disk, 7)))
    disk.put(DIRECTORY / f"snapshot-{8:020d}-{1:020d}", data)
    with pytest.raises(SnapshotCorrupt, match="index 8, term 1"):
        newest(store_on(disk))


def test_a_crash_at_any_call_leaves_the_old_or_the_new_snapshot_and_no_partial_one() -> None:
    outcomes: set[object] = set()
    for call in range(40):
        for seed in range(4):
            disk = MemoryDisk(seed)
            older = write(disk, 7)
            disk.crash_at(call)
            try:
                newer = write(disk, 9)
                disk.crash_at(1 << 30)
                disk.crash()
                assert newest(store_on(disk)) == newer
                outcomes.add("done")
                continue
            except PowerLost:
                disk.crash()
            found = newest(store_on(disk))
            assert found is not None
            outcomes.add(found.index)
            assert found == older or found.index == 9
    assert outcomes == {7, 9, "done"}


def test_without_the_sync_before_the_rename_a_crash_leaves_a_partial_final_file() -> None:
    class LyingDisk(MemoryDisk):
        def fsync(self, file: File) -> None:
            """Says yes."""

    broken = 0
    for seed in range(20):
        disk = LyingDisk(seed)
        write(disk, 7)
        disk.crash(keep=0.5)
        try:
            newest(store_on(disk))
        except SnapshotCorrupt:
            broken += 1
    assert broken


@pytest.mark.parametrize("call", ["create", "pwrite"])
def test_d4_a_full_disk_leaves_no_file_behind(call: str) -> None:
    for skip in range(3):
        disk = MemoryDisk()
        older = write(disk, 7)
        disk.fail(call, errno.ENOSPC, skip=skip if call == "pwrite" else 0)
        with pytest.raises(DiskFull):
            write(disk, 9)
        assert disk.listdir(DIRECTORY) == [path_of(older).name]
        assert newest(store_on(disk)) == older


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "sync_directory"])
def test_an_error_of_the_disk_is_raised_and_the_older_snapshot_stays(call: str) -> None:
    disk = MemoryDisk()
    older = write(disk, 7)
    disk.fail(call, errno.EIO)
    with pytest.raises(DiskFailed):
        write(disk, 9)
    disk.crash(keep=0.0)
    assert newest(store_on(disk)) == older


@pytest.mark.parametrize("whole", [True, False])
def test_what_reads_back_otherwise_than_written_is_not_published(whole: bool) -> None:
    disk = MemoryDisk()
    other = MemoryDisk()
    another = other.contents(path_of(write(other, 8)))

    def damage(call: str, path: Path) -> None:
        if call == "fsync" and whole:
            disk.put(path, another)
        elif call == "fsync":
            disk.flip(path, 60)

    disk.on_call = damage
    with pytest.raises(SnapshotCorrupt):
        write(disk, 7)
    assert not [name for name in disk.listdir(DIRECTORY) if name.startswith("snapshot-")]


def test_a_failing_state_leaves_no_final_file() -> None:
    def chunks() -> Iterator[bytes]:
        yield b"first"
        raise ZeroDivisionError

    store = store_on(MemoryDisk())
    with pytest.raises(ZeroDivisionError):
        store.write(7, 1, b"", chunks())
    assert newest(store, 1) is None


def test_prune_keeps_the_newest_and_a_reader_of_an_older_one_is_told() -> None:
    disk = MemoryDisk()
    metas = [write(disk, index) for index in (3, 5, 9, 12)]
    store = store_on(disk)
    assert store.prune(2) == 2
    assert newest(store) == metas[3]
    assert disk.listdir(DIRECTORY) == [path_of(meta).name for meta in metas[2:]]
    with pytest.raises(SnapshotGone):
        store.read_chunk(metas[0], 0, 10)
    with pytest.raises(ValueError, match="always stays"):
        store.prune(0)


# incoming


def send(source: bytes, target: SnapshotStore, meta: SnapshotMeta, step: int = 100) -> tuple[SnapshotMeta, None] | None:
    incoming = target.receive(meta.index, meta.term, meta.size_bytes, meta.sha256)
    while incoming.offset < meta.size_bytes:
        assert incoming.write(incoming.offset, source[incoming.offset : incoming.offset + step])
    return incoming.finish(no_state)


@settings(max_examples=25, deadline=None)
@given(step=st.integers(1, 2000))
def test_a_received_snapshot_is_the_sent_one(step: int) -> None:
    disk, other = MemoryDisk(1), MemoryDisk(2)
    meta = write(disk, 7)
    store = store_on(other)
    assert send(image(disk, meta), store, meta, step) == (meta, None)
    other.crash(keep=0.0)
    assert newest(store_on(other)) == meta
    assert chunks_of(store_on(other)) == [*CHUNKS, b"7"]


def test_r3_a_received_snapshot_with_any_wrong_byte_is_dropped_and_can_be_sent_again() -> None:
    disk, other = MemoryDisk(1), MemoryDisk(2)
    meta = write(disk, 7)
    right = image(disk, meta)
    store = store_on(other)
    for offset in range(0, len(right), 37):
        wrong = bytearray(right)
        wrong[offset] ^= 4
        assert send(bytes(wrong), store, meta) is None
        assert other.listdir(DIRECTORY) == []
    assert send(right, store, meta) == (meta, None)


def test_an_incoming_snapshot_takes_only_the_next_bytes_and_no_more_than_announced() -> None:
    disk, other = MemoryDisk(1), MemoryDisk(2)
    meta = write(disk, 7)
    right = image(disk, meta)
    incoming = store_on(other).receive(7, 1, meta.size_bytes, meta.sha256)
    assert incoming.write(0, right[:50])
    assert not incoming.write(0, right[:50])
    assert not incoming.write(60, right[60:80])
    assert not incoming.write(50, right[50:] + b"more")
    assert incoming.offset == 50
    with pytest.raises(ValueError, match="50 of"):
        incoming.finish(no_state)
    assert incoming.write(50, right[50:])
    assert incoming.finish(no_state) == (meta, None)
    assert not incoming.write(meta.size_bytes, b"x")


def test_a_transfer_goes_on_where_it_stopped_and_another_one_drops_it() -> None:
    disk, other = MemoryDisk(1), MemoryDisk(2)
    meta, next_meta = write(disk, 7), write(disk, 9)
    right = image(disk, meta)
    store_on(other).receive(7, 1, meta.size_bytes, meta.sha256).write(0, right[:300])
    other.kill()
    again = store_on(other).receive(7, 1, meta.size_bytes, meta.sha256)
    assert again.offset == 300
    again.write(300, right[300:])
    assert again.finish(no_state) == (meta, None)
    store_on(other).receive(9, 1, next_meta.size_bytes, next_meta.sha256).write(0, b"abc")
    dropped = store_on(other).receive(10, 1, 500, bytes(32))
    assert other.listdir(DIRECTORY)[0].startswith(f"incoming-{10:020d}")
    dropped.discard()
    assert other.listdir(DIRECTORY) == [path_of(meta).name]


def test_power_loss_in_a_transfer_ends_in_the_right_snapshot_or_in_a_new_start() -> None:
    ends = set()
    for call in range(30):
        disk, other = MemoryDisk(1), MemoryDisk(call)
        meta = write(disk, 7)
        right = image(disk, meta)
        other.crash_at(call)
        try:
            send(right, store_on(other), meta, 200)
        except PowerLost:
            pass
        other.crash()
        store = store_on(other)
        found = newest(store, 1)
        ends.add(found is not None)
        assert found in (None, meta)
        if found is None:
            assert (meta, None) in (send(right, store, meta, 200), send(right, store, meta, 200))
    assert ends == {True, False}


def test_d4_an_incoming_snapshot_that_does_not_fit_is_refused_before_its_first_byte() -> None:
    disk = MemoryDisk(capacity_bytes=3 << 20)
    with pytest.raises(DiskFull):
        store_on(disk).receive(7, 1, 3 << 20, bytes(32))
    assert disk.used_bytes() == 0


def test_an_announcement_that_cannot_be_true_is_refused() -> None:
    store = store_on(MemoryDisk())
    for size, digest in ((0, bytes(32)), (1 << 50, bytes(32)), (10, b"short")):
        with pytest.raises(SnapshotCorrupt):
            store.receive(7, 1, size, digest)
