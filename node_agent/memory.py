"""How much memory a process holds beside files and shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAMPLE_S = 0.005  # between looks at a process whose peak is wanted


def private_bytes() -> int:
    """Anonymous resident memory of this process (RssAnon)."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """By how much this process's own memory grew at most, inside the block and until the answer is asked for."""
    before, most, over = private_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(SAMPLE_S):
            most = max(most, private_bytes())

    watching = threading.Thread(target=watch, name="peak", daemon=True)
    watching.start()
    try:
        yield lambda: max(most, private_bytes()) - before
    finally:
        over.set()
        watching.join()
