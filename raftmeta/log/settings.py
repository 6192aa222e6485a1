"""What a transport is told: limits and times, and the ports through which it meets clock, chance, names and roles."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from raftmeta.log.dialer import Resolve, resolve
from raftmeta.log.messages import AnyMessage


class TransportSettings(msgspec.Struct, frozen=True):
    """Times in seconds. `incarnation` is the process's random number; another one tells the peers that this member restarted."""

    cluster_id: str
    member_id: str
    listen: str  # host:port; port 0 takes a free one
    feature: int = 1  # highest feature level this build can run
    incarnation: int = msgspec.field(default_factory=lambda: secrets.randbelow((1 << 64) - 1) + 1)
    queue_bytes: int = 32 << 20  # waiting to be sent to one peer; must hold one message of MAX_FRAME_BYTES
    pending_connections: int = 64  # accepted, without a valid hello yet
    handshake_s: float = 5.0  # from accept to a valid hello
    connect_s: float = 1.0  # TCP connect of a dial; short, so that a healed path is tried again soon
    keepalive_s: float = 0.3  # silence before a keepalive is sent
    idle_s: float = 1.5  # silence of the peer that ends a link; about the election timeout
    stall_s: float = 10.0  # a peer that takes nothing of what is queued for so long is dropped


def _allow_all(peer: str, message_type: type[AnyMessage]) -> bool:
    return True


@dataclass(frozen=True)
class TransportPorts:
    """What the transport needs of the world beside sockets."""

    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)
    resolve: Resolve = resolve
    allowed: Callable[[str, type[AnyMessage]], bool] = _allow_all  # by role of the peer; refused messages are dropped and counted
