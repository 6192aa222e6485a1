"""The one monotonic clock of the log's thread: the same one that the library behind the wall reads.

PySyncObj reads CLOCK_MONOTONIC_RAW, which runs apart from Python's `time.monotonic` (0.1 s after an hour and a half on one machine).
Deadlines are set by one side and compared by the other, so both must read the same clock: apart, a leader spins until the later of the two
has come. `check_clock` refuses a platform on which they differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from raftmeta.core.errors import RaftmetaError

TOLERANCE_S = 0.05  # two readings in a row on a busy machine


def monotonic() -> float:
    """Seconds since an arbitrary moment; never goes back, not adjusted by time synchronization."""
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


def check_clock(library_clock: Callable[[], float]) -> None:
    """Raises RaftmetaError integrity when the library reads another clock, such as its fall-back to the wall clock."""
    apart = min(abs(library_clock() - monotonic()) for _ in range(5))
    if apart > TOLERANCE_S:
        raise RaftmetaError("integrity", f"pysyncobj reads a clock that is {apart:.3f} s apart from CLOCK_MONOTONIC_RAW on this platform")
