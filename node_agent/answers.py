"""How the serving port says things: JSON bodies, the protocol's error body below /v2, problem bodies elsewhere. Pure."""

from __future__ import annotations

import msgspec

from node_agent.serve import Header, ServeError, error_body
from raftmeta.core.errors import CODES, ErrorClass

JSON = (b"content-type", b"application/json")
PROBLEM = (b"content-type", b"application/problem+json")
CLOSE = (b"connection", b"close")

_CODES = {
    400: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    503: "starting",
}


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    headers: tuple[Header, ...] = (JSON,)


def json(body: object, status: int = 200, headers: tuple[Header, ...] = ()) -> Answer:
    return Answer(status, msgspec.json.encode(body), (JSON, *headers))


def problem(status: int, code: str, detail: str, headers: tuple[Header, ...] = ()) -> Answer:
    """`code` need not be one of the table: control has codes of its own, which ask to look again."""
    error_class = CODES[code].error_class if code in CODES else ErrorClass.REJECTED
    body = {"type": f"urn:raftmeta:error:{code}", "status": status, "detail": detail, "code": code, "class": error_class.value}
    return Answer(status, msgspec.json.encode(body), (PROBLEM, *headers))


def refusal(error: ServeError, *, in_protocol: bool, unread: bool) -> Answer:
    """`unread`: the request has a body that nobody read, so its connection cannot go on."""
    retry = ((b"retry-after", str(error.retry_after_s).encode()),) if error.retry_after_s else ()
    headers = (*error.headers, *retry, *((CLOSE,) if unread and CLOSE not in error.headers else ()))
    if in_protocol:
        return Answer(error.status, error_body(error.message), (JSON, *headers))
    return problem(error.status, error.code or _CODES[error.status], error.message, headers)
