"""Files whose bytes were moved elsewhere leave the page cache behind us: what others read stays in it.

Dropping costs more than reading does (measured: 460 ms for a GiB that took 190 ms to read and check), so a thread of the lowest priority
does it, later. It lives only while there is something to drop: a process that is killed is gone, and its locks with it, once every thread
had the processor a last time, which on a busy machine one of that priority waits for. A file that comes while too many wait is closed as it
is; the kernel then drops its pages when it needs room.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

from node_agent.background import give_way

MAX_WAITING = 256  # open files


class DropBehind:
    """Takes descriptors over and closes them."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __call__(self, fd: int) -> None:
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                os.close(fd)
                return
            self._waiting.append(fd)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="drop-behind", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Until everything taken so far is closed."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        give_way()
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                fd = self._waiting.popleft()
            with suppress(OSError):  # a file system without a page cache to drop from
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
