"""What the serving nodes last said about themselves: a table of heartbeats, each with its age.

Not replicated. A member hears a heartbeat from the agent itself or as gossip of the member that did, so every member holds about the same
table, and an age is what this member's own monotonic clock says since it heard. The table never decides anything; it answers which of the
expected nodes are missing, and only after it has listened long enough to know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from raftmeta.core.errors import RaftmetaError
from raftmeta.log.messages import MAX_GOSSIP_BYTES

TOPIC = "heartbeat"
MAX_WHY = 256  # characters

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,127}\Z")]
Label = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._+-]{0,127})?\Z")]  # empty: none
Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]  # empty: none
Word = Annotated[str, Meta(max_length=64)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what agents send."""


class SlotStatus(_Strict, frozen=True):
    """One slot of the node's arena."""

    deployment: Name
    slot: Word
    version: Label
    checksum: Digest
    state: Word  # empty | dirty | verified


class ServingStatus(_Strict, frozen=True, omit_defaults=True):
    """What the node serves under one deployment."""

    version: Label
    checksum: Digest
    vector_root: Digest
    ready: bool
    lag_ms: Annotated[int, Meta(ge=-1, le=1 << 53)]  # commit seen to active, -1 before
    why: Annotated[str, Meta(max_length=MAX_WHY)] = ""  # it is not ready or stays where it is: by an operator, damaged, a step that fails


class NodeStatus(_Strict, frozen=True):
    node: Name
    zone: Name
    boot_id: Annotated[str, Meta(max_length=128)]
    url: Annotated[str, Meta(max_length=2_048)]  # where the node serves requests
    slots: Annotated[tuple[SlotStatus, ...], Meta(max_length=1_024)]
    deployments: Annotated[dict[Name, ServingStatus], Meta(max_length=512)]


class NodeLimits(msgspec.Struct, frozen=True):
    interval_ms: int = 2_000  # told to agents; one lost heartbeat must not matter
    missing_ms: int = 7_000  # three intervals and a slow reply
    forget_ms: int = 86_400_000  # a node that was taken away leaves the table after a day
    max_nodes: int = 10_000


class NodeView(msgspec.Struct, frozen=True):
    status: NodeStatus
    age_ms: int
    missing: bool


class NodeTable:
    """May be used from any thread. `clock_ms` is monotonic."""

    def __init__(self, clock_ms: Callable[[], int], limits: NodeLimits | None = None) -> None:
        self.limits = limits or NodeLimits()
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[NodeStatus, int]] = {}  # by node, the latest heard last
        self._listening_since_ms = clock_ms()

    def record(self, status: NodeStatus) -> None:
        """Raises RaftmetaError too_many_requests when the table is full of living nodes."""
        now = self._clock_ms()
        with self._lock:
            if status.node not in self._heard and len(self._heard) >= self.limits.max_nodes:
                self._forget(now)
                if len(self._heard) >= self.limits.max_nodes:
                    raise RaftmetaError("too_many_requests", f"the table holds its limit of {self.limits.max_nodes} nodes")
            self._heard.pop(status.node, None)
            self._heard[status.node] = (status, now)

    def absorb(self, data: bytes) -> bool:
        """Records a heartbeat that another member passed on; False when it cannot be read or held."""
        try:
            self.record(_decoder.decode(data))
        except (msgspec.MsgspecError, RecursionError, RaftmetaError):
            return False
        return True

    def views(self) -> tuple[NodeView, ...]:
        """All nodes that are not forgotten, by name."""
        now = self._clock_ms()
        with self._lock:
            self._forget(now)
            heard = sorted(self._heard.items())
        return tuple(NodeView(status, now - at, now - at > self.limits.missing_ms) for _, (status, at) in heard)

    def views_of(self, nodes: Iterable[str]) -> dict[str, NodeView]:
        """Those of the nodes that were heard of; costs what is asked for, however many others there are."""
        now = self._clock_ms()
        with self._lock:
            found = {node: self._heard[node] for node in nodes if node in self._heard}
        return {node: NodeView(status, now - at, now - at > self.limits.missing_ms) for node, (status, at) in found.items()}

    def missing(self, expected: Iterable[str], leading_since_ms: int) -> frozenset[str]:
        """Those of the expected nodes that are silent for too long; empty until a new leader has listened for two intervals."""
        now = self._clock_ms()
        listening = now - max(leading_since_ms, self._listening_since_ms)
        if listening < 2 * self.limits.interval_ms:
            return frozenset()
        with self._lock:
            return frozenset(node for node in expected if self._silent_ms(node, now, listening) > self.limits.missing_ms)

    def _silent_ms(self, node: str, now: int, listening: int) -> int:
        found = self._heard.get(node)
        return now - found[1] if found else listening

    def _forget(self, now: int) -> None:
        while self._heard:
            node, (_, at) = next(iter(self._heard.items()))
            if now - at <= self.limits.forget_ms:
                return
            del self._heard[node]


def encode(status: NodeStatus) -> bytes:
    """The heartbeat as gossip between members. Raises RaftmetaError bad_field when it is too large for one message."""
    data = _encoder.encode(status)
    if len(data) > MAX_GOSSIP_BYTES:
        raise RaftmetaError("bad_field", f"the heartbeat of {status.node!r} packs to {len(data)} bytes, the limit is {MAX_GOSSIP_BYTES}")
    return data


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NodeStatus)
