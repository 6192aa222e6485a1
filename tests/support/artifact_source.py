"""An HTTP source of artifacts that can be made to stall, to break off, to crawl or to lie. Serves a directory, whole files and ranges."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.stub_http import serving

CRAWL_BYTES, CRAWL_S = 2048, 0.05
CUTS = 3
STALL_S = 120.0  # then a stalled answer goes on by itself, so that no test hangs for ever


class Mood(StrEnum):
    HONEST = "honest"
    STALLS = "stalls"  # before the first byte of a weights file, until the mood changes
    CUT = "cut"  # half of what was asked for, then the connection ends; CUTS times
    CRAWLS = "crawls"
    LIES = "lies"  # one bit of each answer is another
    GONE = "gone"  # nothing is there


class ArtifactSource:
    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url, root
        self.asked = 0  # for weights
        self._mood = Mood.HONEST
        self._cuts = 0
        self._changed = threading.Condition()

    @property
    def mood(self) -> Mood:
        return self._mood

    def be(self, mood: Mood) -> None:
        """From the next byte on."""
        with self._changed:
            self._mood, self._cuts = mood, CUTS
            self._changed.notify_all()

    def wait(self) -> Mood:
        """How to answer a question for weights: the mood, once it is not to stall."""
        with self._changed:
            self.asked += 1
            self._changed.wait_for(lambda: self._mood is not Mood.STALLS, STALL_S)
            if self._mood is Mood.CUT:
                self._cuts -= 1
                return Mood.CUT if self._cuts >= 0 else Mood.HONEST
            return self._mood

    def url_of(self, directory: Path) -> str:
        return f"{self.url}/{directory.relative_to(self.root)}/"


@contextmanager
def artifact_source(root: Path) -> Iterator[ArtifactSource]:
    """Serves what lies below `root` until the block ends."""
    with serving(_Handler, lambda url: ArtifactSource(url, root)) as source:
        yield source
        source.be(Mood.HONEST)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        source: ArtifactSource = self.server.stub  # type: ignore[attr-defined]
        path = (source.root / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        if not path.is_file() or not path.is_relative_to(source.root):
            self.send_error(404)
            return
        data, status, headers = path.read_bytes(), 200, {}
        wanted = self.headers.get("range", "")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else len(data), len(data))
            headers = {"content-range": f"bytes {begin}-{end - 1}/{len(data)}"}
            data, status = data[begin:end], 206
        mood = source.wait() if path.suffix == ".safetensors" else Mood.HONEST
        if mood is Mood.GONE:
            self.send_error(404)
            return
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(data))}).items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # whoever asked may have been killed
            self.end_headers()
            self._send(data, mood)

    def _send(self, data: bytes, mood: Mood) -> None:
        match mood:
            case Mood.CUT:
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            case Mood.CRAWLS:
                for begin in range(0, len(data), CRAWL_BYTES):
                    self.wfile.write(data[begin : begin + CRAWL_BYTES])
                    time.sleep(CRAWL_S)
            case Mood.LIES:
                self.wfile.write(bytes([data[0] ^ 1]) + data[1:])
            case _:
                self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The test prints what matters."""
