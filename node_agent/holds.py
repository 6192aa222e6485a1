"""Deployments whose requests the front keeps back for a moment, because a part of their memory is being mended.

Every hold is a lease: it ends by itself when nobody renews it, when the connection of who asked for it ends, and after a bound that no
renewal moves. A control process that died or hangs keeps nobody waiting. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

MAX_LEASE_S: Final = 5.0
MAX_HOLD_S: Final = 60.0  # of one deployment without a break, however often it is renewed


class _Hold(NamedTuple):
    since: float
    until: float


class Holds:
    def __init__(self, clock: Callable[[], float], on_end: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        """`on_end` hears of every hold that ended, once, with how long it was."""
        self._clock = clock
        self._on_end = on_end
        self._holds: dict[str, _Hold] = {}

    def hold(self, name: str, lease_s: float) -> float:
        """Begin or renew. Gives for how long it holds from now on, 0.0 when it has held as long as it may: it then ends by itself."""
        if not 0 < lease_s <= MAX_LEASE_S:
            raise ValueError(f"a lease of {lease_s} s, the limit is {MAX_LEASE_S:g}")
        now = self._clock()
        known = self._holds.get(name)
        since = now if known is None else known.since
        until = min(now + lease_s, since + MAX_HOLD_S)
        if until <= now:
            self.let_go(name)
            return 0.0
        self._holds[name] = _Hold(since, until)
        return until - now

    def is_held(self, name: str) -> bool:
        return self.left_s(name) > 0

    def left_s(self, name: str) -> float:
        """For how long it holds from now on, 0.0 when it does not."""
        hold = self._holds.get(name)
        return 0.0 if hold is None else max(0.0, hold.until - self._clock())

    def let_go(self, name: str) -> None:
        self._end(name, self._clock())

    def let_all_go(self) -> None:
        """Whoever renewed them is gone."""
        for name in tuple(self._holds):
            self.let_go(name)

    def expire(self) -> None:
        """Forget what has ended by itself."""
        now = self._clock()
        for name, hold in tuple(self._holds.items()):
            if now >= hold.until:
                self._end(name, hold.until)

    def _end(self, name: str, at: float) -> None:
        hold = self._holds.pop(name, None)
        if hold is not None:
            self._on_end(name, min(at, hold.until) - hold.since)
