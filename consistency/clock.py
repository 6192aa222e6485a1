"""The clock that says how old an answer is."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Seconds that never go back, the time that this machine slept among them where the system counts it: answers age meanwhile."""
    return time.clock_gettime(_CLOCK)
