"""The file of block checks on its way into the store: fetched last, judged, made here where no source has it, kept with its version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from consistency import block_sidecar
from node_agent.fetch import Cancelled, FetchFailed, SourceError
from node_agent.store import BlobMismatch, Store
from raftmeta.core import block_file
from raftmeta.core.manifest import FileEntry, faults
from tests.support.small_version import Version, with_blocks
from tests.unit.node_agent.test_fetch import TENSORS, Memory, fetcher, never, put, version, whole


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", 1 << 30)


def blocks_file(wanted: Version) -> FileEntry:
    found = block_file.find(wanted.manifest)
    assert found is not None
    return found


def test_block_checks_come_last_and_are_part_of_the_version(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    source = Memory(wanted)
    fetcher(store, {"http://one/": source}).fetch(wanted.manifest, frozenset(), never)
    file = blocks_file(wanted)
    assert source.requests[-1] == (file.name, 0, file.size_bytes)
    assert store.path(file.sha256).read_bytes() == (wanted.directory / file.name).read_bytes()
    assert whole(store, wanted)


def test_of_a_next_version_only_what_changed_and_its_block_checks_move(tmp_path: Path, store: Store) -> None:
    first = with_blocks(version(tmp_path))
    fetcher(store, {"http://one/": Memory(first)}).fetch(first.manifest, frozenset(), never)
    second = with_blocks(version(tmp_path, TENSORS | {"b": b"B" * 300}, label="2.0.0"))
    received = fetcher(store, {"http://one/": Memory(second)}).fetch(second.manifest, frozenset(), never)
    assert received == 300 + second.manifest.files[0].size_bytes + blocks_file(second).size_bytes
    assert whole(store, second)


def test_block_checks_are_brought_although_every_tensor_is_elsewhere(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    elsewhere = frozenset(tensor.sha256 for tensor in wanted.manifest.tensors)
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, elsewhere, never)
    assert store.has(blocks_file(wanted).sha256, blocks_file(wanted).size_bytes)


def test_a_source_with_other_block_checks_is_left_and_the_next_one_serves(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path, sources=["http://bad/", "http://good/"]))
    bad, good = Memory(wanted), Memory(wanted)
    name = blocks_file(wanted).name
    bad.files[name] = bad.files[name][:-1] + b"?"
    fetcher(store, {"http://bad/": bad, "http://good/": good}).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)
    assert [request[0] for request in good.requests] == [name], "the weights came from the first source"


class Lacks(Memory):
    """A source that is older than the file of block checks; or has no file at all."""

    def __init__(self, version: Version, everything: bool = False) -> None:
        super().__init__(version)
        self._everything = everything

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
        if self._everything or file.endswith(".wcv"):
            raise SourceError("status 404")
        yield from super().read(file, file_size, begin, end)


def test_a_source_without_the_block_checks_leaves_only_them_to_the_next(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path, sources=["http://lacks/", "http://whole/"]))
    rest = Memory(wanted)
    fetcher(store, {"http://lacks/": Lacks(wanted), "http://whole/": rest}).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)
    assert [request[0] for request in rest.requests] == [blocks_file(wanted).name]


def test_block_checks_that_no_source_has_are_made_of_the_weights(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    file = blocks_file(wanted)
    (tmp_path / "store" / "partial" / file.sha256).write_bytes(b"what a source left")
    received = fetcher(store, {"http://one/": Lacks(wanted)}).fetch(wanted.manifest, frozenset(), never)
    assert received == sum(map(len, TENSORS.values())) + wanted.manifest.files[0].size_bytes
    assert whole(store, wanted)
    assert store.path(file.sha256).read_bytes() == (wanted.directory / file.name).read_bytes()


def test_a_node_that_has_the_weights_needs_no_source_for_their_block_checks(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    store.discard(blocks_file(wanted).sha256)
    nowhere = msgspec.structs.replace(wanted.manifest, sources=())
    assert fetcher(store, {}).fetch(nowhere, frozenset(), never) == 0
    assert whole(store, wanted)


@pytest.mark.parametrize("missing", ["a tensor that is elsewhere", "everything"])
def test_without_the_weights_in_the_store_a_source_has_to_have_the_block_checks(tmp_path: Path, store: Store, missing: str) -> None:
    wanted = with_blocks(version(tmp_path))
    everything = missing == "everything"
    elsewhere = frozenset() if everything else frozenset([wanted.manifest.tensors[0].sha256])
    with pytest.raises(FetchFailed, match="404") as failed:
        fetcher(store, {"http://one/": Lacks(wanted, everything)}).fetch(wanted.manifest, elsewhere, never)
    assert failed.value.code == "source_unavailable"


def test_made_block_checks_stand_for_no_other_file_that_is_missing(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    store.discard(blocks_file(wanted).sha256)
    store.discard(wanted.manifest.files[0].sha256)
    with pytest.raises(FetchFailed, match="404"):
        fetcher(store, {"http://one/": Lacks(wanted, everything=True)}).fetch(wanted.manifest, frozenset(), never)


def test_block_checks_that_do_not_follow_from_the_weights_refuse_the_version_without_a_source_too(tmp_path: Path, store: Store) -> None:
    wanted = lying(tmp_path)
    with pytest.raises(FetchFailed, match="that of these weights has") as failed:
        fetcher(store, {"http://one/": Lacks(wanted)}).fetch(wanted.manifest, frozenset(), never)
    assert failed.value.code == "integrity_mismatch"
    assert not store.path(blocks_file(wanted).sha256).exists()


def test_a_tensor_that_rotted_is_forgotten_before_block_checks_are_made_of_it(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    store.discard(blocks_file(wanted).sha256)
    rotten = wanted.manifest.tensors[3]
    path = store.path(rotten.sha256)
    path.chmod(0o640)
    path.write_bytes(b"D" + path.read_bytes()[1:])
    with pytest.raises(BlobMismatch, match="tensor 'd'"):
        fetcher(store, {"http://one/": Lacks(wanted)}).fetch(wanted.manifest, frozenset(), never)
    assert not path.exists()
    assert not store.path(blocks_file(wanted).sha256).exists()


def test_making_block_checks_stops_when_nobody_wants_them(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    store.discard(blocks_file(wanted).sha256)
    with pytest.raises(Cancelled):
        fetcher(store, {"http://one/": Lacks(wanted)}).fetch(wanted.manifest, frozenset(), lambda: True)
    assert not store.path(blocks_file(wanted).sha256).exists()


def lying(tmp_path: Path) -> Version:
    """A version that names, with the right digest, a file of checks that are not those of its entries."""
    wanted = with_blocks(version(tmp_path))
    content = bytearray((wanted.directory / blocks_file(wanted).name).read_bytes())
    content[-1] ^= 1
    entry = block_sidecar.entry_of(bytes(content))
    (wanted.directory / entry.name).write_bytes(content)
    files = [file for file in wanted.manifest.files if file.name != blocks_file(wanted).name]
    return wanted._replace(manifest=block_sidecar.naming(msgspec.structs.replace(wanted.manifest, files=tuple(files)), bytes(content)))


def test_block_checks_that_do_not_hash_to_the_entries_refuse_the_version_and_do_not_enter(tmp_path: Path, store: Store) -> None:
    wanted = lying(tmp_path)
    assert not faults(wanted.manifest)
    with pytest.raises(FetchFailed, match="block checks of tensor 'd'") as failed:
        fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    assert failed.value.code == "integrity_mismatch"
    assert not store.path(blocks_file(wanted).sha256).exists()
    assert list((tmp_path / "store" / "partial").iterdir()) == []


def test_block_checks_that_entered_for_another_version_are_judged_again(tmp_path: Path, store: Store) -> None:
    wanted = lying(tmp_path)
    put(store, (wanted.directory / blocks_file(wanted).name).read_bytes())
    source = Memory(wanted)
    with pytest.raises(FetchFailed) as failed:
        fetcher(store, {"http://one/": source}).fetch(wanted.manifest, frozenset(), never)
    assert failed.value.code == "integrity_mismatch"
    assert source.requests == []
    assert store.has(blocks_file(wanted).sha256, blocks_file(wanted).size_bytes), "the other version may need them"


def test_block_checks_that_rotted_in_the_store_are_fetched_again(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    file = blocks_file(wanted)
    path = store.path(file.sha256)
    path.chmod(0o640)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    source = Memory(wanted)
    fetcher(store, {"http://one/": source}).fetch(wanted.manifest, frozenset(), never)
    assert source.requests == [(file.name, 0, file.size_bytes)]
    assert path.read_bytes() == (wanted.directory / file.name).read_bytes()


def test_block_checks_stay_as_long_as_their_version_is_kept(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    store.put_manifest(wanted.target.checksum, wanted.manifest)
    assert store.collect([wanted.target.checksum]) == 0
    assert store.has(blocks_file(wanted).sha256, blocks_file(wanted).size_bytes)
    store.collect([])
    assert not store.has(blocks_file(wanted).sha256, blocks_file(wanted).size_bytes)


def test_block_checks_are_no_file_of_the_directory_that_models_are_opened_from(tmp_path: Path, store: Store) -> None:
    wanted = with_blocks(version(tmp_path))
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    directory = store.materialize(wanted.target.checksum, wanted.manifest)
    assert [path.name for path in directory.iterdir()] == ["config.json"]
