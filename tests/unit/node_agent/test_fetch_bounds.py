"""Sources that cut and lie at once, or drip where nobody looks: none is asked without end, and none is blamed for what another left."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from node_agent.fetch import Cancelled, Fetcher, FetchFailed, Patience, SourceError
from node_agent.sources import HttpSource
from node_agent.store import Store
from tests.support.small_version import Version
from tests.unit.node_agent.test_fetch import TENSORS, Memory, fetcher, never, version, whole

ENOUGH = 100  # requests, after which a test gives up


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", 1 << 30)


class CutsAndLies(Memory):
    """Cuts each request for weights one byte before its end; that byte alone is another one, if it `lies`."""

    def __init__(self, version: Version, lies: bool = True) -> None:
        super().__init__(version)
        self._lies = lies

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
        if file == "config.json":
            yield from super().read(file, file_size, begin, end)
        elif begin < end - 1:
            yield from super().read(file, file_size, begin, end - 1)
            raise SourceError("reset")
        else:
            self.requests.append((file, begin, end))
            yield b"?" if self._lies else self.files[file][begin:end]


def of_weights(source: Memory) -> int:
    return len([request for request in source.requests if request[0] != "config.json"])


def test_a_source_that_cuts_before_the_byte_in_which_it_lies_is_left_and_the_next_one_serves(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path, {"a": TENSORS["a"]}, ["http://bad/", "http://good/"])
    bad, good = CutsAndLies(wanted), Memory(wanted)
    fetcher(store, {"http://bad/": bad, "http://good/": good}).fetch(wanted.manifest, frozenset(), lambda: len(bad.requests) > ENOUGH)
    assert whole(store, wanted)
    assert (of_weights(bad), of_weights(good)) == (4, 1), "it may start over once"


def test_a_source_that_lies_in_a_resumed_blob_twice_is_an_integrity_mismatch(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path, {"a": TENSORS["a"]})
    bad = CutsAndLies(wanted)
    with pytest.raises(FetchFailed, match=r"w\.safetensors .*: found") as failed:
        fetcher(store, {"http://one/": bad}).fetch(wanted.manifest, frozenset(), lambda: len(bad.requests) > ENOUGH)
    assert failed.value.code == "integrity_mismatch"


def test_a_source_that_cuts_is_not_blamed_for_what_another_left(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path, {"a": TENSORS["a"]})
    (store.root / "partial" / hashlib.sha256(TENSORS["a"]).hexdigest()).write_bytes(b"zeros from a crash")
    honest = CutsAndLies(wanted, lies=False)
    fetcher(store, {"http://one/": honest}, attempts=2).fetch(wanted.manifest, frozenset(), never)
    assert whole(store, wanted)


def test_bytes_that_come_again_are_no_progress(tmp_path: Path, store: Store) -> None:
    wanted = version(tmp_path, {"a": TENSORS["a"]})
    partial = store.root / "partial" / hashlib.sha256(TENSORS["a"]).hexdigest()

    class Forgets(Memory):
        def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
            yield from super().read(file, file_size, begin, end if file == "config.json" else begin + 2000)
            partial.write_bytes(b"")  # as when its disk lost them
            raise SourceError("reset")

    source = Forgets(wanted)
    with pytest.raises(FetchFailed) as failed:
        fetcher(store, {"http://one/": source}).fetch(wanted.manifest, frozenset(), lambda: len(source.requests) > ENOUGH)
    assert failed.value.code == "source_unavailable"
    assert of_weights(source) == 3, "only the first got further"


class Rangeless(httpx.SyncByteStream):
    """A body that begins where the file does, whatever was asked for: `chunk` bytes in each `pause_s` of a clock that it moves itself."""

    def __init__(self, data: bytes, chunk: int, pause_s: float) -> None:
        self.data, self.chunk, self.pause_s = data, chunk, pause_s
        self.now = 0.0

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self.data), self.chunk):
            self.now += self.pause_s
            yield self.data[at : at + self.chunk]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def fetcher(self, store: Store) -> Fetcher:
        http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=self)))
        return Fetcher(store, lambda url: HttpSource(url, http), Patience(3, self.sleep, lambda: self.now))


LONG = 100_000


def tail_alone(tmp_path: Path) -> tuple[Version, frozenset[str], bytes]:
    """A version of which a few bytes behind `LONG` others are missing: its wanted blobs, the rest of them, and its file of weights."""
    wanted = version(tmp_path, {"a": b"a" * LONG, "b": b"b" * 300})
    here = {wanted.manifest.files[0].sha256, hashlib.sha256(b"a" * LONG).hexdigest()}
    return wanted, frozenset(here), (wanted.directory / "w.safetensors").read_bytes()


def test_a_source_without_ranges_that_drips_before_the_range_is_given_up(tmp_path: Path, store: Store) -> None:
    wanted, here, data = tail_alone(tmp_path)
    drip = Rangeless(data, 1, 0.1)
    with pytest.raises(FetchFailed, match=r"expected 65536 bytes/s over 30 s, found \d+$") as failed:
        drip.fetcher(store).fetch(wanted.manifest, here, never)
    assert failed.value.code == "source_unavailable"
    assert 90 <= drip.now <= 100, "three windows"


def test_a_fetch_that_nobody_wants_stops_before_its_range_came(tmp_path: Path, store: Store) -> None:
    wanted, here, data = tail_alone(tmp_path)
    drip = Rangeless(data, 1, 0.1)
    with pytest.raises(Cancelled):
        drip.fetcher(store).fetch(wanted.manifest, here, lambda: drip.now > 5)
    assert drip.now < 6


def test_what_lies_before_the_range_counts_for_how_fast_a_source_is(tmp_path: Path, store: Store) -> None:
    wanted, here, data = tail_alone(tmp_path)
    steady = Rangeless(data, 1000, 1000 / (80 << 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node_agent.fetch.RATE_WINDOW_S", 0.1)
        assert steady.fetcher(store).fetch(wanted.manifest, here, never) == 300
