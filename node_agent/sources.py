"""Where bytes of versions come from: directories below an allowed root, HTTP servers that may or may not know ranges, S3 buckets.

A file is opened first and judged after: what counts is where the open descriptor really lies, so neither a symbolic link nor a directory
swapped in between leads out of the roots, and a pipe or device is never read. A server that ignores ranges is read from the start and
cut; how much of what lies before the range has come is told as it comes. Redirects are not followed: a manifest names what the agent talks
to. A URL that cannot be used is an error of its source alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import httpx

from node_agent.fetch import Passed, Source, SourceError, SourceLied
from raftmeta.core.manifest import path_fault, source_fault
from raftmeta.replies import encoding_of

CHUNK = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\Z")


def opener(roots: Sequence[Path], http: httpx.Client, bucket: Callable[[str], Source]) -> Callable[[str], Source]:
    """Turns a URL of a manifest into a source. The roots are resolved now, once; `bucket` opens s3 URLs."""
    allowed = tuple(root.resolve() for root in roots)

    def open_source(url: str) -> Source:
        fault = source_fault(url)
        if fault:
            raise SourceError(f"{url[:200]!r} {fault}")
        parts = urlsplit(url)
        if parts.scheme == "file":
            return DirectorySource(Path(unquote(parts.path)), allowed)
        return bucket(url) if parts.scheme == "s3" else HttpSource(url, http)

    return open_source


class DirectorySource:
    def __init__(self, directory: Path, roots: tuple[Path, ...]) -> None:
        self.name = str(directory)
        self._directory = directory
        self._roots = roots

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
        fd = self._open(file)
        try:
            size = os.fstat(fd).st_size
            if size != file_size:
                raise SourceLied(f"{file} has {size} bytes, the manifest says {file_size}")
            while begin < end:
                chunk = os.pread(fd, min(CHUNK, end - begin), begin)
                if not chunk:
                    raise SourceLied(f"{file} ends at byte {begin}, the manifest says {file_size}")
                begin += len(chunk)
                yield chunk
        except OSError as cause:
            raise SourceError(f"{file} cannot be read: {cause}") from cause
        finally:
            os.close(fd)

    def _open(self, file: str) -> int:
        fault = path_fault(file)
        if fault:
            raise SourceError(f"{file[:200]!r} {fault}")
        try:
            fd = os.open(self._directory / file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except (OSError, ValueError) as cause:  # ValueError: a path that no system call takes
            raise SourceError(f"{self._directory / file} cannot be opened: {cause}") from cause
        real = Path(f"/proc/self/fd/{fd}").readlink()
        if not any(real.is_relative_to(root) for root in self._roots) or not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            allowed = ", ".join(map(str, self._roots)) or "none"
            raise SourceError(f"{self._directory / file} is no regular file below an artifact root (allowed: {allowed})")
        return fd


class HttpSource:
    def __init__(self, base: str, http: httpx.Client) -> None:
        self.name = base
        self._base = base if base.endswith("/") else base + "/"
        self._http = http

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes | Passed]:
        url = self._base + quote(file)
        headers = {"range": f"bytes={begin}-{end - 1}", "accept-encoding": "identity"}
        try:
            with self._http.stream("GET", url, headers=headers) as response:
                yield from self._body(response, file, file_size, (begin, end))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as cause:  # ValueError: a host that no resolver takes
            raise SourceError(f"{url}: {type(cause).__name__}: {cause}") from cause

    def _body(self, response: httpx.Response, file: str, file_size: int, span: tuple[int, int]) -> Iterator[bytes | Passed]:
        begin, end = span
        if response.status_code == 206:
            _check_range(response.headers.get("content-range", ""), file, file_size, span)
            place = begin
        elif response.status_code == 200:  # this server knows no ranges
            length = response.headers.get("content-length", "")
            if length and length != str(file_size):
                raise SourceLied(f"{file} has {length[:20]} bytes, the manifest says {file_size}")
            place = 0
        elif response.status_code == 416:
            raise SourceLied(f"{file} is shorter than {end} bytes, the manifest says {file_size}")
        else:
            raise SourceError(f"{file}: status {response.status_code}")
        if encoding_of(response.headers):
            raise SourceError(f"{file}: the server encodes the body although it was asked not to")
        for chunk in response.iter_raw():  # as it comes: what arrived before a cut is kept
            before = min(len(chunk), max(0, begin - place))
            wanted = chunk[before : max(0, end - place)]
            place += len(chunk)
            if before:
                yield Passed(before)
            if wanted:
                yield wanted
            if place >= end:
                return


def _check_range(header: str, file: str, file_size: int, span: tuple[int, int]) -> None:
    found = _CONTENT_RANGE.match(header)
    if found is None or (int(found[1]), int(found[2]) + 1) != span:
        raise SourceError(f"{file}: asked for bytes {span[0]}-{span[1] - 1}, the server says {header[:80]!r}")
    if found[3] not in ("*", str(file_size)):
        raise SourceLied(f"{file} has {found[3]} bytes, the manifest says {file_size}")
