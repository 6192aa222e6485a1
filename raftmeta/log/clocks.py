"""Members tell each other their wall clocks: on connecting, and every CLOCK_S. What comes of it is stamping.py's business."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from raftmeta.log.messages import Gossip
from raftmeta.log.stamping import Stamping

TOPIC = "clock"  # gossip among replicas: Unix milliseconds in decimal
CLOCK_S = 10.0  # between two tellings of one's clock
MAX_DIGITS = 14  # until the year 5138


class Owner(Protocol):
    """The replica, as far as clocks need it."""

    @property
    def linked(self) -> Collection[str]: ...
    def send(self, peer: str, message: Gossip) -> None: ...


class Clocks:
    def __init__(self, owner: Owner, stamping: Stamping, wall_ms: Callable[[], int]) -> None:
        self._owner, self._stamping, self._wall_ms = owner, stamping, wall_ms
        self._due_at = 0.0

    def connected(self, peer: str) -> None:
        self._owner.send(peer, Gossip(TOPIC, b"%d" % self._wall_ms()))

    def step(self, now: float) -> None:
        if now >= self._due_at:
            self._due_at = now + CLOCK_S
            for peer in sorted(self._owner.linked):
                self.connected(peer)

    def heard(self, peer: str, data: bytes, members: Collection[str]) -> None:
        """Of members only, and only what is a time."""
        if data.isdigit() and len(data) <= MAX_DIGITS and peer in members:
            self._stamping.heard(peer, int(data))
