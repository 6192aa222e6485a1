"""The API over a fake member on a real socket: one server in a thread, and its orderly end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import uvloop

from api import app
from api.guard import HttpLimits
from api.json_body import Body
from api.routes.versions import publication
from api.schemas import examples
from api.schemas.bodies import PublishBody
from api.server import Listen, Server, make_server
from api.service import ApiLimits, Service
from raftmeta.core.commands import DeclareDeployment
from raftmeta.core.types import Policy, Side
from raftmeta.security.server_tls import ServerTls
from tests.support.fake_log import FakeMember

SHORT = HttpLimits(max_connections=8, max_head_bytes=4_096, head_s=0.3, body_s=0.3, body_bytes_per_s=100_000, read_s=0.3, sweep_s=0.02)


class Running:
    def __init__(self, server: Server, member: FakeMember, service: Service) -> None:
        self.server, self.member, self.service = server, member, service
        self.port = server.port

    def connect(self, receive_bytes: int = 0) -> socket.socket:
        made = socket.socket()
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(5)
        made.connect(("127.0.0.1", self.port))
        return made

    def works(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.port}/livez", timeout=5).status_code == 200

    def stop(self) -> None:
        self.server.handle_exit(15, None)


@contextmanager
def running(
    limits: HttpLimits = SHORT,
    api_limits: ApiLimits | None = None,
    prepare: Callable[[FakeMember], None] = lambda _: None,
    tls: ServerTls | None = None,
) -> Iterator[Running]:
    """A server on a free port, and its orderly end."""
    started: list[Running] = []
    ready = threading.Event()

    async def serve() -> None:
        member = FakeMember()
        prepare(member)
        service = Service(member, asyncio.get_running_loop(), api_limits, now_ms=lambda: member.log.now_ms)
        server = make_server(app.build(service), Listen("127.0.0.1", 0, tls, grace_s=2), limits, lambda: _end(service))
        task = asyncio.create_task(server.serve())
        async with asyncio.timeout(5):
            while not server.started:
                await asyncio.sleep(0.005)
        started.append(Running(server, member, service))
        ready.set()
        await task
        service.close()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield started[0]
    finally:
        started[0].stop()
        thread.join(10)
        assert not thread.is_alive()


def _end(service: Service) -> None:
    service.draining = True
    service.member.watch.close()


def declare(member: FakeMember) -> None:
    """A deployment, which verdicts need."""
    sent = Body(PublishBody).decode(json.dumps({"manifest": examples.MANIFEST}).encode())
    side = Side("zone-a", ("n1",))
    for number, body in enumerate(
        (publication("encoder", "1", sent.manifest), DeclareDeployment("search", "encoder", side, None, Policy()))
    ):
        member.log.propose(body, f"d{number}", "ci", 1).result()


def wait_until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1_000):
        if holds():
            return
        pause.wait(0.005)
    raise AssertionError("not in time")
