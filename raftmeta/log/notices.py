"""What the transport counts and says: one counter per kind, few log lines of each.

Whoever can reach the port can cause refusals, from as many addresses as they like. So the same line about the same place comes once a
second, and all lines of one event together come no faster than one a second after a burst; the next one tells how many were left out.
Counters are plain integers that other threads may read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import structlog

QUIET_S = 1.0  # the same line about the same place at most once in this time
BURST = 20  # lines of one event at once: more than a cluster has links
REFILL_S = 1.0  # for each further one; 30 MB a day of each event under a flood
MAX_PLACES = 256  # remembered of each event
MAX_DETAIL = 500  # characters; strangers write some of them

_log = structlog.get_logger("raftmeta.transport")


class _Event:
    """What was said of one event. Their number is that of the names in the code."""

    def __init__(self, now: float) -> None:
        self.allowed = float(BURST)
        self.counted_at = now
        self.suppressed = 0  # since the last line
        self.said: OrderedDict[str, float] = OrderedDict()  # by place

    def may_speak(self, place: str | None, now: float) -> bool:
        self.allowed = min(float(BURST), self.allowed + (now - self.counted_at) / REFILL_S)
        self.counted_at = now
        if self.allowed < 1.0 or (place is not None and now - self.said.get(place, float("-inf")) < QUIET_S):
            self.suppressed += 1
            return False
        self.allowed -= 1.0
        if place is not None:
            self.said[place] = now
            self.said.move_to_end(place)
            if len(self.said) > MAX_PLACES:
                self.said.popitem(last=False)
        return True


class Notices:
    def __init__(self, clock: Callable[[], float], member_id: str) -> None:
        self._clock = clock
        self._member_id = member_id
        self._counts: Counter[str] = Counter()
        self._events: dict[str, _Event] = {}

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    def warn(self, event: str, place: str, detail: str) -> None:
        """Count it, and log it unless the same, or too much of the kind, was logged a moment ago."""
        told = self._spoken(event, place)
        if told is not None:
            _log.warning(event, member=self._member_id, remote=place, detail=detail[:MAX_DETAIL], suppressed=told)

    def info(self, event: str, **fields: str | int) -> None:
        told = self._spoken(event, None)
        if told is not None:
            _log.info(event, member=self._member_id, **fields, **({"suppressed": told} if told else {}))

    def _spoken(self, event: str, place: str | None) -> int | None:
        """How many lines were left out before this one; None when it is left out too."""
        self._counts[event] += 1
        now = self._clock()
        heard = self._events.get(event)
        if heard is None:
            heard = self._events[event] = _Event(now)
        if not heard.may_speak(place, now):
            return None
        told, heard.suppressed = heard.suppressed, 0
        return told
