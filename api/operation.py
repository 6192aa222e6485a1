"""What an operation of the API is: one row with everything about it, and the values that go in and come out.

The thin layer, the FastAPI application, the document and the golden files are all made from these rows, so that they cannot disagree. A
handler is a plain coroutine function from (service, call) to a reply; it knows nothing of ASGI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from api.json_body import Body
from raftmeta.core.types import SideName
from raftmeta.security.roles import Principal

if TYPE_CHECKING:
    from api.service import Service

JSON_TYPE = b"application/json"
REPLY_AT_ONCE = "raftmeta.reply"  # extension of the ASGI scope: (status, headers, whole body) -> whether it was taken

Header = tuple[bytes, bytes]
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Stream = Callable[[Receive, Send, list[Header]], Awaitable[None]]


class Kind(StrEnum):
    """What an operation does to the state, hence which parameters it takes."""

    READ = "read"  # consistency, max_stale_ms, min_revision
    LIST = "list"  # the same, and limit, after
    MUTATION = "mutation"  # Idempotency-Key
    DIRECT = "direct"  # neither: not replicated


class Query(msgspec.Struct, frozen=True):
    """The decoded query string; None where the parameter was left out."""

    stale: bool = False
    max_stale_ms: int | None = None
    min_revision: int = 0
    limit: int = 100
    after: str | None = None
    at_ms: int | None = None
    from_revision: int | None = None
    resource: tuple[str, ...] = ()
    verbose: bool = False
    since: int | None = None
    deployment: str | None = None
    to: SideName | None = None
    max_verdict_age_ms: int | None = None


class Call:
    """One request as its handler sees it: checked, authorized, decoded. Filled in by `dispatch` in the order of the fields."""

    __slots__ = ("body", "caller", "headers", "key", "params", "query", "size_bytes", "staleness_ms")

    def __init__(self, params: Mapping[str, str]) -> None:
        self.params = params  # of the path; every one is a valid name
        self.headers: Mapping[bytes, bytes] = {}
        self.caller: Principal
        self.query: Query
        self.key = ""  # idempotency key of a mutation
        self.size_bytes = 0  # of the body
        self.body: Any = None  # of the operation's body type
        self.staleness_ms = -1.0  # of a stale read, once it was looked at


class Reply(msgspec.Struct, frozen=True):
    status: int
    body: bytes = b""
    revision: int = -1  # served at, or of the outcome; -1: the newest applied one
    generation: int = -1
    content_type: bytes = JSON_TYPE
    headers: tuple[Header, ...] = ()
    code: str = ""  # error code of a problem
    stream: Stream | None = None  # sends the body itself


Handler = Callable[["Service", Call], Awaitable[Reply]]


class Answer(msgspec.Struct, frozen=True):
    """A success as the document shows it."""

    status: int
    shape: Any  # a msgspec type; None for text
    example: Any
    what: str
    media: str = "text/plain"  # of a text


class Operation(msgspec.Struct, frozen=True):
    id: str
    method: str
    path: str  # template below the root, e.g. /v1/models/{model}
    kind: Kind
    action: str  # as the authorizer names it; "" for what anybody may ask
    what: str  # one sentence
    handler: Handler
    answers: tuple[Answer, ...]
    errors: tuple[str, ...]  # codes beyond those that every operation of the kind can answer
    body: Body[Any] | None = None
    body_optional: bool = False
    example: Any = None  # of the body
    extra_query: tuple[str, ...] = ()
    max_body_bytes: int = 0  # 0: the service's limit
    hot: bool = False  # runs in the thin layer
