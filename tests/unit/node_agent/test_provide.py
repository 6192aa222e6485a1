"""Versions on their way into the store: what is believed of a manifest, and what makes room."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from consistency import block_sidecar
from node_agent.fetch import BlobsRotten, Cancelled, Fetcher, FetchFailed, Patience, SourceError
from node_agent.prepared import Prepared
from node_agent.provide import StoreProvider
from node_agent.refusal import Refusal
from node_agent.sources import opener
from node_agent.store import Store, blobs_of, check_blob
from raftmeta.core import block_file
from raftmeta.core.errors import RaftmetaError
from tests.support.small_version import Version, make_version, with_blocks
from tests.unit.node_agent.test_sources import no_bucket

TENSORS = {"a": b"a" * 5000, "b": b"b" * 300}


class FakePlane:
    def __init__(self, *versions: Version) -> None:
        self.manifests: dict[str, Any] = {v.target.label: msgspec.to_builtins(v.manifest) for v in versions}
        self.asked = 0
        self.refuse: RaftmetaError | None = None

    async def get_version(self, model: str, label: str) -> Mapping[str, Any]:
        if self.refuse is not None:
            raise self.refuse
        return {"manifest_digest": hashlib.sha256(msgspec.json.encode(self.manifests[label])).hexdigest()}

    async def get_manifest(self, model: str, label: str) -> Mapping[str, Any]:
        self.asked += 1
        return self.manifests[label]  # type: ignore[no-any-return]


class Scene:
    def __init__(self, tmp_path: Path, *versions: Version, quota: int = 1 << 30, engines: tuple[str, ...] = ("fake",)) -> None:
        self.store = Store(tmp_path / "store", quota)
        self.plane = FakePlane(*versions)
        self.kept: frozenset[str] | None = frozenset()
        fetcher = Fetcher(self.store, opener([tmp_path], httpx.Client(), no_bucket), Patience(2, lambda _: None))
        self.provider = StoreProvider(self.store, fetcher, self.plane, lambda: self.kept, engines)

    async def fetch(self, version: Version) -> int:
        return await self.provider.fetch(version.target, frozenset(), lambda: False)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))


@pytest.fixture
def version(tmp_path: Path) -> Version:
    return make_version(tmp_path / "v1", "1.0.0", TENSORS)


def test_a_fetched_version_is_whole_and_can_be_opened(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        assert await scene.fetch(version) == 5300 + version.manifest.files[0].size_bytes
        assert not scene.store.missing(blobs_of(version.manifest))
        assert (scene.store.version_dir(version.target.checksum) / "config.json").is_file()
        assert await scene.fetch(version) == 0
        assert scene.plane.asked == 1, "a manifest that is here is not asked for again"

    run(work)


def test_a_version_for_an_engine_that_the_node_does_not_have_is_refused_before_its_bytes_come(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version, engines=("hf", "torch_module"))
        with pytest.raises(Refusal) as refused:
            await scene.fetch(version)
        assert (refused.value.kind, refused.value.phase, refused.value.found) == ("not_bindable", "plan", "fake")
        assert "an engine of hf, torch_module" in refused.value.expected
        assert scene.store.missing(blobs_of(version.manifest))

    run(work)


def test_block_checks_come_with_the_version_from_where_its_weights_are(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        with_checks = with_blocks(version)
        scene = Scene(tmp_path, with_checks)
        prepared = Prepared(scene.store, frozenset)
        assert not prepared.covers(version.target)
        await scene.fetch(with_checks)
        file = block_file.find(with_checks.manifest)
        assert file is not None
        checks = block_sidecar.read(scene.store.path(file.sha256), with_checks.manifest)
        assert {name: checks[name].shape for name in checks} == {"a": (1, 2), "b": (1, 2)}
        assert prepared.covers(version.target)
        scene.store.discard(file.sha256)
        prepared.forget()
        assert not prepared.covers(version.target), "what is missing is fetched before the version counts as here"
        assert await scene.fetch(with_checks) == file.size_bytes

    run(work)


def test_a_label_with_block_checks_and_one_without_share_a_checksum(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        other = with_blocks(version)
        named = other._replace(target=other.target._replace(label="2.0.0"))
        scene = Scene(tmp_path, version, named)
        await scene.fetch(version)
        file = block_file.find(named.manifest)
        assert file is not None
        assert await scene.fetch(named) == file.size_bytes
        assert await scene.fetch(version) == 0
        assert scene.store.manifest(version.target.checksum) == version.manifest

    run(work)


@pytest.mark.parametrize("field", ["checksum", "vector_root"])
def test_a_manifest_that_is_not_the_decided_one_is_refused_before_a_byte_moves(tmp_path: Path, version: Version, field: str) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        other = version._replace(target=version.target._replace(**{field: "f" * 64}))
        with pytest.raises(FetchFailed) as failed:
            await scene.fetch(other)
        assert failed.value.code == "integrity_mismatch"
        assert scene.store.used_bytes() == 0
        assert scene.store.versions() == frozenset()

    run(work)


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        scene.plane.manifests["1.0.0"]["tensors"][0]["end"] += 1
        with pytest.raises(FetchFailed):
            await scene.fetch(version)

    run(work)


def test_what_is_no_manifest_is_an_error_of_the_control_plane(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        scene.plane.manifests["1.0.0"] = {"files": 3}
        with pytest.raises(RaftmetaError, match="no manifest"):
            await scene.fetch(version)

    run(work)


def test_a_full_store_gives_up_what_nothing_needs_and_keeps_the_rest(tmp_path: Path) -> None:
    async def work() -> None:
        old, kept, new = (make_version(tmp_path / f"v{n}", f"{n}.0.0", {"a": bytes([n]) * 400_000}) for n in (1, 2, 3))
        scene = Scene(tmp_path, old, kept, new, quota=1 << 20)
        await scene.fetch(old)
        await scene.fetch(kept)
        scene.kept = frozenset([kept.target.checksum])
        await scene.fetch(new)
        assert scene.store.versions() == {kept.target.checksum, new.target.checksum}
        assert not scene.store.missing(blobs_of(kept.manifest))

    run(work)


@pytest.mark.parametrize("known", [True, False])
def test_a_full_store_of_needed_versions_refuses(tmp_path: Path, known: bool) -> None:
    async def work() -> None:
        first, second, third = (make_version(tmp_path / f"v{n}", f"{n}.0.0", {"a": bytes([n]) * 400_000}) for n in (1, 2, 3))
        scene = Scene(tmp_path, first, second, third, quota=1 << 20)
        await scene.fetch(first)
        await scene.fetch(second)
        scene.kept = frozenset([first.target.checksum, second.target.checksum]) if known else None
        with pytest.raises(RaftmetaError) as full:
            await scene.fetch(third)
        assert full.value.code == "quota_exceeded"
        assert not scene.store.missing(blobs_of(first.manifest))

    run(work)


def test_a_fetch_that_is_no_longer_wanted_does_not_begin(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        with pytest.raises(Cancelled):
            await scene.provider.fetch(version.target, frozenset(), lambda: True)
        assert scene.plane.asked == 0

    run(work)


def test_blobs_that_rotted_are_thrown_out_and_fetched_again(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        await scene.fetch(version)
        await scene.provider.discard_rotten(version.target)
        path = scene.store.path(version.manifest.tensors[0].sha256)
        path.chmod(0o640)
        path.write_bytes(b"x" * 5000)
        with pytest.raises(BlobsRotten, match="1 blobs"):
            await scene.provider.discard_rotten(version.target)
        assert await scene.fetch(version) == 5000

    run(work)


def test_a_source_that_cannot_be_used_leaves_the_next_one(tmp_path: Path) -> None:
    async def work() -> None:
        good = (tmp_path / "v1").as_uri() + "/"
        version = make_version(tmp_path / "v1", "1.0.0", TENSORS, [good])
        scene = Scene(tmp_path, version)
        scene.plane.manifests["1.0.0"]["sources"] = ["http://[::1/", "http://a..b/", "file:///%00/"]
        with pytest.raises(FetchFailed) as failed:
            await scene.fetch(version)
        assert failed.value.code == "source_unavailable"
        scene.plane.manifests["1.0.0"]["sources"] = ["http://[::1/", "http://xn--/", good]
        assert await scene.fetch(version) > 5300

    run(work)


def test_the_same_bytes_published_again_come_from_where_the_new_label_says(tmp_path: Path) -> None:
    async def work() -> None:
        version = make_version(tmp_path / "v1", "1.0.0", TENSORS)
        again = version._replace(target=version.target._replace(label="1.0.1"))
        scene = Scene(tmp_path, version)
        scene.plane.manifests["1.0.1"] = scene.plane.manifests["1.0.0"] | {}
        scene.plane.manifests["1.0.0"]["sources"] = ["file:///nowhere/"]
        with pytest.raises(FetchFailed) as failed:
            await scene.fetch(version)
        assert failed.value.code == "source_unavailable"
        assert await scene.fetch(again) > 5300
        scene.store.discard(version.manifest.tensors[0].sha256)
        with pytest.raises(FetchFailed):
            await scene.fetch(version)

    run(work)


def test_a_label_published_anew_with_other_sources_is_asked_for_again(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        right = scene.plane.manifests["1.0.0"]["sources"]
        scene.plane.manifests["1.0.0"]["sources"] = ["file:///nowhere/"]
        with pytest.raises(FetchFailed):
            await scene.fetch(version)
        scene.plane.manifests["1.0.0"]["sources"] = right
        assert await scene.fetch(version) > 5300

    run(work)


def test_without_the_control_plane_the_stored_manifest_serves(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        await scene.fetch(version)
        scene.store.discard(version.manifest.tensors[0].sha256)
        scene.plane.refuse = RaftmetaError("no_quorum", "nobody answers")
        assert await scene.fetch(version) == 5000
        assert await scene.provider.manifest(version.target) == version.manifest
        scene.store.discard(version.manifest.tensors[0].sha256)
        scene.plane.refuse = RaftmetaError("not_found", "no such version")
        with pytest.raises(RaftmetaError, match="no such version"):
            await scene.fetch(version)

    run(work)


@pytest.mark.parametrize("rotten", [("blob",), ("directory",), ("blob", "directory")])
def test_a_file_that_rotted_is_right_again_before_it_is_used(tmp_path: Path, version: Version, rotten: tuple[str, ...]) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        await scene.fetch(version)
        file = next(item for item in version.manifest.files if item.role != "weights")
        kept = scene.store.version_dir(version.target.checksum) / file.name
        for path in [scene.store.path(file.sha256)] * ("blob" in rotten) + [kept] * ("directory" in rotten):
            path.chmod(0o640)
            path.write_bytes(b"?" * file.size_bytes)
        await scene.provider.ready_files(version.target, lambda: False)
        assert kept.read_bytes() == (version.directory / file.name).read_bytes()
        if rotten == ("blob", "directory"):
            assert check_blob(scene.store.path(file.sha256), file.sha256)

    run(work)


def test_a_file_that_rotted_and_that_no_source_has_is_refused(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        await scene.fetch(version)
        file = next(item for item in version.manifest.files if item.role != "weights")
        for path in (scene.store.path(file.sha256), scene.store.version_dir(version.target.checksum) / file.name):
            path.chmod(0o640)
            path.write_bytes(b"?" * file.size_bytes)
        (version.directory / file.name).unlink()
        with pytest.raises(FetchFailed) as failed:
            await scene.provider.ready_files(version.target, lambda: False)
        assert failed.value.code == "source_unavailable"

    run(work)


def test_another_version_that_shares_a_file_which_rotted_fetches_it_again(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)
        await scene.fetch(version)
        file = next(item for item in version.manifest.files if item.role != "weights")
        path = scene.store.path(file.sha256)
        path.chmod(0o640)
        path.write_bytes(b"?" * file.size_bytes)
        other = make_version(tmp_path / "v2", "1.0.0", TENSORS | {"c": b"c" * 10})
        assert next(item for item in other.manifest.files if item.role != "weights") == file
        scene.plane.manifests["1.0.0"] = msgspec.to_builtins(other.manifest)
        assert await scene.fetch(other) == 10 + file.size_bytes
        assert scene.store.version_fault(other.target.checksum, other.manifest) == ""

    run(work)


class Stuck:
    """A source that gives nothing until it is let go."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
        self.asked.set()
        while not self.go.wait(0.01):
            yield b""
        raise SourceError("nothing")


def test_a_fetch_that_never_ends_keeps_no_other_version_waiting_and_whoever_waits_for_it_can_be_stopped(
    tmp_path: Path, version: Version
) -> None:
    other = make_version(tmp_path / "v2", "2.0.0", {"a": b"2" * 5000})

    async def work() -> None:
        scene = Scene(tmp_path, version, other)
        await scene.fetch(version)
        open_source, stuck = scene.provider._fetcher._open_source, Stuck()
        scene.provider._fetcher._open_source = lambda url: stuck if "v2" in url else open_source(url)  # type: ignore[assignment, return-value]
        wanted = [True]
        fetching = asyncio.create_task(scene.provider.fetch(other.target, frozenset(), lambda: not wanted[0]))
        await asyncio.to_thread(stuck.asked.wait, 10)
        await scene.provider.ready_files(version.target, lambda: False)
        scene.store.discard(version.manifest.tensors[0].sha256)
        assert await scene.fetch(version) == version.manifest.tensors[0].size_bytes
        waiting = asyncio.create_task(scene.provider.ready_files(other.target, lambda: not wanted[0]))
        await asyncio.sleep(0)
        wanted[0] = False
        for task in (waiting, fetching):
            with pytest.raises(Cancelled):
                await task
        stuck.go.set()

    run(work)


def test_a_fetch_whose_task_is_cancelled_ends_in_its_thread_too(tmp_path: Path, version: Version) -> None:
    async def work() -> None:
        scene, stuck = Scene(tmp_path, version), Stuck()
        scene.provider._fetcher._open_source = lambda url: stuck  # type: ignore[assignment, return-value]
        fetching = asyncio.create_task(scene.fetch(version))
        await asyncio.to_thread(stuck.asked.wait, 10)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        while scene.provider._fetcher._jobs:  # within the time that a test has
            await asyncio.sleep(0.01)

    run(work)


@pytest.mark.parametrize("said", [{}, {"manifest_digest": 7}])
def test_a_version_that_does_not_say_which_manifest_it_has_fails_the_fetch_as_what_members_say(
    tmp_path: Path, version: Version, said: dict[str, Any]
) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, version)

        async def get_version(model: str, label: str) -> Mapping[str, Any]:
            return said

        scene.plane.get_version = get_version  # type: ignore[method-assign]
        with pytest.raises(RaftmetaError, match="bad_json"):
            await scene.fetch(version)

    run(work)
