"""A device that fails, hangs or is reset at any call: what serves stays as it was, nothing unproven becomes verified, all is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistency.vector import BLOCK_BYTES
from node_agent.device.arena import Arena
from node_agent.device.port import SlotRecord, SlotState
from node_agent.device.streamed import DeviceFault, Patience, StreamedDevice
from node_agent.failure import FailureClass, class_of
from node_agent.refusal import Refusal
from raftmeta.core.errors import ErrorClass
from tests.support.device_subjects import CHUNK, SLOT_BYTES, V1, V2, Subject, fake_subject, over_fake, raw
from tests.support.fake_device import FakeDevice, FakeFeed
from tests.support.shm import shm_directory
from tests.support.versions import manifest_of


def staged_over(directory: Path, seed: int = 1) -> Subject:
    """V1 serves from slot 0; slot 1 is next."""
    subject = fake_subject(directory, seed)
    subject.stage(0, V1)
    subject.active = 0
    return subject


def calls_of_staging(kind: str) -> range:
    """The numbers of the calls of this kind that staging V2 makes."""
    with shm_directory() as directory:
        subject = staged_over(directory)
        assert subject.fake is not None
        first = subject.fake.calls.total() if kind == "reset" else subject.fake.calls[kind]
        subject.stage(1, V2)
        last = subject.fake.calls.total() if kind == "reset" else subject.fake.calls[kind]
        subject.records.close()
    return range(first, last)


@pytest.mark.parametrize("kind", ["upload", "move", "checks", "synchronize", "reset"])
def test_a_fault_at_any_call_is_refused_by_its_name_and_changes_nothing_that_serves(kind: str) -> None:
    numbers = calls_of_staging(kind)
    assert numbers, kind
    for number in numbers:
        with shm_directory() as directory:
            subject = staged_over(directory)
            assert subject.fake is not None
            before = subject.bytes_of(0)
            subject.fake.faults = {(kind, number): "ecc_uncorrectable"}
            with pytest.raises(Refusal, match=r"device_failed.*ecc_uncorrectable") as caught:
                subject.stage(1, V2)
            assert (caught.value.error_class, class_of(caught.value.kind)) == (ErrorClass.UNAVAILABLE, FailureClass.INTERNAL)
            assert subject.records.verified(0).vector_root == manifest_of(V1).vector_root
            assert subject.records.record(1).state is SlotState.DIRTY
            assert kind == "reset" or subject.bytes_of(0) == before
            subject.records.close()


def test_a_device_that_failed_is_used_no_more_by_this_process_and_again_by_the_next() -> None:
    with shm_directory() as directory:
        subject = staged_over(directory)
        assert subject.fake is not None
        subject.fake.faults = {("upload", subject.fake.calls["upload"]): "launch_failed"}
        for _ in range(2):
            with pytest.raises(Refusal, match=r"device_failed.*launch_failed"):
                subject.stage(1, V2)
        calls = subject.fake.calls.total()
        for refused in (
            lambda: subject.device.begin(1, SlotRecord()),
            lambda: subject.device.finish(1, "r" * 64, "s" * 64),
            lambda: subject.device.fill(1, 0, 8, lambda into: None),
            lambda: subject.device.copy(0, 0, 8, 1, 0),
            lambda: subject.device.block_checks(0, 0, 8),
        ):
            with pytest.raises(Refusal, match="launch_failed"):
                refused()
        assert subject.fake.calls.total() == calls, "nobody asked the device again"
        assert subject.records.record(1).state is SlotState.DIRTY
        subject.fake.lost, subject.fake.faults = "", {}
        successor = over_fake(subject.records, subject.fake)
        successor.active = 0
        successor.stage(1, V2)
        assert successor.held(1) == raw(V2) and successor.held(0) == raw(V1)
        subject.records.close()


def test_a_device_that_hangs_is_given_up_after_its_time_and_counts_as_too_late() -> None:
    with shm_directory() as directory:
        subject = staged_over(directory)
        assert subject.fake is not None
        subject.fake.hangs = True
        subject.fake.random.random = lambda: 1.0  # type: ignore[method-assign]  # nobody else's call moves it on
        with pytest.raises(Refusal, match=r"device_late.*an end within 10000 s") as caught:
            subject.stage(1, V2, threads=3)
        assert class_of(caught.value.kind) is FailureClass.TIMEOUT
        assert subject.records.record(1).state is SlotState.DIRTY and subject.records.verified(0)
        with pytest.raises(Refusal, match=r"device_late.*a device without a fault"):
            subject.stage(1, V2)
        subject.records.close()


def test_a_wait_that_was_interrupted_gives_the_device_up_for_its_work_may_be_under_way() -> None:
    class Stop(BaseException):
        """As KeyboardInterrupt, which pytest takes for its own."""

    class Interrupted(FakeFeed):
        def done(self) -> bool:
            raise Stop

    with shm_directory() as directory:
        fake, records = FakeDevice(2 * SLOT_BYTES), Arena.create(directory / "arena", 1)
        device = StreamedDevice("a fake device", records, SLOT_BYTES, [Interrupted(fake, CHUNK), fake.feed(CHUNK)][::-1])
        device.begin(0, SlotRecord())
        with pytest.raises(Stop):
            device.fill(0, 0, 8, lambda into: None)
        with pytest.raises(Refusal, match=r"device_failed.*one that was interrupted"):
            device.fill(0, 0, 8, lambda into: None)
        records.close()


def test_whoever_finds_no_free_feed_in_time_is_refused() -> None:
    with shm_directory() as directory:
        fake = FakeDevice(2 * SLOT_BYTES)
        records = Arena.create(directory / "arena", 1)
        device = StreamedDevice("a fake device", records, SLOT_BYTES, [fake.feed(CHUNK)], Patience(limit_s=0.01))
        device.begin(0, SlotRecord())
        inner: list[str] = []

        def again(into: memoryview) -> None:
            with pytest.raises(Refusal, match=r"device_late.*a free feed within 0.01 s") as caught:
                device.fill(0, 0, 8, lambda other: None)
            inner.append(caught.value.kind)
            into[:] = b"complete"

        device.fill(0, 0, 8, again)
        assert inner == ["device_late"] and fake.memory[:8] == b"complete"
        records.close()


def test_a_piece_larger_than_pinned_memory_is_a_defect() -> None:
    with shm_directory() as directory:
        subject = fake_subject(directory)
        subject.device.begin(0, SlotRecord())
        assert subject.device.chunk_bytes == CHUNK, "whole blocks of what the buffer holds"
        with pytest.raises(ValueError, match="at most the"):
            subject.device.fill(0, 0, CHUNK + 1, lambda into: None)
        with pytest.raises(ValueError, match="holds no block"):
            StreamedDevice("x", subject.records, SLOT_BYTES, [FakeDevice(8).feed(BLOCK_BYTES - 1)])
        subject.records.close()


@pytest.mark.parametrize(("offset", "name"), [(8, "misaligned_address"), (2 * SLOT_BYTES, "illegal_address")])
def test_the_fake_holds_to_alignment_and_to_its_addresses(offset: int, name: str) -> None:
    feed = FakeDevice(2 * SLOT_BYTES).feed(CHUNK)
    for wrong in (lambda: feed.upload(offset, 8), lambda: feed.move(0, offset, 8), lambda: feed.checks(offset, 8)):
        with pytest.raises(DeviceFault, match=name):
            wrong()


def test_the_fake_shows_stale_bytes_to_whoever_does_not_wait() -> None:
    fake = FakeDevice(2 * SLOT_BYTES)
    fake.random.random = lambda: 1.0  # type: ignore[method-assign]
    feed = fake.feed(CHUNK)
    feed.buffer[:8] = b"complete"
    feed.upload(0, 8)
    assert fake.memory[:8] == b"\xa5" * 8
    fake.run_out()
    assert fake.memory[:8] == b"complete" and feed.done()
