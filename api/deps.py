"""What the API needs of the member behind it, as Protocols. Whoever composes a member provides these; nothing here is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from raftmeta.core.state import State
from raftmeta.log.port import Log
from raftmeta.nodes import NodeTable
from raftmeta.security.roles import Principal
from raftmeta.watch import WatchHub


class Check(Protocol):
    """One condition of readiness."""

    @property
    def name(self) -> str: ...

    @property
    def ok(self) -> bool: ...

    @property
    def reason(self) -> str:
        """What was expected and found, also when it is well."""


class Authorizer(Protocol):
    """The only place that judges. `action` and `resource` describe the expanded operation: one call per item of a batch."""

    def authenticate(self, token: str) -> Principal:
        """Raises RaftmetaError unauthenticated. The empty token is that of a caller without credentials."""

    def require(self, caller: Principal, action: str, resource: str) -> None:
        """Raises RaftmetaError forbidden."""


class Member(Protocol):
    """One member, running. All attributes may be read from any thread."""

    @property
    def state(self) -> State:
        """The newest applied value, immutable: that of `log`, at least while `log` stays the same."""

    @property
    def log(self) -> Log:
        """Another one from the moment at which the member begins again from its directory."""

    @property
    def watch(self) -> WatchHub: ...

    @property
    def nodes(self) -> NodeTable: ...

    @property
    def authorizer(self) -> Authorizer: ...

    @property
    def unsound(self) -> str:
        """Why nothing may be read or written here now, "" when it may."""

    @property
    def peer_events(self) -> Mapping[str, int]:
        """What happened on the links to the other members since they were opened, counted by name; {} without any."""

    def gossip(self, topic: str, data: bytes) -> None:
        """Best-effort news for the other members; never blocks."""

    def checks(self) -> Sequence[Check]:
        """Conditions of readiness beyond what the log's status says; never blocks."""
