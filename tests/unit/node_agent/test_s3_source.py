from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent.config import S3Settings
from node_agent.fetch import SourceError, SourceLied
from node_agent.s3_source import Buckets, S3Source
from tests.support.stub_s3 import StubS3, stub_s3

DATA = bytes(range(256)) * 20_000  # five chunks


@pytest.fixture
def s3() -> Iterator[StubS3]:
    with stub_s3() as stub:
        stub.objects["models/minilm/v1/w.bin"] = DATA
        yield stub


def source(s3: StubS3, tmp_path: Path, url: str = "s3://models/minilm/v1/", key_id: str = "AKIDEXAMPLE") -> S3Source:
    secret = tmp_path / "secret"
    secret.write_text("wJalrXUtnFEMI\n")
    return Buckets(S3Settings(s3.url, "eu-central-1", key_id, secret, timeout_s=5.0)).source(url)


def read(from_: S3Source, begin: int = 0, end: int = len(DATA), size: int = len(DATA), file: str = "w.bin") -> bytes:
    return b"".join(from_.read(file, size, begin, end))


@pytest.mark.parametrize(("begin", "end"), [(0, len(DATA)), (1, 2), (1_000_001, 3_500_000), (len(DATA) - 1, len(DATA))])
def test_a_range_of_an_object_comes_and_no_more_is_asked_for(s3: StubS3, tmp_path: Path, begin: int, end: int) -> None:
    assert read(source(s3, tmp_path), begin, end) == DATA[begin:end]
    assert s3.ranges == [f"bytes={begin}-{end - 1}"]


@pytest.mark.parametrize("url", ["s3://models/minilm/v1", "s3://models/minilm%2Fv1/"])
def test_a_prefix_is_a_directory_however_it_is_written(s3: StubS3, tmp_path: Path, url: str) -> None:
    assert read(source(s3, tmp_path, url), 5, 10) == DATA[5:10]


def test_an_object_of_another_size_is_a_lie(s3: StubS3, tmp_path: Path) -> None:
    with pytest.raises(SourceLied, match=r"has 5120000 bytes, the manifest says 5120001"):
        read(source(s3, tmp_path), 0, 10, size=len(DATA) + 1)


@pytest.mark.parametrize("mishap", ["500", "403", "cut", "whole"])
def test_what_fails_this_time_may_succeed_the_next(s3: StubS3, tmp_path: Path, mishap: str) -> None:
    from_ = source(s3, tmp_path)
    s3.mishaps.append(mishap)
    with pytest.raises(SourceError):
        read(from_, 10, 4_000_000)
    assert len(s3.ranges) == 1, "retries are the fetcher's business"
    assert read(from_, 10, 4_000_000) == DATA[10:4_000_000]


def test_what_came_is_handed_out_however_little_it_is(s3: StubS3, tmp_path: Path) -> None:
    s3.mishaps.append("stall")
    chunks = source(s3, tmp_path).read("w.bin", len(DATA), 10, 20)
    assert next(chunks) == DATA[10:15], "the rest has not been sent yet"
    s3.go_on.set()
    assert b"".join(chunks) == DATA[15:20]


def test_a_missing_object_a_wrong_key_and_a_server_that_is_away_are_errors_of_this_source(s3: StubS3, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="NotFound"):
        read(source(s3, tmp_path), file="other.bin")
    with pytest.raises(SourceError):
        read(source(s3, tmp_path, key_id="AKIDOTHER"))
    s3.url = "http://127.0.0.1:1"
    with pytest.raises(SourceError):
        read(source(s3, tmp_path))


def test_errors_are_one_line_and_hold_no_secret(s3: StubS3, tmp_path: Path) -> None:
    s3.mishaps.append("403")
    with pytest.raises(SourceError) as failed:
        read(source(s3, tmp_path))
    assert "\n" not in str(failed.value) and "wJalr" not in str(failed.value)


def test_a_secret_that_cannot_be_read_is_an_error_of_this_source(s3: StubS3, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="bucket models"):
        Buckets(S3Settings(s3.url, "eu-central-1", "AKID", tmp_path / "none")).source("s3://models/x/")


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a//b"])
def test_a_name_that_could_leave_the_prefix_is_refused_unasked(s3: StubS3, tmp_path: Path, file: str) -> None:
    with pytest.raises(SourceError):
        read(source(s3, tmp_path), file=file)
    assert s3.ranges == []
