"""Errors as the server sends them (RFC 9457 problem bodies), turned into RaftmetaError.

A code that this build does not know keeps its class: the caller still learns what to do next. A body that is no problem document, from a
proxy for instance, is judged by its status alone.
"""

from __future__ import annotations

from raftmeta import strict_json
from raftmeta.core.errors import CODES, RaftmetaError

MAX_DETAIL = 2_000  # characters; the rest of a hostile body is cut

_BY_CLASS = {
    "invalid": "bad_request",
    "rejected": "gate_not_met",
    "unavailable": "unknown_outcome",
    "capacity": "quota_exceeded",
    "integrity": "internal",
}
_BY_STATUS = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    410: "compacted",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "too_many_requests",
    507: "quota_exceeded",
}
_RESERVED = frozenset({"type", "title", "status", "detail", "code", "class", "instance", "self"})


def to_error(status: int, body: bytes) -> RaftmetaError:
    """The error of a reply whose status is no success."""
    try:
        problem = strict_json.load_object(body)
    except RaftmetaError:
        text = body[:200].decode("utf-8", "replace").strip()
        return RaftmetaError(_code_of_status(status), f"status {status} without a problem body: {text!r}")
    code, detail = str(problem.get("code", "")), str(problem.get("detail", ""))[:MAX_DETAIL]
    params = {key: value for key, value in problem.items() if key not in _RESERVED and _is_simple(value) and key.isidentifier()}
    if code in CODES:
        return RaftmetaError(code, detail, **params)
    nearest = _BY_CLASS.get(str(problem.get("class", "")), _code_of_status(status))
    params["server_code"] = code[:64]
    return RaftmetaError(nearest, f"the server answered {code[:64]!r}, which this build does not know: {detail}", **params)


def _is_simple(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _code_of_status(status: int) -> str:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status in (502, 503, 504):
        return "unknown_outcome"
    return "bad_request" if 300 <= status < 500 else "internal"
