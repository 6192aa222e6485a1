from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from node_agent.store import BlobMismatch, Store, blobs_of, check_blob
from raftmeta.core.errors import RaftmetaError
from tests.support.small_version import make_version

DATA = bytes(range(256)) * 5
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", 1 << 30)


def put(store: Store, data: bytes) -> str:
    sha = hashlib.sha256(data).hexdigest()
    writer = store.writer(sha, len(data))
    writer.write(data)
    writer.commit()
    return sha


def test_a_blob_is_in_the_store_only_after_commit(store: Store) -> None:
    writer = store.writer(SHA, len(DATA))
    writer.write(DATA)
    assert not store.has(SHA, len(DATA))
    writer.commit()
    assert store.has(SHA, len(DATA))
    assert store.path(SHA).read_bytes() == DATA
    assert store.path(SHA).stat().st_mode & 0o777 == 0o440


def test_a_blob_of_another_size_does_not_count(store: Store) -> None:
    put(store, DATA)
    assert not store.has(SHA, len(DATA) - 1)


@pytest.mark.parametrize("data", [DATA[:-1], DATA[:-1] + b"\x00", b""])
def test_other_bytes_are_refused_and_leave_nothing(store: Store, data: bytes) -> None:
    writer = store.writer(SHA, len(DATA))
    writer.write(data)
    with pytest.raises(BlobMismatch):
        writer.commit()
    assert not store.has(SHA, len(DATA))
    assert store.writer(SHA, len(DATA)).offset == 0


def test_more_bytes_than_the_blob_has_are_refused_before_they_are_written(store: Store) -> None:
    writer = store.writer(SHA, len(DATA))
    with pytest.raises(BlobMismatch, match="more than its 1280 bytes"):
        writer.write(DATA + b"x")
    assert store.writer(SHA, len(DATA)).offset == 0


def test_bytes_that_the_disk_does_not_give_back_are_refused(store: Store, tmp_path: Path) -> None:
    writer = store.writer(SHA, len(DATA))
    writer.write(DATA)
    (tmp_path / "store" / "partial" / SHA).write_bytes(DATA[:-1] + b"?")
    with pytest.raises(BlobMismatch, match="the disk gave back"):
        writer.commit()
    assert not store.has(SHA, len(DATA))


def test_a_later_writer_goes_on_where_an_earlier_one_stopped(store: Store) -> None:
    first = store.writer(SHA, len(DATA))
    first.write(DATA[:700])
    first.pause()
    second = store.writer(SHA, len(DATA))
    assert (second.offset, second.resumed) == (700, True)
    second.write(DATA[700:])
    second.commit()
    assert store.path(SHA).read_bytes() == DATA


def test_a_partial_blob_longer_than_the_blob_starts_over(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / "partial" / SHA).write_bytes(DATA + DATA)
    assert store.writer(SHA, len(DATA)).offset == 0


def test_an_empty_blob_is_a_blob(store: Store) -> None:
    sha = put(store, b"")
    assert store.has(sha, 0)


def test_reading_into_memory_fills_all_of_it_or_raises(store: Store) -> None:
    put(store, DATA)
    blob = store.open(SHA, len(DATA))
    into = bytearray(500)
    blob.read_into(300, memoryview(into))
    assert into == DATA[300:800]
    with pytest.raises(RaftmetaError, match="ended at byte 1280"):
        blob.read_into(1000, memoryview(into))
    blob.close()
    with pytest.raises(RaftmetaError, match="1280 bytes, expected 1279"):
        store.open(SHA, len(DATA) - 1)
    with pytest.raises(RaftmetaError):
        store.open("0" * 64, len(DATA))


def test_a_blob_that_was_read_is_handed_to_whoever_closes_it(tmp_path: Path) -> None:
    closed: list[int] = []
    store = Store(tmp_path, 1 << 30, closed.append)
    put(store, DATA)
    store.open(SHA, len(DATA)).close()
    with pytest.raises(RaftmetaError):
        store.open(SHA, 1)
    assert len(set(closed)) == 2
    for fd in closed:
        os.close(fd)


def test_the_quota_refuses_with_the_numbers(tmp_path: Path) -> None:
    store = Store(tmp_path, 2 << 20)
    put(store, DATA)
    store.reserve((2 << 20) - len(DATA))
    with pytest.raises(RaftmetaError, match="holds 1280 bytes and needs 2097152 more, the quota is 2097152") as refused:
        store.reserve(2 << 20)
    assert refused.value.code == "quota_exceeded"


def test_more_than_the_disk_has_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(RaftmetaError) as refused:
        Store(tmp_path, 1 << 62).reserve(1 << 60)
    assert refused.value.code == "disk_full"


def test_a_version_directory_has_files_under_their_names_and_leaves_weights_out(store: Store, tmp_path: Path) -> None:
    version = make_version(tmp_path / "v1", "1.0.0", {"a": b"a" * 10})
    put(store, (version.directory / "config.json").read_bytes())
    directory = store.materialize(version.target.checksum, version.manifest)
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    assert store.materialize(version.target.checksum, version.manifest) == directory


def test_a_version_directory_is_complete_or_absent(store: Store, tmp_path: Path) -> None:
    version = make_version(tmp_path / "v1", "1.0.0", {"a": b"a" * 10})
    with pytest.raises(BlobMismatch, match=r"config\.json"):
        store.materialize(version.target.checksum, version.manifest)
    assert not store.version_dir(version.target.checksum).exists()


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o640)
    path.write_bytes(data)


def test_a_version_directory_shares_no_bytes_with_the_blobs(store: Store, tmp_path: Path) -> None:
    version = make_version(tmp_path / "v1", "1.0.0", {"a": b"a" * 10})
    sha256 = put(store, (version.directory / "config.json").read_bytes())
    file = store.materialize(version.target.checksum, version.manifest) / "config.json"
    damage(store.path(sha256))
    assert store.version_fault(version.target.checksum, version.manifest) == ""
    store.discard(sha256)
    put(store, (version.directory / "config.json").read_bytes())
    damage(file)
    assert check_blob(store.path(sha256), sha256)
    file.unlink()
    os.link(store.path(sha256), file)
    assert "not a file of its own" in store.version_fault(version.target.checksum, version.manifest)


@pytest.mark.parametrize("what", ["file", "planted", "link", "gone"])
def test_a_version_directory_that_changed_is_made_anew(store: Store, tmp_path: Path, what: str) -> None:
    version = make_version(tmp_path / "v1", "1.0.0", {"a": b"a" * 10})
    right = (version.directory / "config.json").read_bytes()
    put(store, right)
    directory = store.materialize(version.target.checksum, version.manifest)
    if what == "file":
        damage(directory / "config.json")
    elif what == "planted":
        (directory / "tokenizer.json").write_bytes(b"{}")
    else:
        (directory / "config.json").unlink()
    if what == "link":
        (directory / "config.json").symlink_to(version.directory / "config.json")
    assert store.version_fault(version.target.checksum, version.manifest)
    assert store.materialize(version.target.checksum, version.manifest) == directory
    assert [(path.name, path.is_symlink(), path.read_bytes()) for path in directory.iterdir()] == [("config.json", False, right)]
    assert [path.name for path in directory.parent.iterdir()] == [version.target.checksum], "nothing else is left"


def test_a_version_directory_is_never_made_of_a_blob_that_rotted(store: Store, tmp_path: Path) -> None:
    version = make_version(tmp_path / "v1", "1.0.0", {"a": b"a" * 10})
    right = (version.directory / "config.json").read_bytes()
    sha256 = put(store, right)
    damage(store.path(sha256))
    with pytest.raises(BlobMismatch):
        store.materialize(version.target.checksum, version.manifest)
    assert not store.version_dir(version.target.checksum).exists()
    assert not store.has(sha256, len(right)), "it is fetched again"


def test_collecting_removes_what_no_kept_version_names_and_nothing_else(store: Store, tmp_path: Path) -> None:
    shared, only_first, only_second = b"s" * 100, b"1" * 100, b"2" * 100
    first = make_version(tmp_path / "v1", "1.0.0", {"a": shared, "b": only_first})
    second = make_version(tmp_path / "v2", "2.0.0", {"a": shared, "b": only_second})
    for version in (first, second):
        for data in (shared, only_first, only_second, (version.directory / "config.json").read_bytes()):
            put(store, data)
        store.put_manifest(version.target.checksum, version.manifest)
        store.materialize(version.target.checksum, version.manifest)
    stray = store.writer("f" * 64, 10)
    stray.write(b"half")
    stray.pause()

    freed = store.collect([second.target.checksum])

    assert freed > 100
    assert store.missing(blobs_of(second.manifest)) == []
    assert store.versions() == {second.target.checksum}
    assert store.version_dir(second.target.checksum).is_dir()
    assert not store.version_dir(first.target.checksum).exists()
    assert not store.has(hashlib.sha256(only_first).hexdigest(), 100)
    assert store.writer("f" * 64, 10).offset == 0


def test_nothing_is_collected_while_the_manifest_of_a_kept_version_is_unknown(store: Store) -> None:
    put(store, DATA)
    assert store.collect(["a" * 64]) == 0
    assert store.has(SHA, len(DATA))


def test_a_damaged_manifest_is_an_error_not_an_empty_one(store: Store, tmp_path: Path) -> None:
    version = make_version(tmp_path / "v1", "1.0.0", {"a": b"a" * 10})
    store.put_manifest(version.target.checksum, version.manifest)
    assert store.manifest(version.target.checksum) == version.manifest
    path = tmp_path / "store" / "manifests" / version.target.checksum
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(RaftmetaError):
        store.manifest(version.target.checksum)


def test_a_blob_that_rotted_is_told_from_a_whole_one(store: Store) -> None:
    put(store, DATA)
    assert check_blob(store.path(SHA), SHA)
    store.path(SHA).chmod(0o640)
    store.path(SHA).write_bytes(DATA[:-1] + b"!")
    assert not check_blob(store.path(SHA), SHA)
    store.discard(SHA)
    assert not check_blob(store.path(SHA), SHA)
