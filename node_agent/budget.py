"""How many bytes a second the background work of a node may move through memory: one budget for staging and for the scrub.

Requests compute from the same memory that staging fills. A share of the memory's speed, a quarter by default, leaves them the rest. Who
spends sleeps until the bytes before its own are paid for, so the work comes in even steps and not in bursts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

DEFAULT_SHARE = 0.25
PROBE_BYTES = 64 << 20  # beyond the caches of most machines; three copies take some 50 ms
PROBE_RUNS = 3


class Budget:
    """May be spent from by any thread."""

    def __init__(
        self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"a budget of {bytes_per_s} bytes a second")
        self.bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._paid_until = clock()
        self._first = 0

    def spend(self, size: int) -> None:
        """Returns once everything spent before is paid for. Time that nobody used is not saved up."""
        with self._lock:
            now = self._clock()
            begin = max(self._paid_until, now)
            self._paid_until = begin + size / self.bytes_per_s
        if begin > now:
            self._sleep(begin - now)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around work that somebody waits for. Work without an end, as the scrub, stands back meanwhile."""
        with self._lock:
            self._first += 1
        try:
            yield
        finally:
            with self._lock:
                self._first -= 1

    @property
    def stands_back(self) -> bool:
        return self._first > 0


def memory_speed() -> float:
    """Bytes a second that one thread copies from memory to memory here, the best of a few runs."""
    source = np.ones(PROBE_BYTES, np.uint8)
    target = np.zeros(PROBE_BYTES, np.uint8)
    best = 0.0
    for _ in range(PROBE_RUNS):
        begin = time.thread_time()  # other processes may have the processor meanwhile
        np.copyto(target, source)
        best = max(best, PROBE_BYTES / max(time.thread_time() - begin, 1e-6))
    return best
