"""What the journal's syncs take: the last one, for the metrics, and a word about the disk when they are slow.

A slow disk keeps commands waiting and, beyond an election timeout, moves leadership; whoever looks for the reason must find the disk named.
It is no alarm: the member is as good as its disk, and taking traffic from it would help nobody. Belongs to the replica's thread.
"""

from __future__ import annotations

from typing import Protocol

SLOW_S = 0.1  # a heartbeat: a leader whose sync takes longer is late with its next sign of life
SAY_S = 60.0  # between two words about it


class Owner(Protocol):
    """Who tells the member."""

    def slow_disk(self, count: int, longest_s: float) -> None: ...


class Syncs:
    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.last_s = 0.0  # of the last one that had something to do
        self._count, self._longest_s = 0, 0.0  # of the slow ones since the last word
        self._say_at = float("-inf")

    def took(self, seconds: float, now: float) -> None:
        """A sync is over; 0 when there was nothing to do."""
        if seconds <= 0.0:
            return
        self.last_s = seconds
        if seconds < SLOW_S:
            return
        self._count, self._longest_s = self._count + 1, max(self._longest_s, seconds)
        if now >= self._say_at:
            self._say_at = now + SAY_S
            self._owner.slow_disk(self._count, self._longest_s)
            self._count, self._longest_s = 0, 0.0
