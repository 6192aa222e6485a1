"""What every device behind the device port has to do, held against shared memory and against a device whose streams end late."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from consistency import vector
from consistency.vector import BLOCK_BYTES
from node_agent.device.port import SlotRecord, SlotState
from node_agent.device.snapshot import Snapshots
from node_agent.failure import FailureClass, class_of
from node_agent.refusal import Refusal
from tests.support.device_subjects import CHUNK, SLOT_BYTES, V1, V2, V3, Subject, raw, subject_of, why_not
from tests.support.shm import shm_directory
from tests.support.versions import MemoryBlob, MemoryBlobs, manifest_of

SUBJECTS = ["memory", *(f"fake {seed}" for seed in range(4)), "torch", "cuda"]


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if reason := why_not(request.param):
        pytest.skip(reason)
    with shm_directory() as directory:
        made = subject_of(request.param, directory)
        yield made
        made.records.close()


def noise(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


# --- one call


@pytest.mark.parametrize("size", [0, 1, 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 9, CHUNK])
def test_what_was_filled_is_there_when_the_call_returns_and_its_checks_are_those_of_the_bytes(subject: Subject, size: int) -> None:
    subject.device.begin(0, SlotRecord())
    for turn, offset in enumerate((0, CHUNK, 256)):  # the same pinned memory again and again
        data = noise(size, turn)
        subject.device.fill(0, offset, size, lambda into, data=data: into.__setitem__(slice(None), data))  # type: ignore[misc]
        assert subject.bytes_of(0)[offset : offset + size] == data
        assert np.array_equal(subject.device.block_checks(0, offset, size), vector.block_checks(data))


def test_a_copy_from_the_other_slot_is_there_when_the_call_returns(subject: Subject) -> None:
    data = noise(CHUNK)
    for slot in (0, 1):
        subject.device.begin(slot, SlotRecord())
    subject.device.fill(0, 256, CHUNK, lambda into: into.__setitem__(slice(None), data))
    subject.device.copy(0, 256, CHUNK, 1, 1024)
    assert subject.bytes_of(1)[1024 : 1024 + CHUNK] == data
    assert np.array_equal(subject.device.block_checks(1, 1024, CHUNK), vector.block_checks(data))


def test_checks_that_were_given_do_not_change_afterwards(subject: Subject) -> None:
    subject.device.begin(0, SlotRecord())
    first = subject.device.block_checks(0, 0, CHUNK)
    before = first.copy()
    subject.device.fill(0, 0, CHUNK, lambda into: into.__setitem__(slice(None), noise(CHUNK)))
    subject.device.block_checks(0, 0, CHUNK)
    assert np.array_equal(first, before)


def test_a_slot_that_is_not_dirty_is_neither_filled_nor_copied_into_nor_finished(subject: Subject) -> None:
    before = subject.bytes_of(0)
    asked: list[int] = []
    for refused in (
        lambda: subject.device.fill(0, 0, 8, lambda into: asked.append(1)),
        lambda: subject.device.copy(1, 0, 8, 0, 0),
        lambda: subject.device.finish(0, "r" * 64, "s" * 64),
    ):
        with pytest.raises(Refusal, match="slot_not_dirty"):
            refused()
    assert subject.bytes_of(0) == before and not asked
    assert subject.device.record(0).state is SlotState.EMPTY


@pytest.mark.parametrize(("offset", "size"), [(SLOT_BYTES - 256, 512), (SLOT_BYTES, 1), (-256, 256), (0, -1)])
def test_a_range_that_leaves_the_slot_is_a_defect_and_touches_nothing(subject: Subject, offset: int, size: int) -> None:
    for slot in (0, 1):
        subject.device.begin(slot, SlotRecord())
    before = [subject.bytes_of(slot) for slot in (0, 1)]
    for wrong in (
        lambda: subject.device.fill(0, offset, size, lambda into: into.__setitem__(slice(None), bytes(len(into)))),
        lambda: subject.device.copy(0, offset, size, 1, 0),
        lambda: subject.device.copy(0, 0, size, 1, offset),
        lambda: subject.device.block_checks(0, offset, size),
    ):
        with pytest.raises(ValueError, match="leave the"):
            wrong()
    assert [subject.bytes_of(slot) for slot in (0, 1)] == before


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_there_is_not_is_a_defect(subject: Subject, slot: int) -> None:
    for wrong in (
        lambda: subject.device.begin(slot, SlotRecord()),
        lambda: subject.device.fill(slot, 0, 8, lambda into: None),
        lambda: subject.device.copy(slot, 0, 8, 0, 0),
        lambda: subject.device.block_checks(slot, 0, 8),
    ):
        subject.device.begin(0, SlotRecord())
        with pytest.raises(ValueError, match=f"slot {slot} is outside"):
            wrong()


@pytest.mark.parametrize("fault", [OSError("gone"), KeyboardInterrupt()])
def test_a_source_that_fails_reaches_the_caller_and_the_device_goes_on(subject: Subject, fault: BaseException) -> None:
    subject.device.begin(0, SlotRecord())

    def failing(into: memoryview) -> None:
        into[:4] = b"half"
        raise fault

    for _ in range(3):  # more often than there are feeds
        with pytest.raises(type(fault)):
            subject.device.fill(0, 0, 8, failing)
    subject.device.fill(0, 0, 8, lambda into: into.__setitem__(slice(None), b"complete"))
    assert subject.bytes_of(0)[:8] == b"complete"


# --- staging


@pytest.mark.parametrize("threads", [1, 3])
def test_versions_are_staged_from_the_store_the_active_slot_and_what_was_kept(subject: Subject, threads: int) -> None:
    first = subject.stage(0, V1, threads)
    assert subject.held(0) == raw(V1) and first.record.vector_root == manifest_of(V1).vector_root
    subject.active = 0
    second = subject.stage(1, V2, threads)
    assert subject.held(1) == raw(V2) and second.counters.bytes_from_active > 0
    subject.active = 1
    third = subject.stage(0, V3, threads)
    assert subject.held(0) == raw(V3) and third.counters.bytes_kept > 0
    assert subject.held(1) == raw(V2)
    assert [subject.records.verified(slot).vector_root for slot in (0, 1)] == [manifest_of(V3).vector_root, manifest_of(V2).vector_root]
    assert subject.fake is None or subject.fake.pending == 0


def test_a_kept_tensor_that_rotted_is_seen_in_the_memory_of_the_device_and_written_again(subject: Subject) -> None:
    subject.stage(0, V1)
    subject.stage(1, V2)
    subject.active = 1
    snapshot = Snapshots(subject.records.path).load(0, subject.records.record(0).snapshot_digest)
    assert snapshot is not None
    subject.spoil(0, next(place.offset for place in snapshot.layout.placements if place.name == "b"))
    with pytest.raises(Refusal, match="vector_mismatch") as caught:
        subject.stage(0, V1)
    assert class_of(caught.value.kind) is FailureClass.INTEGRITY_MISMATCH
    assert subject.records.record(0).state is SlotState.DIRTY
    assert subject.stage(0, V1).counters.bytes_kept > 0
    assert subject.held(0) == raw(V1)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_source_that_ends_early_leaves_the_slot_dirty_the_active_one_as_it_was_and_nothing_under_way(
    subject: Subject, threads: int
) -> None:
    subject.stage(0, V1)
    subject.active = 0
    before = subject.bytes_of(0)

    class Short(MemoryBlob):
        def read_into(self, offset: int, into: memoryview) -> None:
            raise OSError("the disk is gone")

    class Blobs(MemoryBlobs):
        def open(self, sha256: str, size_bytes: int) -> MemoryBlob:
            return Short(self, sha256, self.blobs[sha256])

    subject.blobs = Blobs(V2)
    with pytest.raises(Refusal, match="source_failed"):
        subject.stage(1, V2, threads)
    after = subject.bytes_of(1)
    if subject.fake is not None:
        assert subject.fake.pending == 0
        subject.fake.run_out()
    assert (subject.bytes_of(0), subject.bytes_of(1)) == (before, after)
    assert subject.records.record(1).state is SlotState.DIRTY and subject.records.verified(0)
