"""Members of paper: a scripted HTTP transport and a clock that only moves when the client sleeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx

from raftmeta.client.transport import Options, Timing
from raftmeta.core.errors import CODES

Handler = Callable[[httpx.Request], httpx.Response]


class FakeTime:
    """Seconds pass by sleeping, and only so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.sleeps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)

    def timing(self) -> Timing:
        return Timing(monotonic=lambda: self.now_s, sleep=self.sleep, draw=lambda: 0.25, now_ms=lambda: 1_700_000_000_000)


class Members:
    """Answers requests by host; keeps what it was asked."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self.handlers = handlers
        self.requests: list[httpx.Request] = []
        self.time = FakeTime()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.handlers[request.url.host](request)

    def options(self, **changes: Any) -> Options:
        return Options(http=httpx.MockTransport(self), timing=self.time.timing(), **{"timeout_s": 5.0, **changes})

    def hosts(self) -> list[str]:
        return [request.url.host for request in self.requests]


def ok(body: dict[str, Any] | None = None, revision: int = 7, generation: int = 1, status: int = 200) -> Handler:
    headers = {"x-raftmeta-revision": str(revision), "x-raftmeta-generation": str(generation)}
    return lambda request: httpx.Response(status, json=body if body is not None else {}, headers=headers)


def problem(code: str, headers: dict[str, str] | None = None, **params: Any) -> Handler:
    info = CODES[code]
    body = {"type": f"urn:raftmeta:error:{code}", "title": info.title, "status": info.status, "detail": f"because {code}", "code": code}
    body |= {"class": str(info.error_class)} | params
    return lambda request: httpx.Response(
        info.status, content=json.dumps(body), headers={"content-type": "application/problem+json"} | (headers or {})
    )


def dead(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


def breaks(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("connection reset", request=request)


def in_turn(*handlers: Handler) -> Handler:
    """One handler per request, the last one for all that follow."""
    left = list(handlers)
    return lambda request: (left.pop(0) if len(left) > 1 else left[0])(request)


class EventBytes(httpx.AsyncByteStream):
    """A stream of the given chunks, then its end or an error."""

    def __init__(self, chunks: list[bytes], error: Exception | None = None) -> None:
        self._chunks, self._error = chunks, error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        if self._error:
            raise self._error


def events(*chunks: bytes, error: Exception | None = None, generation: int = 1) -> Handler:
    headers = {"content-type": "text/event-stream", "x-raftmeta-generation": str(generation)}
    return lambda request: httpx.Response(200, headers=headers, stream=EventBytes(list(chunks), error))


def change(revision: int, kind: str = "model", key: str = "m") -> bytes:
    data = {"revision": revision, "events": [{"kind": kind, "key": key, "op": "put", "value": {"name": key}}]}
    return f"id: {revision}\nevent: change\ndata: {json.dumps(data)}\n\n".encode()


def bookmark(revision: int) -> bytes:
    return f'id: {revision}\nevent: bookmark\ndata: {{"revision":{revision}}}\n\n'.encode()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(bounded())
