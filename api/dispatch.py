"""One request through the API: admit, identify, authorize, decode, handle, and always an answer.

Both ways in, the thin layer and the FastAPI application, end here, so that an operation behaves the same on either. The order matters:
nothing of a body is read before its sender is known to be allowed, and nothing is proposed before everything about the request was
checked, so that a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import structlog

from api import auth, body, errors, query
from api.operation import REPLY_AT_ONCE, Call, Header, Kind, Operation, Receive, Reply, Scope, Send
from api.service import Rejected, Service
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import LABEL, NAME

log = structlog.get_logger(__name__)

ROOT = "/v1/"
DRAIN_BYTES = 1 << 20  # of a refused body: what a client has under way before it reads the answer
DRAIN_S = 1.0
_STATIC: tuple[Header, ...] = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_LABEL_PARAMETERS = frozenset({"label"})
_SINGLE = frozenset({b"authorization", b"content-encoding", b"content-length", b"content-type", b"host", b"idempotency-key", b"origin"})


async def serve(service: Service, operation: Operation, params: Mapping[str, str], asgi: tuple[Scope, Receive, Send]) -> None:
    """Answers one request of this operation."""
    scope, receive, send = asgi
    started = perf_counter()
    call = Call(params)
    service.in_flight += 1
    try:
        reply = await _answer(service, operation, call, scope, receive)
        service.stats.observe(operation.path, operation.method, reply.status, perf_counter() - started)
    except body.ClientGone:
        return
    finally:
        service.in_flight -= 1
    headers = _headers(service, reply, call)
    if reply.stream is not None:
        await reply.stream(receive, send, headers)
        return
    at_once = scope.get("extensions", {}).pop(REPLY_AT_ONCE, None)  # taken out, for it holds what holds the scope
    if at_once is not None and reply.code != "body_too_large" and at_once(reply.status, headers, reply.body):
        return
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if reply.code == "body_too_large":
        await send({"type": "http.response.body", "body": reply.body, "more_body": True})
        await body.drain(receive, DRAIN_BYTES, DRAIN_S)
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": reply.body})


async def _answer(service: Service, operation: Operation, call: Call, scope: Scope, receive: Receive) -> Reply:
    revision = -1
    try:
        if operation.action and service.in_flight > service.limits.max_in_flight:
            raise RaftmetaError(
                "too_many_requests", f"{service.in_flight} requests are in flight, the limit is {service.limits.max_in_flight}"
            )
        await _prepare(service, operation, call, scope, receive)
        return await operation.handler(service, call)
    except Rejected as rejected:
        revision = rejected.revision
        fault: RaftmetaError = rejected
    except RaftmetaError as refused:
        fault = refused
    except body.ClientGone:
        raise
    except Exception:  # the outermost frame of a request: whatever breaks, the client gets an answer
        log.exception("a request failed", operation=operation.id)
        fault = RaftmetaError("internal", f"{operation.id} failed; the member's log says why")
    service.stats.problem(fault.code)
    return errors.to_reply(fault, revision)


async def _prepare(service: Service, operation: Operation, call: Call, scope: Scope, receive: Receive) -> None:
    """Fills the call in, or raises RaftmetaError."""
    headers = call.headers = _fold(scope["headers"])
    member = service.member
    if operation.action:
        call.caller = auth.identify(member.authorizer, scope, headers)
        _check_names(call.params, scope.get("raw_path") or b"")
        member.authorizer.require(call.caller, operation.action, scope["path"][len(ROOT) :])
    call.query = query.decode(scope["query_string"], operation)
    if operation.kind is Kind.MUTATION:
        call.key = _key(headers) or service.make_key()
    if operation.body is not None:
        await _read_body(service, operation, call, receive)


async def _read_body(service: Service, operation: Operation, call: Call, receive: Receive) -> None:
    assert operation.body is not None
    limits = service.limits
    limit = operation.max_body_bytes or limits.max_body_bytes
    headers = call.headers
    body.check_headers(headers, limit)
    declared = int(headers.get(b"content-length", b"0"))
    reserved = limit if b"transfer-encoding" in headers else declared
    if reserved <= limits.large_bytes:
        reserved = 0
    elif service.large_bytes + reserved > limits.max_large_bytes:
        raise RaftmetaError("overloaded", f"large bodies of {service.large_bytes} bytes are in work, the limit is {limits.max_large_bytes}")
    service.large_bytes += reserved
    try:
        data = await body.read(receive, limit)
        if not data and operation.body_optional:
            data = b"{}"
        elif data and b"content-type" not in headers:
            raise RaftmetaError("unsupported_media_type", "the body has no content-type, expected application/json")
        call.size_bytes = len(data)
        call.body = await service.compute(len(data), operation.body.decode, data)
    finally:
        service.large_bytes -= reserved


def _fold(fields: Sequence[Header]) -> Mapping[bytes, bytes]:
    """The header fields by name. Raises RaftmetaError bad_request when one that decides something stands twice: it has two meanings."""
    headers = dict(fields)
    if len(headers) != len(fields):
        seen = set()
        for name, _ in fields:
            if name in seen and name in _SINGLE:
                raise RaftmetaError("bad_request", f"the header {name.decode('ascii')} stands twice")
            seen.add(name)
    return headers


def _check_names(params: Mapping[str, str], raw_path: bytes) -> None:
    if b"%2" in raw_path and b"%2f" in raw_path.lower():  # decoded it would end a name and begin another
        raise RaftmetaError("bad_name", "the path holds an encoded slash, which no name may hold")
    for name, value in params.items():
        if name in _LABEL_PARAMETERS:
            if not LABEL.match(value):
                raise RaftmetaError("bad_name", f"{name} {value[:80]!r} is not of the form {LABEL.pattern[:-2]}")
        elif not NAME.match(value):
            raise RaftmetaError("bad_name", f"{name} {value[:80]!r} is not of the form {NAME.pattern[:-2]}")


def _key(headers: Mapping[bytes, bytes]) -> str:
    given = headers.get(b"idempotency-key")
    if given is None:
        return ""
    if not 1 <= len(given) <= 128 or not all(33 <= byte <= 126 for byte in given):
        raise RaftmetaError("bad_field", "the idempotency key is not 1 to 128 visible ASCII characters")
    return given.decode("ascii")


def _headers(service: Service, reply: Reply, call: Call) -> list[Header]:
    state = service.member.state
    revision = reply.revision if reply.revision >= 0 else state.revision
    generation = reply.generation if reply.generation >= 0 else state.generation
    headers: list[Any] = [
        (b"content-type", reply.content_type),
        (b"x-raftmeta-revision", b"%d" % revision),
        (b"x-raftmeta-generation", b"%d" % generation),
        *_STATIC,
        *reply.headers,
    ]
    if reply.stream is None:
        headers.append((b"content-length", b"%d" % len(reply.body)))
    if call.key:
        headers.append((b"idempotency-key", call.key.encode("ascii")))
    if call.staleness_ms >= 0:
        headers.append((b"x-raftmeta-staleness-ms", _whole(call.staleness_ms)))
    return headers


def _whole(milliseconds: float) -> bytes:
    """Rounded up: it is a bound. `unknown` before this member's first barrier."""
    return b"unknown" if milliseconds == float("inf") else b"%d" % -int(-milliseconds // 1)
