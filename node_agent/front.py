"""The front process: the HTTP face of a node.

It serves the Open Inference Protocol, passes questions about the node on to control, and makes one metrics page of the whole tree. It
holds no model and no decision: what serves is in the workers, what should serve is in the node's record, so a crash of either neighbour
leaves it answering. It is ready when every deployment of the node has its committed version verified and serving, which the workers say
from the shared memory: control may be dead meanwhile. A node that was never given anything is alive and not ready, and says why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from node_agent import metrics, serve
from node_agent.dispatch import NOTHING_SERVES_RETRY_S, Dispatcher, Job
from node_agent.ipc import CallFailed, ConnectionLost
from node_agent.journal import DeploymentRecord, Follower
from node_agent.messages import Family, GetMetrics, GetStatus, GetVector, Json, Metrics, Numbered, Served
from node_agent.metrics import Meter
from node_agent.peers import Peer
from node_agent.runtime import Runtime
from node_agent.serve import ServeError
from raftmeta.core.manifest import NAME

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

CONTROL_S = 30.0  # the vector of a large slot takes seconds
METRICS_S = 2.0
UNREAD = (408, 413, 415)  # answers that leave the body unread; the connection cannot go on
JSON = (b"content-type", b"application/json")


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = (JSON,)


class Front:
    """The ASGI application and what it needs."""

    def __init__(self, runtime: Runtime) -> None:
        config = runtime.config
        self._config = config
        self._runtime = runtime
        self._record = Follower(config.store_dir)
        self._workers = [Peer(runtime.worker_socket(index), self._kick) for index in range(config.workers)]
        self._control = Peer(runtime.control_socket(), lambda: None)
        self._dispatcher = Dispatcher(self._workers, config.queue_limit, config.worker_depth)
        self._tasks: list[asyncio.Task[None]] = []
        self.draining = False
        meter = Meter()
        self._meter = meter
        self._requests = meter.counter("requests", "Inference requests by HTTP status", ("deployment", "status"))
        self._seconds = meter.seconds("request_seconds", "Inference requests from first byte to answer", ("deployment",))
        self._queued = meter.gauge("queued_requests", "Requests that wait for a worker")
        self._outstanding = meter.gauge("outstanding_requests", "Requests that a worker has")
        self._replays = meter.gauge("replays", "Requests that were given to a second worker since the front started")
        self._up = meter.gauge("process_up", "Whether a process of the tree answers", ("role", "index"))
        self._ready = meter.gauge("ready", "Whether the node serves everything that is committed for it")

    def start(self) -> None:
        self._tasks = [asyncio.create_task(peer.keep_connected()) for peer in (*self._workers, self._control)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def why_not_ready(self) -> str:
        """Empty when the node is ready."""
        if self.draining:
            return "the node is shutting down"
        record = self._record.record()
        if record is not None and record.cordoned:
            return f"cordoned: {record.cordoned}"
        deployments = {} if record is None else record.deployments
        if not deployments:
            return "no deployment lists this node, or the control plane was never reached"
        reasons = [f"{name}: {reason}" for name, record in sorted(deployments.items()) if (reason := self._why_not(record))]
        return "; ".join(reasons)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            answer = await self._route(scope, receive)
        except ServeError as error:
            retry = ((b"retry-after", str(error.retry_after_s).encode()),) if error.retry_after_s else ()
            close = ((b"connection", b"close"),) if error.status in UNREAD else ()
            answer = Answer(error.status, serve.error_body(error.message), (JSON, *retry, *close))
        body = b"" if scope["method"] == "HEAD" else answer.body
        headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _route(self, scope: Mapping[str, Any], receive: Receive) -> Answer:
        path, method = scope["path"], scope["method"]
        if path.startswith("/v2/models/"):
            route = serve.model_route(path)
            if route.action == "infer":
                _allow(method, "POST")
                return await self._infer(route, scope, receive)
            _allow(method, "GET", "HEAD")
            return self._model_ready(route) if route.action == "ready" else self._model(route)
        _allow(method, "GET", "HEAD")
        match path:
            case "/livez" | "/v2/health/live":
                return _json({"live": True})
            case "/readyz" | "/v2/health/ready":
                reason = self.why_not_ready()
                return _json({"ready": not reason} | ({"reason": reason} if reason else {}), 503 if reason else 200)
            case "/v2":
                return _json({"name": "raftmeta", "version": _version(), "extensions": []})
            case "/metrics":
                return Answer(200, await self._metrics(), ((b"content-type", metrics.CONTENT_TYPE.encode()),))
            case "/raftmeta/v1/status" | "/raftmeta/v1/slots":
                return await self._ask_control(GetStatus)
            case _ if path.startswith("/raftmeta/v1/vector/"):
                return await self._vector(path.removeprefix("/raftmeta/v1/vector/"), scope["query_string"])
            case _:
                raise ServeError(404, f"no such resource: {path[:200]}")

    # --- inference

    async def _infer(self, route: serve.Route, scope: Mapping[str, Any], receive: Receive) -> Answer:
        started = time.monotonic()
        status = 500
        known = self._known(route.model)
        try:
            deadline = started + self._config.request_deadline_s
            body = await self._body(scope, receive, deadline)
            request = serve.parse_infer(body, self._config.body_limit_bytes)
            if known.pin is None and not self._serving(route.model):
                raise ServeError(503, f"{route.model} has no version on this node yet", retry_after_s=5)
            blocked = self._blocked(route.model)
            if blocked and not route.version:  # a pinned version may be in the other slot: the worker looks
                raise ServeError(503, f"{route.model}: {blocked}", NOTHING_SERVES_RETRY_S)
            result = await self._dispatcher.infer(Job(route.model, route.version, request.inputs, request.outputs, deadline))
            status = 200
        except ServeError as error:
            status = error.status
            raise
        finally:
            self._requests.labels(route.model, str(status)).inc()
            self._seconds.labels(route.model).observe(time.monotonic() - started)
        label = result.version.encode()
        return Answer(200, serve.infer_body(route.model, request.id, result), (JSON, (b"x-raftmeta-version", label)))

    async def _body(self, scope: Mapping[str, Any], receive: Receive, deadline: float) -> bytes:
        headers = dict(scope["headers"])
        limit = self._config.body_limit_bytes
        media = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
        if media != b"application/json" or b"inference-header-content-length" in headers:
            raise ServeError(415, "the body must be application/json; the binary tensor extension is not supported")
        if int(headers.get(b"content-length", b"0") or b"0") > limit:
            raise ServeError(413, f"the body has {headers[b'content-length'].decode()} bytes, the limit is {limit}")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ServeError(400, "the client went away before the body was complete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise ServeError(413, f"the body exceeds {limit} bytes")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as cause:
            raise ServeError(408, "the body did not arrive before the deadline of the request") from cause

    # --- models

    def _known(self, model: str) -> DeploymentRecord:
        found = self._record.deployments().get(model)
        if found is None:
            raise ServeError(404, f"no model {model!r} on this node")
        return found

    def _served(self, model: str) -> list[Served]:
        return [item for worker in self._workers for item in worker.served if item.deployment == model]

    def _serving(self, model: str) -> bool:
        return any(slot.slot == item.active for item in self._served(model) for slot in item.slots)

    def _blocked(self, model: str) -> str:
        """Why no slot of the node can be entered, as far as the workers say. Empty when one can, or only workers are missing."""
        said = [item.blocked for item in self._served(model)]
        return said[0] if said and all(said) else ""

    def _why_not(self, record: DeploymentRecord) -> str:
        blocked = "" if record.pin is None else self._blocked(record.name)
        if blocked:
            return blocked
        if record.behind:
            return "the committed version is not verified on this node yet"
        if not self._serving(record.name):
            return "no version was activated yet" if record.pin is None else "no worker serves it yet"
        return ""

    def _model(self, route: serve.Route) -> Answer:
        self._known(route.model)
        served = self._served(route.model)
        held = sorted({slot.label for item in served for slot in item.slots})
        if route.version and route.version not in held:
            raise ServeError(409, f"no slot of this node holds version {route.version}; held: {', '.join(held) or 'none'}")
        example = next(iter(served), None)
        specs = [] if example is None else [example.inputs, example.outputs]
        listed = [[{"name": s.name, "datatype": s.datatype, "shape": s.shape} for s in group] for group in specs] or [[], []]
        body = {"name": route.model, "versions": held, "platform": "raftmeta", "inputs": listed[0], "outputs": listed[1]}
        active = next((slot.label for item in served for slot in item.slots if slot.slot == item.active), "")
        return _json(body, headers=((b"x-raftmeta-version", active.encode()),) if active else ())

    def _model_ready(self, route: serve.Route) -> Answer:
        reason = self._why_not(self._known(route.model))
        served = self._served(route.model)
        if not reason and route.version and all(slot.label != route.version for item in served for slot in item.slots):
            reason = f"no slot holds version {route.version}"
        body = {"name": route.model, "ready": not reason} | ({"reason": reason} if reason else {})
        return _json(body, 503 if reason else 200)

    # --- the rest of the tree

    async def _ask_control(self, make: Callable[[int], Numbered]) -> Answer:
        try:
            reply = await self._control.call(make, CONTROL_S)
        except (ConnectionLost, TimeoutError) as cause:
            detail = f"control does not answer: {cause or 'no answer in time'}; what serves goes on"
            return _problem(503, "starting", "unavailable", detail, ((b"retry-after", b"1"),))
        except CallFailed as failure:
            return _problem(failure.fault.status, failure.fault.code, "rejected", failure.fault.detail)
        assert isinstance(reply, Json), reply
        return Answer(200, reply.body)

    async def _vector(self, name: str, query: bytes) -> Answer:
        if not NAME.match(name):
            return _problem(404, "unknown_deployment", "invalid", f"{name[:140]!r} is no deployment name")
        try:
            given = dict(parse_qsl(query.decode(), keep_blank_values=True, strict_parsing=bool(query), max_num_fields=8))
        except ValueError as cause:
            return _problem(400, "bad_request", "invalid", f"the query cannot be read: {cause}")
        unknown = sorted(set(given) - {"entries", "blocks"})
        if unknown or given.get("entries", "0") not in ("0", "1"):
            return _problem(400, "bad_request", "invalid", "the query takes entries=0|1 and blocks=TENSOR")
        entries, blocks = given.get("entries") == "1", given.get("blocks", "")
        return await self._ask_control(lambda number: GetVector(number, name, entries, blocks))

    async def _metrics(self) -> bytes:
        peers = [*(("worker", str(index), worker) for index, worker in enumerate(self._workers)), ("control", "0", self._control)]
        found = await asyncio.gather(*(_families(peer) for _, _, peer in peers))
        for (role, index, _), families in zip(peers, found, strict=True):
            self._up.labels(role, index).set(families is not None)
        self._queued.set(self._dispatcher.queued)
        self._outstanding.set(self._dispatcher.outstanding)
        self._replays.set(self._dispatcher.replays)
        self._ready.set(not self.why_not_ready())
        return metrics.page([self._meter.families(), *(families for families in found if families)])

    def _kick(self) -> None:
        self._dispatcher.kick()


async def _families(peer: Peer) -> tuple[Family, ...] | None:
    with suppress(ConnectionLost, CallFailed, TimeoutError):
        reply = await peer.call(GetMetrics, METRICS_S)
        if isinstance(reply, Metrics):
            return reply.families
    return None


def _allow(method: str, *methods: str) -> None:
    if method not in methods:
        raise ServeError(405, f"the resource takes {', '.join(methods)}, found {method[:20]}")


def _json(body: object, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Answer:
    return Answer(status, msgspec.json.encode(body), (JSON, *headers))


def _problem(status: int, code: str, error_class: str, detail: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Answer:
    body = {"type": f"urn:raftmeta:error:{code}", "status": status, "detail": detail, "code": code, "class": error_class}
    return Answer(status, msgspec.json.encode(body), ((b"content-type", b"application/problem+json"), *headers))


def _version() -> str:
    try:
        return version("raftmeta")
    except PackageNotFoundError:
        return "0"
