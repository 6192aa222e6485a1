"""Files whose bytes were moved elsewhere leave the page cache behind us: what others read stays in it.

Dropping costs more than reading does (measured: 460 ms for a GiB that took 190 ms to read and check), so a thread of the lowest priority
does it, later. A file that comes while the queue is full is closed as it is; the kernel then drops its pages when it needs room.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress

MAX_WAITING = 256  # open files


class DropBehind:
    """Takes descriptors over and closes them."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[int] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._run, name="drop-behind", daemon=True).start()

    def __call__(self, fd: int) -> None:
        try:
            self._waiting.put_nowait(fd)
        except queue.Full:
            os.close(fd)

    def _run(self) -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while True:
            fd = self._waiting.get()
            with suppress(OSError):  # a file system without a page cache to drop from
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            self._waiting.task_done()

    def wait(self) -> None:
        """Until everything taken so far is closed."""
        self._waiting.join()
