"""Deployments whose requests the front keeps back for a moment, because a part of their memory is being mended.

Every hold is a lease: it ends by itself when nobody renews it, when the connection of who asked for it ends, and after a bound that no
renewal moves. The bound counts from the first lease, gaps included, until the hold is let go: then, or when nobody has asked for it for as
long as the bound is, another one may begin. So a control process that died or hangs keeps nobody waiting. Times are seconds of one
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

MAX_LEASE_S: Final = 5.0
MAX_HOLD_S: Final = 60.0  # of one deployment until it is let go, however often it is renewed


class _Hold(NamedTuple):
    since: float
    until: float


class _Asked(NamedTuple):
    first: float
    last: float


class Holds:
    def __init__(self, clock: Callable[[], float], on_end: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        """`on_end` hears of every hold that ended, once, with how long it was."""
        self._clock = clock
        self._on_end = on_end
        self._holds: dict[str, _Hold] = {}
        self._asked: dict[str, _Asked] = {}  # since they were let go last

    def hold(self, name: str, lease_s: float) -> float:
        """Begin or renew. Gives for how long it holds from now on, 0.0 when it has held as long as it may: it then ends by itself."""
        if not 0 < lease_s <= MAX_LEASE_S:
            raise ValueError(f"a lease of {lease_s} s, the limit is {MAX_LEASE_S:g}")
        now = self._clock()
        self.expire()
        known, asked = self._holds.get(name), self._asked.get(name)
        first = now if asked is None else asked.first
        self._asked[name] = _Asked(first, now)
        until = min(now + lease_s, first + MAX_HOLD_S)
        if until <= now:
            self._end(name, now)
            return 0.0
        self._holds[name] = _Hold(now if known is None else known.since, until)
        return until - now

    @property
    def none(self) -> bool:
        return not self._holds

    def is_held(self, name: str) -> bool:
        return self.left_s(name) > 0

    def left_s(self, name: str) -> float:
        """For how long it holds from now on, 0.0 when it does not."""
        hold = self._holds.get(name)
        return 0.0 if hold is None else max(0.0, hold.until - self._clock())

    def let_go(self, name: str) -> None:
        self._asked.pop(name, None)
        self._end(name, self._clock())

    def let_all_go(self) -> None:
        """Whoever renewed them is gone."""
        for name in tuple(self._asked):
            self.let_go(name)

    def expire(self) -> None:
        """Forget what has ended by itself."""
        now = self._clock()
        for name, hold in tuple(self._holds.items()):
            if now >= hold.until:
                self._end(name, hold.until)
        for name, asked in tuple(self._asked.items()):
            if now - asked.last >= MAX_HOLD_S:
                del self._asked[name]

    def _end(self, name: str, at: float) -> None:
        hold = self._holds.pop(name, None)
        if hold is not None:
            self._on_end(name, min(at, hold.until) - hold.since)
