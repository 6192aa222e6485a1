from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent.fetch import Cancelled, Fetcher, FetchFailed, Patience, SourceError, SourceLied, spans_of
from node_agent.store import Store, blobs_of, check_blob
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest
from tests.support.small_version import Version, make_version

TENSORS = {"a": b"a" * 5000, "b": b"b" * 300, "c": b"c" * 40, "d": b"d" * 7000}


class Memory:
    """A source in memory that counts, cuts and lies."""

    name = "memory"

    def __init__(self, version: Version, cut_after: list[int] | None = None, chunk: int = 999) -> None:
        self.files = {path.name: path.read_bytes() for path in version.directory.iterdir()}
        self.requests: list[tuple[str, int, int]] = []
        self.sent = 0
        self._cuts = list(cut_after or [])
        self._chunk = chunk

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
        self.requests.append((file, begin, end))
        if len(self.files[file]) != file_size:
            raise SourceLied(f"{file} has {len(self.files[file])} bytes")
        cut = begin + self._cuts.pop(0) if self._cuts else None
        while begin < end:
            if cut is not None and begin >= cut:
                raise SourceError("cut")
            chunk = self.files[file][begin : min(end, begin + self._chunk)]
            begin += len(chunk)
            self.sent += len(chunk)
            yield chunk


def fetcher(store: Store, sources: dict[str, object], attempts: int = 3) -> Fetcher:
    def open_source(url: str) -> Memory:
        found = sources[url]
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Memory)
        return found

    return Fetcher(store, open_source, Patience(attempts, lambda _: None))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", 1 << 30)


def version(tmp_path: Path, tensors: dict[str, bytes] | None = None, sources: list[str] | None = None, label: str = "1.0.0") -> Version:
    return make_version(tmp_path / f"v{label}", label, tensors or TENSORS, sources or ["http://one/"])


def never() -> bool:
    return False


def whole(store: Store, wanted: Version) -> bool:
    return not store.missing(blobs_of(wanted.manifest))


def test_neighbours_come_in_one_request_and_a_gap_starts_another(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path)
    source = Memory(wanted)
    received = fetcher(store, {"http://one/": source}).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)
    assert [request[0] for request in source.requests] == ["config.json", "w.safetensors", "w.safetensors"]
    assert received == source.sent == sum(map(len, TENSORS.values())) + wanted.manifest.files[0].size_bytes


def test_only_changed_tensors_move(tmp_path: Path, store: Store) -> None:
    first = version(tmp_path)
    fetcher(store, {"http://one/": Memory(first)}).fetch(first.manifest, frozenset(), never)
    second = version(tmp_path, TENSORS | {"b": b"B" * 300}, label="2.0.0")
    source = Memory(second)
    received = fetcher(store, {"http://one/": source}).fetch(second.manifest, frozenset(), never)
    assert received == 300 + second.manifest.files[0].size_bytes
    assert whole(store, second)


def test_what_the_active_slot_holds_is_not_fetched(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path)
    elsewhere = frozenset(hashlib.sha256(TENSORS[name]).hexdigest() for name in "ad")
    source = Memory(wanted)
    fetcher(store, {"http://one/": source}).fetch(wanted.manifest, elsewhere, never)
    assert source.sent == 340 + wanted.manifest.files[0].size_bytes


def test_a_cut_connection_goes_on_where_it_stopped(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path)
    source = Memory(wanted, cut_after=[10_000, 2000, 2000, 2000])
    fetcher(store, {"http://one/": source}, attempts=2).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)
    assert source.sent <= sum(map(len, TENSORS.values())) + wanted.manifest.files[0].size_bytes + 3 * 999
    assert len({request[1] for request in source.requests}) == len(source.requests)


def test_a_fetch_resumes_after_a_restart(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path)
    with pytest.raises(FetchFailed):
        fetcher(store, {"http://one/": Memory(wanted, cut_after=[100, 2000])}, attempts=1).fetch(wanted.manifest, frozenset(), never)
    again = Memory(wanted)
    fetcher(Store(tmp_path / "store", 1 << 30), {"http://one/": again}).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)
    total = sum(map(len, TENSORS.values()))
    assert again.sent < total


def test_attempts_without_progress_are_bounded_and_end_as_source_unavailable(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path)
    source = Memory(wanted, cut_after=[0] * 100)
    with pytest.raises(FetchFailed) as failed:
        fetcher(store, {"http://one/": source}, attempts=3).fetch(wanted.manifest, frozenset(), never)
    assert failed.value.code == "source_unavailable"
    assert len(source.requests) == 3


def test_the_next_source_is_tried_and_continues_with_what_is_missing(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path, sources=["http://one/", "http://two/"])
    first, second = Memory(wanted, cut_after=[100, 5500, 0, 0, 0]), Memory(wanted)
    fetcher(store, {"http://one/": first, "http://two/": second}, attempts=2).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)
    assert second.sent < sum(map(len, TENSORS.values()))


def test_a_source_with_other_bytes_is_left_and_the_next_one_serves(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path, sources=["http://bad/", "http://good/"])
    bad, good = Memory(wanted), Memory(wanted)
    bad.files["w.safetensors"] = bytes(len(bad.files["w.safetensors"]))
    fetcher(store, {"http://bad/": bad, "http://good/": good}).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)
    assert len([request for request in bad.requests if request[0] == "w.safetensors"]) == 1, "it was asked again"


@pytest.mark.parametrize("damage", ["flip", "longer", "shorter"])
def test_a_file_that_changed_since_publishing_is_an_integrity_mismatch(tmp_path: Path, store: Store, damage: str) -> None:
    wanted = version(tmp_path)
    source = Memory(wanted)
    data = source.files["w.safetensors"]
    source.files["w.safetensors"] = {"flip": data[:-1] + b"?", "longer": data + b"?", "shorter": data[:-1]}[damage]
    with pytest.raises(FetchFailed) as failed:
        fetcher(store, {"http://one/": source}).fetch(wanted.manifest, frozenset(), never)
    assert failed.value.code == "integrity_mismatch"
    assert "w.safetensors" in failed.value.detail
    changed = hashlib.sha256(TENSORS["d"]).hexdigest()
    assert not store.has(changed, len(TENSORS["d"]))


def test_one_lying_source_among_dead_ones_makes_an_integrity_mismatch(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path, sources=["http://dead/", "http://bad/"])
    bad = Memory(wanted)
    bad.files["w.safetensors"] = b""
    with pytest.raises(FetchFailed) as failed:
        fetcher(store, {"http://dead/": SourceError("no route"), "http://bad/": bad}).fetch(wanted.manifest, frozenset(), never)
    assert failed.value.code == "integrity_mismatch"


def test_a_damaged_partial_blob_is_thrown_away_without_blaming_the_source(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path)
    sha = hashlib.sha256(TENSORS["a"]).hexdigest()
    (tmp_path / "store" / "partial" / sha).write_bytes(b"zeros from a crash")
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)


def test_a_fetch_that_nobody_wants_stops_between_chunks(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path)
    source = Memory(wanted)
    with pytest.raises(Cancelled):
        fetcher(store, {"http://one/": source}).fetch(wanted.manifest, frozenset(), lambda: source.sent > 2000)
    assert source.sent < 4000


def test_a_full_quota_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 1 << 20)
    wanted = version(tmp_path, {"a": b"a" * (1 << 20), "b": b"b"})
    source = Memory(wanted)
    with pytest.raises(RaftmetaError) as refused:
        fetcher(store, {"http://one/": source}).fetch(wanted.manifest, frozenset(), never)
    assert refused.value.code == "quota_exceeded"
    assert source.requests == []


def test_a_manifest_without_sources_is_unavailable_unless_nothing_is_missing(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path)
    empty = make_version(tmp_path / "empty", "1.0.0", TENSORS, [])
    with pytest.raises(FetchFailed, match="names no source"):
        fetcher(store, {}).fetch(empty.manifest, frozenset(), never)
    fetcher(store, {"http://one/": Memory(wanted)}).fetch(wanted.manifest, frozenset(), never)
    assert fetcher(store, {}).fetch(empty.manifest, frozenset(), never) == 0


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 5000), max_size=8),
    here=st.sets(st.integers(0, 11)),
)
def test_whatever_is_here_and_wherever_it_is_cut_the_version_arrives_whole(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cuts: list[int], here: set[int]
) -> None:
    tmp_path = tmp_path_factory.mktemp("fetch")
    tensors = {f"t{number:02}": bytes([number]) * size for number, size in enumerate(sizes)}
    wanted = version(tmp_path, tensors)
    store = Store(tmp_path / "store", 1 << 30)
    for number in here & set(range(len(sizes))):
        put(store, tensors[f"t{number:02}"])
    source = Memory(wanted, cut_after=cuts, chunk=700)
    fetcher(store, {"http://one/": source}, attempts=len(cuts) + 1).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)
    for value in tensors.values():
        assert store.path(hashlib.sha256(value).hexdigest()).read_bytes() == value


@given(st.sets(st.sampled_from("abcd")))
def test_spans_cover_exactly_what_is_needed(here: set[str]) -> None:
    wanted = make_manifest()
    have = {hashlib.sha256(TENSORS[name]).hexdigest() for name in here}
    spans = spans_of(wanted.manifest, lambda sha, _: sha not in have)
    covered = [piece.sha256 for span in spans for piece in span.pieces]
    needed = [sha for sha, _ in blobs_of(wanted.manifest) if sha not in have]
    assert sorted(covered) == sorted(needed)
    for span in spans:
        for before, after in zip(span.pieces, span.pieces[1:], strict=False):
            assert before.end == after.begin


def make_manifest(made: list[Version] = []) -> Version:  # noqa: B006 - made once for all examples
    if not made:
        import tempfile

        made.append(make_version(Path(tempfile.mkdtemp()) / "v1", "1.0.0", TENSORS))
    return made[0]


def put(store: Store, data: bytes) -> None:
    sha = hashlib.sha256(data).hexdigest()
    if not store.has(sha, len(data)):
        writer = store.writer(sha, len(data))
        writer.write(data)
        writer.commit()


_: Callable[[], bool] = never


def one_file(store: Store, data: bytes) -> Manifest:
    """Of a version that consists of these bytes alone."""
    digest = hashlib.sha256(data).hexdigest()
    basis = make_version(store.root.parent / f"v{digest}", "1.0.0", TENSORS, ["http://one/"]).manifest
    file = msgspec.structs.replace(basis.files[0], size_bytes=len(data), sha256=digest)
    return msgspec.structs.replace(basis, files=(file,), tensors=())


class Drip:
    """Gives one byte in each `pause_s` of a clock that it moves itself; cuts after `cut` bytes of a request, 0: never."""

    def __init__(self, data: bytes, pause_s: float, cut: int = 0) -> None:
        self.data, self.pause_s, self.cut = data, pause_s, cut
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
        for count, at in enumerate(range(begin, end)):
            if self.cut and count == self.cut:
                raise SourceError("cut")
            self.now += self.pause_s
            yield self.data[at : at + 1]


@pytest.mark.parametrize("cut", [0, 1])
def test_a_source_that_drips_is_given_up_whether_it_cuts_or_not(store: Store, cut: int) -> None:
    data = b"x" * 100_000
    manifest = one_file(store, data)
    drip = Drip(data, 0.1, cut)
    made = Fetcher(store, lambda url: drip, Patience(3, drip.sleep, drip.clock))  # type: ignore[arg-type, return-value]
    with pytest.raises(FetchFailed, match=r"expected 65536 bytes/s over 30 s, found \d+$") as failed:
        made.fetch(manifest, frozenset(), lambda: False)
    assert failed.value.code == "source_unavailable"
    assert 90 <= drip.now <= 100, "three windows"


def test_a_slow_source_that_is_fast_enough_gives_all(store: Store) -> None:
    data = b"x" * 1000
    drip = Drip(data, 0.9 / (64 << 10))
    made = Fetcher(store, lambda url: drip, Patience(3, lambda _: None, drip.clock))  # type: ignore[arg-type, return-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node_agent.fetch.RATE_WINDOW_S", 0.001)
        assert made.fetch(one_file(store, data), frozenset(), lambda: False) == 1000


def test_what_others_are_about_to_bring_counts_towards_the_quota(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 1500)
    first, second = b"1" * 1000, b"2" * 1000
    refused: list[str] = []

    class Beside:
        def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
            if not refused:
                with pytest.raises(RaftmetaError) as full:
                    made.fetch(one_file(store, second), frozenset(), lambda: False)
                refused.append(full.value.code)
            yield first[begin:end]

    made = Fetcher(store, lambda url: Beside(), Patience(3, lambda _: None))  # type: ignore[arg-type, return-value]
    assert made.fetch(one_file(store, first), frozenset(), lambda: False) == 1000
    assert refused == ["quota_exceeded"]


def test_two_fetches_of_one_blob_beside_each_other_disturb_neither(store: Store) -> None:
    data = b"x" * 1000
    received: list[int] = []

    class Twice:
        def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
            yield data[begin : begin + 500]
            if not received:
                received.append(0)
                received.append(made.fetch(one_file(store, data), frozenset(), lambda: False))
            yield data[begin + 500 : end]

    made = Fetcher(store, lambda url: Twice(), Patience(3, lambda _: None))  # type: ignore[arg-type, return-value]
    assert made.fetch(one_file(store, data), frozenset(), lambda: False) == 1000
    assert received == [0, 1000]
    sha = hashlib.sha256(data).hexdigest()
    assert check_blob(store.path(sha), sha) and not list((store.root / "partial").iterdir())
