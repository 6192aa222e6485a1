"""One safe way to write a file, to read it back, and to own a directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmeta import durable
from raftmeta.durable import DirectoryRefused, DiskFailed, DiskFull, FileDamaged, OsDisk, lock_directory, read_file, write_file
from tests.support.memory_disk import MemoryDisk, PowerLost

PATH = Path("/member/fence")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=3000))
def test_a_file_reads_back_as_it_was_written(data: bytes) -> None:
    disk = MemoryDisk()
    write_file(disk, PATH, b"before")
    write_file(disk, PATH, data)
    disk.crash(keep=0.0)
    assert read_file(disk, PATH) == data
    assert disk.listdir(PATH.parent) == ["fence"]


def test_no_file_is_told_from_an_empty_one() -> None:
    disk = MemoryDisk()
    assert read_file(disk, PATH) is None
    write_file(disk, PATH, b"")
    assert read_file(disk, PATH) == b""


def test_every_flipped_byte_cut_and_extension_of_a_file_is_found() -> None:
    disk = MemoryDisk()
    write_file(disk, PATH, b"some bytes")
    whole = disk.contents(PATH)
    for offset in range(len(whole)):
        disk.flip(PATH, offset, 0x80)
        with pytest.raises(FileDamaged, match="expected"):
            read_file(disk, PATH)
        disk.flip(PATH, offset, 0x80)
        cut = disk.clone()
        cut.cut(PATH, offset)
        with pytest.raises(FileDamaged):
            read_file(cut, PATH)
    disk.put(PATH, b"\0", len(whole))
    with pytest.raises(FileDamaged):
        read_file(disk, PATH)


@pytest.mark.parametrize("size", [0, 1, durable._FREED_BYTES, durable._FREED_BYTES * 3 + 5])
def test_a_large_file_goes_in_steps_none_of_which_frees_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size)
    left = [size]
    cut = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda fd, to: (left.append(to), cut(fd, to)))
    monkeypatch.setattr(durable, "_FREED_PAUSE_S", 0.0)
    OsDisk().unlink_large(path)
    assert not path.exists()
    assert all(before - after <= durable._FREED_BYTES for before, after in pairwise([*left, 0]))
    OsDisk().unlink_large(path)  # one that is not there counts as removed


@pytest.mark.parametrize("synced", [True, False])
def test_power_loss_at_any_call_leaves_the_old_or_the_new_bytes(synced: bool) -> None:
    class Disk(MemoryDisk):
        def fsync(self, file: durable.File) -> None:
            if synced:
                super().fsync(file)

    seen, damaged = set(), 0
    for call in range(8):
        for seed in range(15):
            disk = Disk(seed)
            write_file(disk, PATH, b"old")
            super(Disk, disk).fsync(disk.open(PATH))
            disk.crash_at(call)
            try:
                write_file(disk, PATH, b"new" * 500)
            except PowerLost:
                pass
            disk.crash()
            try:
                seen.add(read_file(disk, PATH))
            except FileDamaged:
                damaged += 1
    if synced:
        assert seen == {b"old", b"new" * 500}
        assert damaged == 0
    else:
        assert damaged


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["create", "pwrite", "fsync", "rename"])
def test_a_failed_write_keeps_the_old_file_and_says_which(call: str, number: int) -> None:
    disk = MemoryDisk()
    write_file(disk, PATH, b"old")
    disk.fail(call, number)
    with pytest.raises(DiskFull if number == errno.ENOSPC else DiskFailed, match="fence"):
        write_file(disk, PATH, b"new")
    assert read_file(disk, PATH) == b"old"
    write_file(disk, PATH, b"new")
    assert read_file(disk, PATH) == b"new"


def test_what_reads_back_otherwise_than_written_does_not_get_the_name() -> None:
    disk = MemoryDisk()
    write_file(disk, PATH, b"old")
    disk.on_call = lambda call, path: disk.flip(path, 1) if call == "fsync" else None
    with pytest.raises(FileDamaged, match="the bytes just written"):
        write_file(disk, PATH, b"new")
    assert read_file(disk, PATH) == b"old"


def test_a_file_is_bounded() -> None:
    with pytest.raises(ValueError, match="the limit of a checked file"):
        write_file(MemoryDisk(), PATH, bytes(durable.MAX_FILE_BYTES + 1))


# the operating system's disk


def test_the_real_disk_writes_reads_renames_and_lists(tmp_path: Path) -> None:
    disk = OsDisk()
    directory = tmp_path / "a" / "b"
    disk.make_directory(directory)
    disk.make_directory(directory)
    write_file(disk, directory / "file", b"x" * 100_000)
    assert read_file(disk, directory / "file") == b"x" * 100_000
    assert disk.listdir(directory) == ["file"]
    file = disk.open(directory / "other", create=True)
    disk.preallocate(file, 10_000)
    disk.pwrite(file, b"hello", 9_998)
    disk.fdatasync(file)
    assert disk.size(file) == 10_003
    assert disk.pread(file, 100, 9_996) == b"\0\0hello"
    assert disk.pread(file, 100, 20_000) == b""
    disk.close(file)
    disk.rename(directory / "other", directory / "third")
    assert (disk.exists(directory / "other"), disk.exists(directory / "third")) == (False, True)
    disk.unlink(directory / "third")
    disk.unlink(directory / "third")
    assert disk.free_bytes(directory) > 0
    assert (directory / "file").stat().st_mode & 0o777 == 0o600


def test_errors_of_the_operating_system_name_the_call_and_the_file(tmp_path: Path) -> None:
    disk = OsDisk()
    with pytest.raises(DiskFailed, match=r"cannot open .*missing: No such file"):
        disk.open(tmp_path / "missing")
    with pytest.raises(DiskFailed, match="cannot list"):
        disk.listdir(tmp_path / "missing")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(DiskFailed, match="cannot open"):
        disk.open(tmp_path / "link", create=True)
    closed = disk.open(tmp_path / "file", create=True)
    disk.close(closed)
    for use in (lambda: disk.pwrite(closed, b"x", 0), lambda: disk.pread(closed, 1, 0), lambda: disk.fdatasync(closed)):
        with pytest.raises(DiskFailed) as caught:
            use()
        assert caught.value.errno == errno.EBADF


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_space_is_told_from_a_broken_disk() -> None:
    disk = OsDisk()
    file = disk.open(Path("/dev/full"))
    with pytest.raises(DiskFull, match="cannot write 4 bytes at 0 of /dev/full: No space left"):
        disk.pwrite(file, b"1234", 0)
    disk.close(file)


# owning a directory


def test_a_second_process_is_refused_and_told_which_one_holds_the_directory(tmp_path: Path) -> None:
    script = f"import sys; from pathlib import Path; from raftmeta.durable import lock_directory; lock_directory(Path({str(tmp_path)!r}))"
    with lock_directory(tmp_path):
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert f"{tmp_path} is in use by process {os.getpid()}; one directory serves one process" in second.stderr
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        with pytest.raises(DirectoryRefused, match=f"process {os.getpid()}"):
            lock_directory(tmp_path)
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from raftmeta.durable import lock_directory; "
        f"lock = lock_directory(Path({str(tmp_path)!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == -9
    lock_directory(tmp_path).release()


def test_locking_creates_a_missing_directory_and_refuses_what_is_none(tmp_path: Path) -> None:
    lock_directory(tmp_path / "new" / "data").release()
    assert (tmp_path / "new" / "data").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DirectoryRefused, match="not a directory"):
        lock_directory(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("whole", [True, False])
def test_the_data_of_another_user_is_refused_untouched(tmp_path: Path, whole: bool) -> None:
    (tmp_path / "journal").mkdir()
    os.chown(tmp_path if whole else tmp_path / "journal", 12345, -1)
    with pytest.raises(DirectoryRefused, match="belongs to user id 12345, this process runs as user id 0") as caught:
        lock_directory(tmp_path)
    assert caught.value.code == "directory_refused"
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_a_new_file_without_a_descriptor_for_it_is_no_room_and_nothing_was_changed(tmp_path: Path) -> None:
    """In a process of its own, which has none left."""
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "large").write_bytes(bytes(durable._FREED_BYTES * 2))
    code = f"""
import os, resource
from pathlib import Path
from raftmeta.durable import DiskFailed, DiskFull, OsDisk, write_file
disk, directory = OsDisk(), Path({str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
hoard = []
while True:
    try:
        hoard.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
found = []
acts = (
    lambda: disk.open(directory / "new", create=True),
    lambda: write_file(disk, directory / "old", b"new"),
    lambda: disk.open(directory / "old"),
)
for act in acts:
    try:
        act()
    except (DiskFull, DiskFailed) as error:
        found.append(type(error).__name__)
disk.unlink_large(directory / "large")
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["DiskFull", "DiskFull", "DiskFailed"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old": b"old"}
