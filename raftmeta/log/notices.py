"""What the transport counts and says: one counter per kind, one log line per kind and place a second.

Whoever can reach the port can cause refusals; the throttle keeps that from filling the disk with log lines. Counters are plain integers
that other threads may read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import structlog

QUIET_S = 1.0  # the same line about the same place at most once in this time
MAX_KEYS = 256

_log = structlog.get_logger("raftmeta.transport")


class Notices:
    def __init__(self, clock: Callable[[], float], member_id: str) -> None:
        self._clock = clock
        self._member_id = member_id
        self._counts: Counter[str] = Counter()
        self._last: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    def warn(self, event: str, place: str, detail: str) -> None:
        """Count it, and log it unless the same was logged a moment ago; the next line tells how many were left out."""
        self._counts[event] += 1
        key = (event, place)
        now = self._clock()
        said, suppressed = self._last.get(key, (float("-inf"), 0))
        if now - said < QUIET_S:
            self._last[key] = (said, suppressed + 1)
            return
        self._last[key] = (now, 0)
        self._last.move_to_end(key)
        if len(self._last) > MAX_KEYS:
            self._last.popitem(last=False)
        _log.warning(event, member=self._member_id, remote=place, detail=detail, suppressed=suppressed)

    def info(self, event: str, **fields: str | int) -> None:
        self._counts[event] += 1
        _log.info(event, member=self._member_id, **fields)
