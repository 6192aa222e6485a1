"""One API over a fake member, driven in memory: with the thin layer or without, as plain requests or as a raw ASGI exchange."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from api import app
from api.schemas import examples
from api.service import ApiLimits, Service
from tests.support.fake_log import FakeMember

T = TypeVar("T")
BASE = "http://127.0.0.1:7400"
JSON = {"content-type": "application/json"}
MODEL = "/v1/models/encoder"
PUBLISH = f"{MODEL}/versions/1.0.0"
DEPLOYMENT = {"model": "encoder", "primary": {"zone": "zone-a", "nodes": ["n1"]}, "standby": {"zone": "zone-b", "nodes": ["n2"]}}


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a fresh event loop, within a bound."""

    async def bounded() -> T:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(bounded())


def manifest(number: int = 0) -> dict[str, Any]:
    """A sound manifest; another number gives other bytes."""
    made: dict[str, Any] = json.loads(json.dumps(examples.MANIFEST))
    made["tensors"][0]["sha256"] = f"{number:064x}"
    return made


def basis(member: FakeMember, name: str = "search", node_count: int = 2, age_ms: int = 340) -> dict[str, Any]:
    """What a check that begins now looks at."""
    state = member.state
    order = {"generation": state.generation, "order_revision": state.deployments[name].order_revision}
    seen = {"version": state.deployments[name].version, "started_revision": state.revision}
    return order | seen | {"node_count": node_count, "age_ms": age_ms}


class Api:
    def __init__(self, member: FakeMember, service: Service, application: Any, client: httpx.AsyncClient) -> None:
        self.member = member
        self.service = service
        self.application = application
        self.client = client

    async def publish(self, label: str = "1.0.0", number: int = 0, **headers: str) -> httpx.Response:
        return await self.client.put(f"{MODEL}/versions/{label}", json={"manifest": manifest(number)}, headers=headers)

    async def prepared(self) -> None:
        """A model with versions 1.0.0 and 2.0.0 and a deployment `search` of it."""
        await self.publish("1.0.0", 1)
        await self.publish("2.0.0", 2)
        await self.client.put("/v1/deployments/search", json=DEPLOYMENT)


@asynccontextmanager
async def api(
    member: FakeMember | None = None, limits: ApiLimits | None = None, *, thin: bool = True, client: str = "127.0.0.1"
) -> AsyncIterator[Api]:
    member = member or FakeMember()
    service = Service(member, asyncio.get_running_loop(), limits, now_ms=lambda: member.log.now_ms)
    application = app.build(service) if thin else app.build_inner(service)
    transport = httpx.ASGITransport(application, client=(client, 50_000), raise_app_exceptions=True)
    try:
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
            yield Api(member, service, application, http)
    finally:
        service.close()
        member.log.close()


class Exchange:
    """One ASGI request whose reply is looked at while it goes on."""

    def __init__(self, application: Any, path: str, query: str = "", headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(b"host", b"127.0.0.1:7400"), *headers],
            "client": ("127.0.0.1", 50_000),
            "server": ("127.0.0.1", 7400),
        }
        self._application = application
        self._asked = False
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.blocked: asyncio.Event | None = None  # set it to make sending wait
        self.waits = asyncio.Event()  # something waits to be sent
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Exchange:
        self._task = asyncio.create_task(self._application(self._scope, self._receive, self._send))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """The client closes the connection; returns when the application has let go of the request."""
        self._gone.set()
        assert self._task is not None
        await self._task

    async def until(self, holds: Callable[[Exchange], bool]) -> None:
        """Until the reply so far satisfies this; fails with the reply when it does not in time."""
        try:
            async with asyncio.timeout(5):
                while not holds(self):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"status {self.status}, complete {self.complete}, body {self.body[-2_000:]!r}") from None

    @property
    def messages(self) -> list[tuple[str, int, dict[str, Any]]]:
        """(event, id, data) of every complete message; comments are left out."""
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
            if fields:
                found.append((fields["event"], int(fields.get("id", -1)), json.loads(fields["data"])))
        return found

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.blocked is not None:
            self.waits.set()
            await self.blocked.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.complete = not message.get("more_body", False)
        self._news.set()
