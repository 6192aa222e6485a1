"""What the client takes and gives back: requests, replies, read modes, changes of a watch. Plain values."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

from raftmeta.core.errors import RaftmetaError


class Reply(dict[str, Any]):
    """A JSON object with the place in history it belongs to."""

    def __init__(self, body: dict[str, Any], *, status: int, revision: int, generation: int, key: str = "") -> None:
        super().__init__(body)
        self.status = status
        self.revision = revision  # of the state it was served from or, for a mutation, made
        self.generation = generation
        self.key = key  # idempotency key of a mutation, "" for a read


@dataclass(frozen=True)
class Read:
    """How fresh a read must be. The default is linearizable."""

    stale: bool = False
    max_stale_ms: int | None = None  # with `stale`: refuse to be answered from further back
    min_revision: int | None = None  # not before this revision is applied

    def params(self) -> dict[str, str]:
        params = {"consistency": "stale"} if self.stale else {}
        if self.max_stale_ms is not None:
            params["max_stale_ms"] = str(self.max_stale_ms)
        if self.min_revision is not None:
            params["min_revision"] = str(self.min_revision)
        return params


LINEARIZABLE = Read()
STALE = Read(stale=True)


class Page(NamedTuple):
    """Which part of a list."""

    limit: int | None = None  # the server's default and maximum hold otherwise
    after: str | None = None  # `next` of the page before

    def params(self) -> dict[str, str]:
        params = {} if self.limit is None else {"limit": str(self.limit)}
        if self.after is not None:
            params["after"] = self.after
        return params


FIRST_PAGE = Page()


class ChangeEvent(NamedTuple):
    kind: str  # model | version | deployment | rollout | verdict | evidence
    key: str
    op: str  # put | delete
    value: dict[str, Any] | None  # the record after, None for a delete


class Change(NamedTuple):
    """Everything that one revision changed."""

    generation: int
    revision: int
    events: tuple[ChangeEvent, ...]


class Bookmark(NamedTuple):
    """Every event up to `revision` was delivered."""

    generation: int
    revision: int


def idempotency_key(now_ms: int) -> str:
    """A fresh key: its time in 13 digits (the server refuses keys older than it remembers), then 64 random bits."""
    if not 0 <= now_ms < 10**13:
        raise RaftmetaError("bad_field", f"the local clock reads {now_ms} ms, which has no 13-digit form")
    return f"{now_ms:013d}-{secrets.token_hex(8)}"
