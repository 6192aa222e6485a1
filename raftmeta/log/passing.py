"""An alarm that nobody takes back: it is over once its cause has not come again for a while. Belongs to the replica's thread."""

from __future__ import annotations

from typing import Protocol

QUIET_S = 60.0


class Owner(Protocol):
    """Who tells the member."""

    def alarm(self, code: str, detail: str) -> None: ...
    def alarm_over(self, code: str) -> None: ...


class PassingAlarm:
    def __init__(self, code: str, owner: Owner) -> None:
        self._code, self._owner = code, owner
        self._over_at: float | None = None  # None: it does not stand

    def sound(self, detail: str, now: float) -> None:
        self._over_at = now + QUIET_S
        self._owner.alarm(self._code, detail)

    def step(self, now: float) -> None:
        if self._over_at is not None and now >= self._over_at:
            self._over_at = None
            self._owner.alarm_over(self._code)
