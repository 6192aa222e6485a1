"""A control plane in one thread: the real REST API over a log in memory, and the pure rules of rollouts driven after every change.

Agents reach it over HTTP as they would reach a member, so what they send and get is the real thing; only replication is left out. It can be
stopped and started again on the same port, and be left without a leader, while it keeps its state.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable

import uvicorn

from api import app
from api.service import Service
from raftmeta.core.commands import Body
from raftmeta.core.rollout import decide
from raftmeta.core.state import State
from tests.support.fake_log import FakeMember


class FakeControlPlane:
    def __init__(self) -> None:
        self.member = FakeMember()
        self.member.log.now_ms = time.time_ns() // 1_000_000
        self._numbers = itertools.count(1)
        self._news = threading.Event()
        self._held: Callable[[Body], bool] = lambda body: False
        self._stopping = False
        self._port = 0
        self._thread: threading.Thread | None = None
        self._server: uvicorn.Server | None = None
        publish = self.member.log._publish

        def published(state: State, events: tuple[object, ...]) -> None:
            publish(state, events)
            self._news.set()

        self.member.log._publish = published
        self._controller = threading.Thread(target=self._control, daemon=True)
        self._controller.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def state(self) -> State:
        return self.member.state

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as a member does for each connection
        self._port = listener.getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listener, started)), daemon=True)
        self._thread.start()
        assert started.wait(20), "the fake control plane did not start"

    def stop(self) -> None:
        """Nobody answers on the port any more; the state stays."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join(20)
            assert not self._thread.is_alive(), "the fake control plane did not stop"
            self._server = self._thread = None

    def close(self) -> None:
        self.stop()
        self._stopping = True
        self._news.set()
        self._controller.join(20)
        self.member.log.close()

    def hold(self, held: Callable[[Body], bool]) -> None:
        """Rollouts do not move on by commands of which this holds."""
        self._held = held
        self._news.set()

    def until(self, holds: Callable[[State], bool], what: str, timeout_s: float = 60.0) -> State:
        """The first state seen that satisfies this."""
        deadline = time.monotonic() + timeout_s
        while not holds(self.state):
            assert time.monotonic() < deadline, f"not in time: {what}"
            time.sleep(0.01)
        return self.state

    def _control(self) -> None:
        """What the leader's controller does, without missing nodes and without timeouts."""
        while not self._stopping:
            self._news.wait()
            self._news.clear()
            log = self.member.log
            for body in decide(self.state, log.now_ms, ()):
                if not log.switches.no_leader and not self._held(body):
                    log.propose(body, f"{log.now_ms:013d}-controller-{next(self._numbers)}", "system:controller", 5.0).result()

    async def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        member = self.member
        service = Service(member, asyncio.get_running_loop(), now_ms=lambda: member.log.now_ms)
        config = uvicorn.Config(app.build(service), lifespan="off", log_config=None, access_log=False, ws="none")
        self._server = server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        started.set()
        await serving
        service.close()
