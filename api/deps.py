"""What the API needs of the member behind it, as Protocols. Whoever composes a member provides these; nothing here is built."""

from __future__ import annotations

from typing import Protocol

import msgspec

from raftmeta.core.state import State
from raftmeta.log.port import Log
from raftmeta.nodes import NodeTable
from raftmeta.watch import WatchHub


class Check(msgspec.Struct, frozen=True):
    """One condition of readiness."""

    name: str
    ok: bool
    reason: str  # what was expected and found, also when it is well


class Caller(Protocol):
    """Who sends a request, as the authorizer knows him."""

    @property
    def name(self) -> str: ...


class Authorizer(Protocol):
    """The only place that judges. `action` and `resource` describe the expanded operation: one call per item of a batch."""

    def authenticate(self, token: str) -> Caller:
        """Raises RaftmetaError unauthenticated. The empty token is that of a caller without credentials."""

    def require(self, caller: Caller, action: str, resource: str) -> None:
        """Raises RaftmetaError forbidden."""


class Member(Protocol):
    """One member, running. All attributes may be read from any thread."""

    @property
    def state(self) -> State:
        """The newest applied value, immutable."""

    @property
    def log(self) -> Log: ...

    @property
    def watch(self) -> WatchHub: ...

    @property
    def nodes(self) -> NodeTable: ...

    @property
    def authorizer(self) -> Authorizer: ...

    def gossip(self, topic: str, data: bytes) -> None:
        """Best-effort news for the other members; never blocks."""

    def checks(self) -> tuple[Check, ...]:
        """Conditions of readiness beyond what the log's status says; never blocks."""
