"""What S3 answers to ranged reads, on loopback, with a script of mishaps. Checks that requests are signed with the expected key."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.stub_http import serving


@dataclass
class StubS3:
    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)  # "bucket/key" -> content
    key_id: str = "AKIDEXAMPLE"
    mishaps: list[str] = field(default_factory=list)  # one per request: "cut" | "stall" | "500" | "403" | "whole"; empty: none
    ranges: list[str] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)  # what an answer that stalled half way waits for


@contextmanager
def stub_s3() -> Iterator[StubS3]:
    with serving(_Handler, StubS3) as stub:
        yield stub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        stub: StubS3 = self.server.stub  # type: ignore[attr-defined]
        mishap = stub.mishaps.pop(0) if stub.mishaps else ""
        asked = self.headers.get("range", "")
        stub.ranges.append(asked)
        data = stub.objects.get(unquote(urlsplit(self.path).path).lstrip("/"))
        if f"Credential={stub.key_id}/" not in self.headers.get("authorization", "") or mishap == "403":
            self._error(403, "AccessDenied")
        elif mishap == "500":
            self._error(500, "InternalError")
        elif data is None:
            self._error(404, "NoSuchKey")
        else:
            self._send(data, asked, mishap)

    def _send(self, data: bytes, asked: str, mishap: str) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        assert found is not None, asked
        begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
        if begin >= len(data):
            self._error(416, "InvalidRange")
            return
        if mishap == "whole":
            begin, end = 0, len(data)
        body = data[begin:end]
        self.send_response(200 if mishap == "whole" else 206)
        if mishap != "whole":
            self.send_header("content-range", f"bytes {begin}-{end - 1}/{len(data)}")
        for name, value in (("content-length", str(len(body))), ("etag", '"x"'), ("last-modified", "Mon, 30 Nov 2026 00:00:00 GMT")):
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if mishap in ("cut", "stall") else body)
            if mishap == "stall":
                self.server.stub.go_on.wait(20)  # type: ignore[attr-defined]
                self.wfile.write(body[len(body) // 2 :])
            if mishap == "cut":
                self.close_connection = True

    def _error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>because</Message></Error>".encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        with contextlib.suppress(ConnectionError):
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The test prints what matters."""
