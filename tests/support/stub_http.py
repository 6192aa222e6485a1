"""A tiny HTTP server on loopback whose answers a test scripts. For code that opens its own connections, such as commands.

Routes are (method, path) -> a function from the decoded JSON body (None without one) and the query to a Stub answer. It records requests.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from raftmeta.core.errors import CODES

StubT = TypeVar("StubT")


@dataclass(frozen=True)
class Answer:
    body: Any = None  # JSON, or bytes as they are
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


Route = Callable[[Any, dict[str, str]], Answer]


@dataclass
class StubServer:
    url: str
    routes: dict[tuple[str, str], Route]
    requests: list[tuple[str, str, Any, dict[str, str]]]  # method, path, body, headers


def problem(code: str, detail: str = "because") -> Answer:
    info = CODES[code]
    body = {"type": f"urn:raftmeta:error:{code}", "code": code, "detail": detail, "status": info.status, "class": str(info.error_class)}
    return Answer(body, info.status, content_type="application/problem+json")


def always(answer: Answer) -> Route:
    return lambda body, query: answer


@contextmanager
def stub_server(routes: dict[tuple[str, str], Route]) -> Iterator[StubServer]:
    """Serves until the block ends."""
    with serving(_Handler, lambda url: StubServer(url, routes, [])) as stub:
        yield stub


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], make: Callable[[str], StubT]) -> Iterator[StubT]:
    """A server on loopback whose requests `handler` answers from `self.server.stub`, which is made of the server's URL."""
    server = _Quiet(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    stub = make(f"http://127.0.0.1:{server.server_address[1]}")
    server.stub = stub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Quiet(ThreadingHTTPServer):
    """A client that is killed in the middle of an answer is what some tests are about."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _answer(self) -> None:
        stub: StubServer = self.server.stub  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(data) if data else None
        stub.requests.append((self.command, unquote(parts.path), body, dict(self.headers)))
        route = stub.routes.get((self.command, parts.path), always(problem("not_found", f"no route {self.command} {parts.path}")))
        answer = route(body, dict(parse_qsl(parts.query)))
        payload = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        headers = {"content-type": answer.content_type, "x-raftmeta-revision": "7", "x-raftmeta-generation": "1"} | answer.headers
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(payload)))
        with contextlib.suppress(ConnectionError):  # a client that gave up is part of many tests
            self.end_headers()
            self.wfile.write(payload)

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """The test prints what matters."""
