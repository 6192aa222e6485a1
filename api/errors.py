"""Errors as problem documents (RFC 9457). Status, title and class come from the one table of codes; nothing here invents any."""

from __future__ import annotations

from typing import Any

import msgspec

from api.operation import Reply
from raftmeta.core.errors import CODES, ErrorClass, RaftmetaError

PROBLEM_TYPE = b"application/problem+json"
RETRY_AFTER_S = 1  # an election takes less; a client's own back-off spreads the retries
_RETRYABLE_CAPACITY = ("too_many_watchers", "too_many_requests")
_RESERVED = frozenset({"type", "title", "status", "detail", "code", "class"})

_encode = msgspec.json.Encoder().encode


def problem(code: str, detail: str, **params: Any) -> dict[str, Any]:
    info = CODES[code]
    body: dict[str, Any] = {
        "type": f"urn:raftmeta:error:{code}",
        "title": info.title,
        "status": info.status,
        "detail": detail,
        "code": code,
        "class": info.error_class.value,
    }
    for name, value in params.items():
        if name not in _RESERVED:
            body[name] = value
    return body


def to_reply(error: RaftmetaError, revision: int = -1) -> Reply:
    """The error as a reply. Retry-After stands on everything that is worth the same request again.

    `revision` of a command that was judged, which is said: other refusals say nothing of what an earlier request with its key did.
    """
    info = error.info
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if info.error_class is ErrorClass.UNAVAILABLE or error.code in _RETRYABLE_CAPACITY:
        headers = ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    elif error.code == "unauthenticated":
        headers = ((b"www-authenticate", b"Bearer"),)
    elif error.code == "body_too_large":
        headers = ((b"connection", b"close"),)  # the rest of the body is not read
    if revision >= 0:
        headers += ((b"x-raftmeta-judged", b"true"),)
    return Reply(
        status=info.status,
        body=_encode(problem(error.code, error.detail, **error.params)),
        revision=revision,
        content_type=PROBLEM_TYPE,
        headers=headers,
        code=error.code,
    )
