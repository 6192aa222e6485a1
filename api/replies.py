"""Replies and pages, built the same way by every handler."""

from __future__ import annotations

from typing import Any

import msgspec

from api.operation import Reply
from raftmeta.core.queries import Page
from raftmeta.core.state import State

encode = msgspec.json.Encoder().encode


def at(state: State, value: Any, status: int = 200) -> Reply:
    """A value read from this state."""
    return Reply(status=status, body=encode(value), revision=state.revision, generation=state.generation)


def done(revision: int, value: Any, *, status: int = 200, repeated: bool = False) -> Reply:
    """The outcome of a command."""
    headers = ((b"idempotency-replayed", b"true"),) if repeated else ()
    return Reply(status=status, body=encode(value), revision=revision, headers=headers)


def page(state: State, found: Page) -> Reply:
    return at(state, {"items": found.items, "next": found.next})
