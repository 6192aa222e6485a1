"""Replies and pages, built the same way by every handler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import msgspec

from api.operation import Call, Reply
from raftmeta.core.state import State

encode = msgspec.json.Encoder().encode


def at(state: State, value: Any, status: int = 200) -> Reply:
    """A value read from this state."""
    return Reply(status=status, body=encode(value), revision=state.revision, generation=state.generation)


def done(revision: int, value: Any, *, status: int = 200, repeated: bool = False) -> Reply:
    """The outcome of a command."""
    headers = ((b"idempotency-replayed", b"true"),) if repeated else ()
    return Reply(status=status, body=encode(value), revision=revision, headers=headers)


def page(state: State, call: Call, found: Iterable[tuple[str, Any]], render: Callable[[Any], Any]) -> Reply:
    """One page of (cursor, record) that begin after the call's cursor. The next cursor is None on the last page."""
    limit = call.query.limit
    taken = list(islice(found, limit + 1))
    more = len(taken) > limit
    items = [render(record) for _, record in taken[:limit]]
    return at(state, {"items": items, "next": taken[limit - 1][0] if more else None})
