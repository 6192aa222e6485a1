"""Shared memory of a CUDA device over a fake driver with the real signatures: order, sizes, refusals by the driver's own names."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.device import driver as drivers
from node_agent.device.arena import Arena
from node_agent.device.cuda_memory import CudaMaker, MappedMemory, padded
from node_agent.device.driver import MIN_VERSION, SIGNATURES, AllocationProperties, Driver
from node_agent.device.keeper import Holdings
from node_agent.device.keeper_client import Holding, KeeperClient
from node_agent.device.keeper_messages import Given, Hold, List, Listing, Refused, Release, Released
from node_agent.device.kept_memory import attach, slot_bytes_of
from node_agent.device.port import SlotRecord, SlotState
from node_agent.failure import FailureClass, class_of
from node_agent.layout import ALIGNMENT
from node_agent.refusal import Refusal
from raftmeta.core.errors import ErrorClass
from tests.support.fake_libcuda import GRANULARITY, ILLEGAL, INVALID_VALUE, NO_DEVICE, FakeLibcuda
from tests.support.keeping import keeping

SIZE = 3 * GRANULARITY


@given(st.integers(1, 1 << 45), st.integers(1, 1 << 22))
def test_a_padded_size_is_the_least_multiple_of_the_granularity_that_holds_it(size: int, granularity: int) -> None:
    found = padded(size, granularity)
    assert found % granularity == 0 and size <= found < size + granularity


@pytest.mark.parametrize(("size", "granularity"), [(0, 1), (-1, 1), (1, 0)])
def test_sizes_that_are_none_are_a_defect(size: int, granularity: int) -> None:
    with pytest.raises(ValueError, match="bytes in steps"):
        padded(size, granularity)


def test_structures_have_the_sizes_of_the_drivers_header() -> None:
    assert ctypes.sizeof(AllocationProperties) == 32
    assert ctypes.sizeof(drivers.Access) == 12


# --- the start


def test_a_machine_without_the_drivers_library_is_refused_by_its_name() -> None:
    with pytest.raises(Refusal, match=r"no_device.*libcuda-that-is-not-there") as caught:
        Driver("cuda:0", drivers.library("libcuda-that-is-not-there.so.1"))
    assert (caught.value.error_class, class_of(caught.value.kind)) == (ErrorClass.INVALID, FailureClass.INTERNAL)


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:", "cuda:-1", "cuda:01", "cuda:100", "cuda:0 ", "cuda:0\n", ""])
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match=r"no_device.*expected cuda:N"):
        Driver(name, FakeLibcuda().find)


def test_a_driver_that_is_too_old_is_refused_with_both_numbers() -> None:
    with pytest.raises(Refusal, match=r"interface 10\.2 or later, found 10\.1"):
        Driver("cuda:0", FakeLibcuda(version=10_010).find)
    assert Driver("cuda:0", FakeLibcuda(version=MIN_VERSION).find).granularity == GRANULARITY


@pytest.mark.parametrize("missing", sorted(SIGNATURES))
def test_a_driver_that_lacks_a_function_is_refused_as_too_old(missing: str) -> None:
    cuda = FakeLibcuda()
    cuda.missing = {missing}
    with pytest.raises(Refusal, match=f"{missing}, which interface 10.2 has, found a driver without it"):
        Driver("cuda:0", cuda.find)


def test_a_machine_without_a_device_is_refused_with_the_drivers_own_word() -> None:
    with pytest.raises(Refusal, match=r"no_device.*cuInit: CUDA_ERROR_NO_DEVICE"):
        Driver("cuda:0", FakeLibcuda(devices=0).find)


def test_a_device_beyond_the_last_one_is_refused() -> None:
    with pytest.raises(Refusal, match=r"one of the 2 devices of this machine, found number 2"):
        Driver("cuda:2", FakeLibcuda().find)


@pytest.mark.parametrize("attribute", [102, 103])
def test_a_device_that_cannot_share_memory_is_refused(attribute: int) -> None:
    cuda = FakeLibcuda()
    cuda.attributes[attribute] = 0
    with pytest.raises(Refusal, match=r"no_device.*expected a device with m"):
        Driver("cuda:1", cuda.find)


@pytest.mark.parametrize(
    "name", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGetAttribute", "cuMemGetAllocationGranularity"]
)
def test_a_fault_at_the_start_is_named_by_call_and_error(name: str) -> None:
    cuda = FakeLibcuda()
    cuda.fails = {name: NO_DEVICE}
    with pytest.raises(Refusal, match=f"no_device.*{name}: CUDA_ERROR_NO_DEVICE"):
        Driver("cuda:0", cuda.find)


def test_an_error_that_the_driver_has_no_name_for_is_told_by_its_number() -> None:
    cuda = FakeLibcuda()
    cuda.fails = {"cuInit": 4242}
    with pytest.raises(Refusal, match="cuInit: error 4242"):
        Driver("cuda:0", cuda.find)


# --- made by the keeper, mapped by others


def test_memory_of_the_keeper_is_mapped_at_addresses_of_its_own_and_everything_is_given_back() -> None:
    cuda = FakeLibcuda()
    driver = Driver("cuda:1", cuda.find)
    holdings = Holdings(CudaMaker(driver), 16 * GRANULARITY)
    given, descriptor = holdings.answer(Hold("arena", SIZE - 1))
    assert given == Given("arena", SIZE, True) and descriptor is not None
    assert cuda.properties == [(1, 1, 1, 1)], "pinned, by descriptor, on device 1"
    writer, reader = (MappedMemory(driver, descriptor, SIZE, writable) for writable in (True, False))
    assert writer.address != reader.address and cuda.reserved[writer.address] == SIZE
    assert (cuda.access[writer.address], cuda.access[reader.address]) == ((1, 3), (1, 1)), "one may write, the other may not"
    os.fstat(descriptor)  # still the keeper's
    for mapped in (writer, reader):
        mapped.close()
    assert not cuda.mapped and not cuda.reserved and len(cuda.handles) == 1
    assert holdings.answer(Release("arena")) == (Released(True), None)
    assert cuda.is_clean
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_device_without_room_is_a_matter_of_room_and_nothing_is_held() -> None:
    cuda = FakeLibcuda(memory_bytes=2 * GRANULARITY)
    holdings = Holdings(CudaMaker(Driver("cuda:0", cuda.find)), 1 << 40)
    refused, _ = holdings.answer(Hold("arena", SIZE))
    assert isinstance(refused, Refused)
    assert (refused.kind, refused.found) == ("no_headroom", "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
    assert cuda.is_clean and holdings.answer(List())[0] == Listing((), 1 << 40)


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemExportToShareableHandle"])
def test_memory_that_could_not_be_made_and_shared_is_not_left_behind(name: str) -> None:
    cuda = FakeLibcuda()
    holdings = Holdings(CudaMaker(Driver("cuda:0", cuda.find)), 1 << 40)
    cuda.fails = {name: ILLEGAL}
    refused, _ = holdings.answer(Hold("arena", SIZE))
    assert isinstance(refused, Refused) and (refused.kind, refused.found) == ("device_failed", f"{name}: CUDA_ERROR_ILLEGAL_ADDRESS")
    assert cuda.is_clean


def test_a_keeper_whose_device_will_not_release_says_so_and_goes_on() -> None:
    cuda = FakeLibcuda()
    holdings = Holdings(CudaMaker(Driver("cuda:0", cuda.find)), 1 << 40)
    for name in ("a", "b"):
        holdings.answer(Hold(name, SIZE))
    cuda.fails = {"cuMemRelease": ILLEGAL}
    refused, _ = holdings.answer(Release("a"))
    assert isinstance(refused, Refused) and refused.kind == "device_failed"
    assert [item.name for item in listing(holdings).held] == ["b"]
    holdings.let_go()
    assert listing(holdings).held == ()


def listing(holdings: Holdings) -> Listing:
    found, _ = holdings.answer(List())
    assert isinstance(found, Listing)
    return found


@pytest.mark.parametrize("name", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_half_way_is_undone_backwards_and_named(name: str) -> None:
    cuda = FakeLibcuda()
    driver = Driver("cuda:0", cuda.find)
    memory = CudaMaker(driver).make("arena", SIZE)
    cuda.fails = {name: INVALID_VALUE}
    with pytest.raises(Refusal, match=f"device_failed.*{name}: CUDA_ERROR_INVALID_VALUE"):
        MappedMemory(driver, memory.descriptor, SIZE, writable=True)
    memory.let_go()
    assert cuda.is_clean


def test_a_mapping_that_the_driver_will_not_undo_is_told_after_everything_was_tried() -> None:
    cuda = FakeLibcuda()
    driver = Driver("cuda:0", cuda.find)
    memory = CudaMaker(driver).make("arena", SIZE)
    mapped = MappedMemory(driver, memory.descriptor, SIZE, writable=False)
    cuda.fails = {"cuMemUnmap": ILLEGAL}
    with pytest.raises(Refusal, match="device_failed"):
        mapped.close()
    assert len(cuda.handles) == 1, "the handle of the mapping was released"
    cuda.fails = {}
    memory.let_go()


# --- records and memory belong together


@given(st.integers(1, 1 << 40), st.sampled_from([4096, 64 << 10, 2 << 20]))
def test_slots_of_memory_are_as_large_as_was_asked_aligned_and_follow_from_its_size_alone(slot_bytes: int, granularity: int) -> None:
    size = padded(2 * slot_bytes, granularity)
    found = slot_bytes_of(size)
    assert found >= slot_bytes and found % ALIGNMENT == 0 and 2 * found <= size


def test_records_are_emptied_before_memory_is_made_for_them(tmp_path: Path) -> None:
    records = Arena.create(tmp_path / "arena", 1)
    records.mark_dirty(0, SlotRecord())
    records.mark_verified(0, "r" * 64, "s" * 64)
    seen: list[SlotState] = []

    class Watching(KeeperClient):
        def hold(self, name: str, size: int) -> Holding:
            seen.append(records.record(0).state)
            return super().hold(name, size)

    with keeping(tmp_path / "k.sock"):
        held = attach(records, Watching(tmp_path / "k.sock"), 4096)
        os.close(held.descriptor)
    assert held.created and seen == [SlotState.EMPTY]
    records.close()


def test_records_of_memory_that_is_still_held_count_on(tmp_path: Path) -> None:
    records = Arena.create(tmp_path / "arena", 1)
    with keeping(tmp_path / "k.sock") as client:
        os.close(attach(records, client, 4096).descriptor)
        records.mark_dirty(1, SlotRecord())
        records.mark_verified(1, "r" * 64, "s" * 64)
        again = attach(records, client, 4096)
        assert not again.created and records.record(1).state is SlotState.VERIFIED
        os.close(again.descriptor)
        with pytest.raises(Refusal, match=r"memory_differs.*at least 16384 bytes, found 8192"):
            attach(records, client, 8192)
        assert records.record(1).state is SlotState.VERIFIED
    with keeping(tmp_path / "k.sock", 4096) as client, pytest.raises(Refusal, match="no_headroom"):  # another one, which may hold less
        attach(records, client, 4096)
    assert records.record(1).state is SlotState.EMPTY
    records.close()
