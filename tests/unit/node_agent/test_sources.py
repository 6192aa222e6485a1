from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from node_agent.fetch import Passed, Source, SourceError, SourceLied
from node_agent.sources import DirectorySource, HttpSource, opener

DATA = bytes(range(256)) * 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "artifacts"
    (directory / "v1").mkdir(parents=True)
    (directory / "v1" / "w.bin").write_bytes(DATA)
    (tmp_path / "secret").write_bytes(DATA)
    return directory


def no_bucket(url: str) -> Source:
    raise SourceError(f"{url} was opened")


def read_file(
    roots: list[Path], directory: Path, file: str = "w.bin", size: int = len(DATA), begin: int = 0, end: int = len(DATA)
) -> bytes:
    with httpx.Client() as http:
        source = opener(roots, http, no_bucket)(directory.as_uri() + "/")
        return wanted_of(source.read(file, size, begin, end))


def wanted_of(chunks: Iterator[bytes | Passed]) -> bytes:
    return b"".join(chunk for chunk in chunks if not isinstance(chunk, Passed))


def test_a_range_of_a_file_below_a_root_is_read(root: Path) -> None:
    assert read_file([root], root / "v1", begin=100, end=9000) == DATA[100:9000]


def test_a_directory_outside_every_root_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(DATA)
    with pytest.raises(SourceError, match="no regular file below an artifact root"):
        read_file([root], tmp_path)


def test_without_roots_nothing_is_read(root: Path) -> None:
    with pytest.raises(SourceError, match="allowed: none"):
        read_file([], root / "v1")


@pytest.mark.parametrize("file", ["../../secret", "/etc/passwd", "..", "a//b", "a/./b"])
def test_a_name_that_could_leave_the_directory_is_refused(root: Path, file: str) -> None:
    with pytest.raises(SourceError):
        read_file([root], root / "v1", file)


def test_a_link_out_of_the_root_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "v1" / "link").symlink_to(tmp_path / "secret")
    (root / "dir").symlink_to(tmp_path)
    with pytest.raises(SourceError):
        read_file([root], root / "v1", "link")
    with pytest.raises(SourceError):
        read_file([root], root / "dir", "secret")


def test_a_link_inside_the_root_is_followed(root: Path) -> None:
    (root / "v1" / "link").symlink_to("w.bin")
    assert read_file([root], root / "v1", "link") == DATA


def test_a_root_that_is_a_link_itself_counts_as_where_it_points(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert read_file([tmp_path / "alias"], tmp_path / "alias" / "v1") == DATA


def test_a_pipe_is_refused_without_waiting_for_a_writer(root: Path) -> None:
    os.mkfifo(root / "v1" / "pipe")
    with pytest.raises(SourceError):
        read_file([root], root / "v1", "pipe")


def test_a_file_of_another_size_is_a_lie(root: Path) -> None:
    with pytest.raises(SourceLied, match="10240 bytes, the manifest says 10241"):
        read_file([root], root / "v1", size=len(DATA) + 1)


def test_a_missing_file_may_be_elsewhere(root: Path) -> None:
    with pytest.raises(SourceError, match="cannot be opened"):
        read_file([root], root / "v1", "absent")


@pytest.mark.parametrize("url", ["ftp://host/dir/", "file://host/dir/", "http:///dir/"])
def test_other_schemes_and_hosts_in_file_urls_are_no_sources(url: str) -> None:
    with httpx.Client() as http, pytest.raises(SourceError):
        opener([], http, no_bucket)(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1/", "http://[::1", "http://127.0.0.1:x/", "http://127.0.0.1:99999/", "file:///%00/", "http://a..b/",
        "http://" + "a" * 300 + "/", "http://xn--/", "http://xn--a-/", "http://xn--zzzzzzzz99999/",
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_an_error_of_its_source(root: Path, url: str) -> None:
    with httpx.Client(timeout=2, trust_env=False) as http, pytest.raises(SourceError):
        next(opener([root], http, no_bucket)(url).read("w.bin", len(DATA), 0, 10))


@pytest.mark.parametrize("base", ["http://[::1/", "http://h:x/", "http://a..b/", "http://xn--/", "http://" + "a" * 300 + "/"])
def test_what_the_library_refuses_is_an_error_of_the_source(base: str) -> None:
    with httpx.Client(timeout=2, trust_env=False) as http, pytest.raises(SourceError):
        next(HttpSource(base, http).read("w.bin", len(DATA), 0, 10))


def test_a_path_that_no_system_call_takes_is_an_error_of_the_source(root: Path) -> None:
    with pytest.raises(SourceError, match="cannot be opened"):
        next(DirectorySource(root / "a\0b", (root,)).read("w.bin", len(DATA), 0, 10))


# --- HTTP


def read_http(handler: Callable[[httpx.Request], httpx.Response], begin: int = 10, end: int = 5000) -> bytes:
    with httpx.Client(transport=httpx.MockTransport(handler)) as http:
        return wanted_of(opener([], http, no_bucket)("http://host/dir/").read("a file.bin", len(DATA), begin, end))


def ranged(request: httpx.Request) -> httpx.Response:
    first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
    headers = {"content-range": f"bytes {first}-{last}/{len(DATA)}"}
    return httpx.Response(206, headers=headers, stream=httpx.ByteStream(DATA[first : last + 1]))


def test_a_server_with_ranges_sends_the_range() -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return ranged(request)

    assert read_http(handler) == DATA[10:5000]
    assert asked == ["http://host/dir/a%20file.bin"]


def test_a_server_without_ranges_is_read_from_the_start_and_cut() -> None:
    assert read_http(lambda _: httpx.Response(200, stream=httpx.ByteStream(DATA))) == DATA[10:5000]


def test_what_lies_before_the_range_is_told_as_it_comes() -> None:
    class Fours(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from (DATA[at : at + 4] for at in range(0, len(DATA), 4))

    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Fours()))) as http:
        chunks = list(HttpSource("http://host/", http).read("file", len(DATA), 10, 15))
    assert chunks == [Passed(4), Passed(4), Passed(2), DATA[10:12], DATA[12:15]]


@pytest.mark.parametrize("status", [301, 404, 500, 204])
def test_any_other_status_may_be_better_elsewhere(status: int) -> None:
    with pytest.raises(SourceError):
        read_http(lambda _: httpx.Response(status, headers={"location": "http://169.254.169.254/"}))


def test_a_range_that_was_not_asked_for_is_refused() -> None:
    headers = {"content-range": f"bytes 0-4989/{len(DATA)}"}
    with pytest.raises(SourceError, match="asked for bytes 10-4999"):
        read_http(lambda _: httpx.Response(206, headers=headers, content=DATA[:4990]))


def test_a_file_of_another_size_on_the_server_is_a_lie() -> None:
    headers = {"content-range": "bytes 10-4999/9999"}
    with pytest.raises(SourceLied):
        read_http(lambda _: httpx.Response(206, headers=headers, content=DATA[10:5000]))
    with pytest.raises(SourceLied):
        read_http(lambda _: httpx.Response(200, content=DATA[:-1]))
    with pytest.raises(SourceLied):
        read_http(lambda _: httpx.Response(416))


def test_an_encoded_body_is_refused() -> None:
    headers = {"content-encoding": "br", "content-range": f"bytes 10-4999/{len(DATA)}"}
    with pytest.raises(SourceError, match="encodes"):
        read_http(lambda _: httpx.Response(206, headers=headers, stream=httpx.ByteStream(b"xxxx")))


def test_a_lost_connection_is_an_error_of_the_source() -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silence")

    with pytest.raises(SourceError, match="ReadTimeout"):
        read_http(handler)


def test_what_arrived_before_a_connection_was_lost_is_handed_out() -> None:
    class Cut(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield DATA[10:30]
            raise httpx.ReadError("reset")

    headers = {"content-range": f"bytes 10-4999/{len(DATA)}"}
    got: list[bytes | Passed] = []
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(206, headers=headers, stream=Cut()))) as http:
        reading = opener([], http, no_bucket)("http://host/dir/").read("file", len(DATA), 10, 5000)
        with pytest.raises(SourceError, match="reset"):
            for chunk in reading:
                got.append(chunk)
    assert wanted_of(iter(got)) == DATA[10:30]


def test_an_s3_url_goes_to_whoever_knows_buckets(root: Path) -> None:
    with httpx.Client() as http:
        opened = opener([root], http, lambda url: DirectorySource(Path(url), ()))("s3://bucket/prefix/")
    assert opened.name == "s3:/bucket/prefix"
