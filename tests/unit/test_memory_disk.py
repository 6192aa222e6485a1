"""The disk in memory is as bad as a real one: what the durability tests rely on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from raftmeta.durable import DiskFailed, DiskFull
from tests.support.memory_disk import SECTOR, MemoryDisk, PowerLost

PATH = Path("/d/file")


def with_file(seed: int = 0, data: bytes = b"a" * 4 * SECTOR) -> MemoryDisk:
    disk = MemoryDisk(seed)
    disk.put(PATH, data)
    return disk


def test_an_unsynced_write_is_lost_kept_or_torn_by_sector() -> None:
    seen = set()
    for seed in range(60):
        disk = with_file(seed)
        disk.pwrite(disk.open(PATH), b"b" * 4 * SECTOR, 0)
        disk.crash()
        data = disk.contents(PATH)
        sectors = [data[at : at + SECTOR] for at in range(0, len(data), SECTOR)]
        assert all(sector in (b"a" * SECTOR, b"b" * SECTOR) for sector in sectors)
        seen.add("".join(chr(sector[0]) for sector in sectors))
    assert {"aaaa", "bbbb"} < seen
    assert len(seen) > 8


def test_a_sector_written_twice_may_keep_the_first_write() -> None:
    seen = set()
    for seed in range(60):
        disk = with_file(seed, b"a" * SECTOR)
        file = disk.open(PATH)
        disk.pwrite(file, b"b" * SECTOR, 0)
        disk.pwrite(file, b"c" * SECTOR, 0)
        disk.crash(keep=0.3)
        seen.add(disk.contents(PATH)[:1])
    assert seen == {b"a", b"b", b"c"}


def test_a_synced_write_survives_and_a_grown_file_may_shrink_back_only_before_the_sync() -> None:
    sizes = set()
    for seed in range(30):
        disk = with_file(seed)
        file = disk.open(PATH)
        disk.pwrite(file, b"x" * SECTOR, 4 * SECTOR)
        disk.fdatasync(file)
        disk.pwrite(file, b"y" * SECTOR, 5 * SECTOR)
        disk.crash(keep=0.5)
        assert disk.contents(PATH)[4 * SECTOR : 5 * SECTOR] == b"x" * SECTOR
        sizes.add(len(disk.contents(PATH)))
    assert sizes == {5 * SECTOR, 6 * SECTOR}


def test_names_change_durably_only_with_the_sync_of_the_directory() -> None:
    for synced in (True, False):
        disk = with_file()
        disk.close(disk.open(Path("/d/new"), create=True))
        disk.rename(PATH, Path("/d/renamed"))
        if synced:
            disk.sync_directory(Path("/d"))
        disk.unlink(Path("/d/new"))
        disk.crash(keep=0.0)
        assert disk.listdir(Path("/d")) == (["new", "renamed"] if synced else ["file"])


def test_death_of_the_process_keeps_what_was_written_and_closes_every_file() -> None:
    disk = with_file()
    file = disk.open(PATH)
    disk.pwrite(file, b"b", 0)
    disk.kill()
    assert disk.contents(PATH)[:1] == b"b"
    with pytest.raises(DiskFailed):
        disk.pread(file, 1, 0)


def test_power_goes_before_the_planned_call_and_stays_off() -> None:
    disk = with_file()
    file = disk.open(PATH)
    disk.crash_at(1)
    disk.pwrite(file, b"b", 0)
    with pytest.raises(PowerLost):
        disk.fdatasync(file)
    with pytest.raises(PowerLost):
        disk.exists(PATH)
    disk.crash(keep=0.0)
    assert disk.contents(PATH)[:1] == b"a"


def test_a_failed_sync_hides_what_it_lost_from_the_next() -> None:
    disk = with_file()
    file = disk.open(PATH)
    disk.pwrite(file, b"b", 0)
    disk.fail("fdatasync", errno.EIO)
    with pytest.raises(DiskFailed):
        disk.fdatasync(file)
    disk.fdatasync(file)
    assert disk.pread(file, 1, 0) == b"b"
    disk.crash(keep=0.0)
    assert disk.contents(PATH)[:1] == b"a"


def test_a_full_disk_refuses_growth_and_still_takes_writes_in_place() -> None:
    disk = with_file()
    disk.capacity_bytes = disk.used_bytes()
    file = disk.open(PATH)
    disk.pwrite(file, b"b", 0)
    with pytest.raises(DiskFull):
        disk.pwrite(file, b"b", 4 * SECTOR)
    with pytest.raises(DiskFull):
        disk.preallocate(file, 5 * SECTOR)
    assert disk.free_bytes(PATH.parent) == 0
    disk.unlink(PATH)
    assert disk.free_bytes(PATH.parent) == 4 * SECTOR


def test_equal_seeds_and_calls_give_equal_bytes() -> None:
    def run(seed: int) -> bytes:
        disk = with_file(seed)
        for round_ in range(5):
            disk.pwrite(disk.open(PATH), bytes([round_]) * 4 * SECTOR, 0)
            disk.crash()
        return disk.contents(PATH)

    assert run(7) == run(7)
    assert len({run(seed) for seed in range(5)}) > 1
