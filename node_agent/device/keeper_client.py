"""Asks a keeper for memory. One connection for each question: a client holds none while it computes, and a new keeper is found at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final, NamedTuple

from node_agent.device import keeper_messages as messages
from node_agent.device.keeper_messages import Answer, Given, Hold, List, Listing, NotHeld, Open, Refused, Release, Released, Request
from node_agent.refusal import REFUSALS, Refusal

TIMEOUT_S: Final = 10.0  # of each step of a question: an allocation of tens of GiB of the host's memory takes seconds


class Holding(NamedTuple):
    """Memory that a keeper holds too. Whoever got it closes the descriptor."""

    descriptor: int
    size_bytes: int
    created: bool


class KeeperClient:
    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S, user: int | None = None) -> None:
        """`user`: whose keeper it may be, this process's own unless a test says otherwise."""
        self.path = path
        self._user = os.geteuid() if user is None else user
        self._timeout_s = timeout_s

    def hold(self, name: str, size: int) -> Holding:
        """The memory of this name, made if there is none. Raises Refusal no_headroom, memory_differs or keeper_unavailable."""
        answer, descriptor = self._ask(Hold(name, size))
        if isinstance(answer, Given) and descriptor is not None:
            return Holding(descriptor, answer.size_bytes, answer.created)
        raise self._unavailable("memory", type(answer).__name__)

    def open(self, name: str) -> Holding | None:
        """None when it is not held. Raises Refusal keeper_unavailable."""
        answer, descriptor = self._ask(Open(name))
        if isinstance(answer, Given) and descriptor is not None:
            return Holding(descriptor, answer.size_bytes, created=False)
        if isinstance(answer, NotHeld):
            return None
        raise self._unavailable("memory", type(answer).__name__)

    def list(self) -> Listing:
        answer, _ = self._ask(List())
        if isinstance(answer, Listing):
            return answer
        raise self._unavailable("a listing", type(answer).__name__)

    def release(self, name: str) -> bool:
        """False when it was not held."""
        answer, _ = self._ask(Release(name))
        if isinstance(answer, Released):
            return answer.was_held
        raise self._unavailable("a release", type(answer).__name__)

    def _ask(self, request: Request) -> tuple[Answer, int | None]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(self._timeout_s)
            try:
                connection.connect(str(self.path))
                if (user := messages.user_of(connection)) != self._user:
                    raise self._unavailable(f"a keeper of user {self._user}", f"one of user {user}")
                messages.send(connection, request)
                answer, descriptor = messages.receive_answer(connection)
            except (OSError, EOFError, ValueError) as cause:
                raise self._unavailable(f"an answer within {self._timeout_s:g} s", f"{type(cause).__name__}: {cause}") from cause
        if isinstance(answer, Refused):
            kind = answer.kind if answer.kind in REFUSALS else "keeper_unavailable"
            raise Refusal(kind, answer.subject, answer.expected, answer.found)
        return answer, descriptor

    def _unavailable(self, expected: str, found: str) -> Refusal:
        return Refusal("keeper_unavailable", f"keeper at {self.path}", expected, found)
