"""The front process: the HTTP face of a node.

It serves the Open Inference Protocol, passes questions about the node on to control, and makes one metrics page of the whole tree. It
holds no model and no decision: what serves is in the workers, what should serve is in the node's record, so a crash of either neighbour
leaves it answering. It is ready when every deployment of the node has its committed version verified and serving, which the workers say
from the shared memory: control may be dead meanwhile. A node that was never given anything is alive and not ready, and says why.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from node_agent import answers, metrics, routes, serve, tasks, vector_query
from node_agent import metric_table as table
from node_agent.admission import Admission
from node_agent.answers import Answer
from node_agent.dispatch import Dispatcher, Job
from node_agent.heavy import Heavy
from node_agent.holds import MAX_LEASE_S
from node_agent.ipc import CallFailed, ConnectionLost, Server
from node_agent.journal import Follower
from node_agent.memory import tree_private_bytes
from node_agent.messages import (
    Done,
    Fault,
    GaugeSample,
    GetEvidence,
    GetMetrics,
    GetStatus,
    Held,
    Hold,
    Json,
    LetGo,
    Metrics,
    Numbered,
    Reply,
)
from node_agent.models import Models, version_header
from node_agent.peers import Peer
from node_agent.routes import Kind, Route
from node_agent.runtime import Runtime
from node_agent.serve import ServeError

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

PROBE = b"x-raftmeta-probe"  # "1": asks what this node would answer, also where the other side takes requests
CROWDED = "raftmeta.crowded"  # in the state of a scope: there are more connections than the limit
PROBING = "inspect"  # the action that takes
CONTROL_S = vector_query.WAIT_S
METRICS_S = 2.0
WORKERS_S = 0.5  # after memory was mended, for the workers to have said so: they look ten times a second


class Front:
    """The ASGI application and what it needs."""

    def __init__(self, runtime: Runtime) -> None:
        config = runtime.config
        self._config = config
        self._runtime = runtime
        self._workers = [Peer(runtime.worker_socket(index), self._kick) for index in range(config.workers)]
        self._control = Peer(runtime.control_socket(), lambda: None)
        self._admission = Admission(config)
        self._heavy = Heavy()
        self._meter = runtime.meter("front")
        self._record = Follower(config.store_dir)
        self._models = Models(self._record, self._workers)
        on_replay = lambda: self._meter.count(table.REPLAYS)  # noqa: E731
        on_held = lambda name, seconds: self._meter.observe(table.HOLD_SECONDS, seconds, name)  # noqa: E731
        self._dispatcher = Dispatcher(self._workers, config.queue_limit, config.worker_depth, on_replay=on_replay, on_held=on_held)
        self._server = Server(self._told, lambda: None, self._dispatcher.let_all_go)
        self._tasks: list[asyncio.Task[None]] = []
        self.draining = False

    async def start(self) -> None:
        await self._server.start(self._runtime.front_socket())
        self._tasks = [asyncio.create_task(peer.keep_connected()) for peer in (*self._workers, self._control)]

    async def stop(self) -> None:
        await tasks.end(self._tasks)
        await self._server.stop()

    async def _told(self, call: Numbered) -> Reply:
        """What control asks for. It alone connects: when its connection ends, whatever it held is let go."""
        match call:
            case Hold() if 0 < call.lease_ms <= MAX_LEASE_S * 1000:
                in_flight, lasts_s = self._dispatcher.hold(call.deployment, call.lease_ms / 1000)
                return Held(call.number, in_flight, int(lasts_s * 1000))
            case LetGo():
                await self._workers_heard(call.deployment)
                self._dispatcher.let_go(call.deployment)
                return Done(call.number)
            case _:
                return Fault(call.number, 400, "bad_request", f"the front does not do this: {call!r:.200}")

    async def _workers_heard(self, deployment: str) -> None:
        """Until some worker says that it can answer again, or has had time enough: each looks at the memory by itself now and then."""
        deadline = time.monotonic() + WORKERS_S
        while self._models.blocked(deployment) and time.monotonic() < deadline:
            await asyncio.sleep(WORKERS_S / 50)

    def why_not_ready(self) -> str:
        """Empty when the node is ready."""
        return "the node is shutting down" if self.draining else self._models.why_node_not_ready()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = _Body(scope, receive)
        try:
            answer = await self._answer(scope, body)
        except ServeError as error:
            in_protocol = routes.speaks_protocol(scope["raw_path"])
            answer = answers.refusal(error, in_protocol=in_protocol, unread=body.is_unread)
        content = b"" if scope["method"] == "HEAD" else answer.body
        headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, scope: Mapping[str, Any], body: _Body) -> Answer:
        route = routes.find(scope["raw_path"], scope["method"])
        try:
            self._admission.admit(route.row.action, scope["headers"])
            if body.is_probe and route.row.kind is Kind.INFER:
                self._admission.admit(PROBING, scope["headers"])
        except ServeError as denied:
            self._meter.count(table.DENIED, route.row.action, str(denied.status))
            raise
        if scope.get("state", {}).get(CROWDED) and route.row.action != "health":
            detail = f"the node serves its limit of {self._config.connection_limit} connections"
            raise ServeError(503, detail, retry_after_s=1, code="overloaded", headers=(answers.CLOSE,))
        match route.row.kind:
            case Kind.INFER:
                return await self._infer(route, body)
            case Kind.MODEL:
                return self._models.metadata(route)
            case Kind.MODEL_READY:
                return self._models.ready(route)
            case Kind.LIVE:
                return answers.json({"live": True})
            case Kind.READY:
                reason = self.why_not_ready()
                return answers.json({"ready": not reason} | ({"reason": reason} if reason else {}), 503 if reason else 200)
            case Kind.SERVER:
                return answers.json({"name": "raftmeta", "version": _version(), "extensions": []})
            case Kind.METRICS:
                return Answer(200, await self._metrics(), ((b"content-type", metrics.CONTENT_TYPE.encode()),))
            case Kind.STATUS:
                return await self._ask_control(GetStatus)
            case Kind.VECTOR | Kind.VECTORS:
                return await self._vector(route.deployment, scope["query_string"])
            case Kind.EVIDENCE:
                return await self._ask_control(lambda number: GetEvidence(number, route.deployment))

    # --- inference

    async def _infer(self, route: Route, body: _Body) -> Answer:
        started = time.monotonic()
        status = 500
        self._models.known(route.model)
        try:
            deadline = started + self._config.request_deadline_s
            content = await body.read(self._config.body_limit_bytes, deadline)
            request = await self._heavy.read(len(content), lambda: serve.parse_infer(content, self._config.body_limit_bytes))
            if not body.is_probe:
                self._models.require_side(route)
            if not self._dispatcher.is_held(route.model):  # what a worker says of memory that is being mended is soon over
                self._models.require_servable(route)
            job = Job(route.model, route.version, request.inputs, request.outputs, deadline)
            leaving = asyncio.create_task(_dropped_when_left(job, body))
            try:
                result = await self._dispatcher.infer(job)
            finally:
                leaving.cancel()
            status = 200
        except ServeError as error:
            status = error.status
            raise
        finally:
            self._meter.count(table.REQUESTS, route.model, str(status))
            self._meter.observe(table.REQUEST_SECONDS, time.monotonic() - started, route.model)
        size = sum(len(item.data) for item in result.outputs)
        body_of_answer = await self._heavy.write(size, lambda: serve.infer_body(route.model, request.id, result))
        return Answer(200, body_of_answer, (answers.JSON, version_header(result.version)))

    # --- the rest of the tree

    async def _ask_control(self, make: Callable[[int], Numbered], limit_s: float = CONTROL_S) -> Answer:
        try:
            reply = await self._control.call(make, limit_s)
        except (ConnectionLost, TimeoutError) as cause:
            detail = f"control does not answer: {cause or 'no answer in time'}; what serves goes on"
            raise ServeError(503, detail, retry_after_s=1) from cause
        except CallFailed as failure:
            raise ServeError(failure.fault.status, failure.fault.detail, code=failure.fault.code) from failure
        assert isinstance(reply, Json), reply
        return Answer(200, reply.body)

    async def _vector(self, name: str, query: bytes) -> Answer:
        """Of one deployment, or with "" as its name of all."""
        asked = vector_query.of_one(name, query) if name else vector_query.of_all(query)
        return await self._ask_control(asked.make, asked.wait_s)

    async def _metrics(self) -> bytes:
        peers = [*(("worker", str(index), worker) for index, worker in enumerate(self._workers)), ("control", "0", self._control)]
        found = await asyncio.gather(*(_gauges(peer) for _, _, peer in peers))
        gauge = self._meter.set
        for (role, index, _), gauges in zip(peers, found, strict=True):
            gauge(table.PROCESS_UP, gauges is not None, role, index)
        for number, in_flight in enumerate(self._dispatcher.in_flight):
            gauge(table.IN_FLIGHT, in_flight, str(number))
        gauge(table.QUEUED, self._dispatcher.queued)
        gauge(table.READY, not self.why_not_ready())
        gauge(table.PRIVATE_BYTES, tree_private_bytes(os.getppid()))  # the supervisor's
        self._meter.clear(table.ARENA_BYTES)
        for name, record in self._record.deployments().items():
            with suppress(FileNotFoundError):
                gauge(table.ARENA_BYTES, (self._config.arena_dir / record.arena).stat().st_size, name)
        tallies = {("front", "0"): self._meter.tally} | dict(self._runtime.tallies)
        return metrics.page(tallies, [self._meter.gauges(), *(gauges for gauges in found if gauges)])

    def _kick(self) -> None:
        self._dispatcher.kick()


async def _gauges(peer: Peer) -> tuple[GaugeSample, ...] | None:
    with suppress(ConnectionLost, CallFailed, TimeoutError):
        reply = await peer.call(GetMetrics, METRICS_S)
        if isinstance(reply, Metrics):
            return reply.gauges
    return None


async def _dropped_when_left(job: Job, body: _Body) -> None:
    """A request whose client is gone takes no place in the queue; one that a worker has already is computed to its end."""
    await body.left()
    job.fail(ServeError(400, "the client went away before the answer"))


class _Body:
    """The body of one request, read at most once."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive) -> None:
        self._headers = dict(scope["headers"])
        self._receive = receive
        self._announced = _announced_bytes(self._headers)
        self.is_probe = self._headers.get(PROBE) == b"1"
        self.is_unread = self._announced > 0 or b"transfer-encoding" in self._headers

    async def read(self, limit: int, deadline: float) -> bytes:
        """Raises ServeError: 408, 413, 415, 400 for a client that went away."""
        media = self._headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
        if media != b"application/json" or b"inference-header-content-length" in self._headers:
            raise ServeError(415, "the body must be application/json; the binary tensor extension is not supported")
        if self._announced > limit:
            raise ServeError(413, f"the body has {self._announced} bytes, the limit is {limit}")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ServeError(400, "the client went away before the body was complete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise ServeError(413, f"the body exceeds {limit} bytes")
                    if not message.get("more_body", False):
                        self.is_unread = False
                        return b"".join(parts)
        except TimeoutError as cause:
            raise ServeError(408, "the body did not arrive before the deadline of the request") from cause

    async def left(self) -> None:
        """Until the client is gone. Once the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _announced_bytes(headers: Mapping[bytes, bytes]) -> int:
    """The server below has refused heads whose length is no number."""
    given = headers.get(b"content-length", b"")
    return int(given) if given.isdigit() else 0


def _version() -> str:
    try:
        return version("raftmeta")
    except PackageNotFoundError:
        return "0"
