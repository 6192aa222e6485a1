"""How much memory a process holds beside files and shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SAMPLE_S = 0.005  # between looks at a process whose peak is wanted


def private_bytes(process: int | str = "self") -> int:
    """Anonymous resident memory of a process (RssAnon). Raises OSError when there is none."""
    with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def tree_private_bytes(root: int) -> int:
    """Of a process and of those that its main thread started, together. One that ends meanwhile counts for nothing."""
    total = 0
    for process in (root, *_children(root)):
        with suppress(FileNotFoundError, ProcessLookupError):
            total += private_bytes(process)
    return total


def _children(process: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text("ascii").split()]
    return []


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
