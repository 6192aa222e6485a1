"""Standard error that nobody has to wait for.

Who has something to say may be the thread that owns the replicated log. A reader of our standard error that hangs would stop that thread;
one that is gone, or a full disk, would raise into it. So what is written goes into a bounded queue, and a thread of its own hands it to the
operating system. What finds no room or cannot be written is dropped and counted, and the next line that comes through says how many are
missing. `install` puts this in the place of `sys.stderr`, so that the whole process speaks this way, tracebacks too.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import select
import sys
import threading
from collections.abc import Callable

MAX_QUEUED_BYTES = 1 << 20  # some thousand lines; as much again may be under way
FINISH_S = 1.0  # for what is queued when the process ends


class QueuedStderr(io.TextIOBase):
    """Any thread may write; `write` neither waits nor raises."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, write: Callable[[int, memoryview], int] = os.write) -> None:
        self._descriptor, self._write = descriptor, write
        self._news = threading.Condition()  # holds a lock that one thread may take twice: a signal or a finalizer may write too
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._finishing = False
        self._lost_lines = 0
        self._told_lines = 0  # of the lost ones
        self._torn = False  # what was written last may lack its end
        self._thread = threading.Thread(target=self._run, name="raftmeta-stderr", daemon=True)
        self._thread.start()

    @property
    def lost_lines(self) -> int:
        """Since the start."""
        return self._lost_lines

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, self.errors)
        with self._news:
            if self._finishing or self._queued_bytes + len(data) > MAX_QUEUED_BYTES:
                self._lose(data)
            else:
                self._queue.append(data)
                self._queued_bytes += len(data)
                self._news.notify()
        return len(text)

    def flush(self) -> None:
        """Nothing: whoever asks may not wait."""

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def finish(self) -> None:
        """The process ends: what is queued gets a bounded time, what comes later is dropped."""
        with self._news:
            self._finishing = True
            self._news.notify()
        self._thread.join(FINISH_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._queue:
                    if self._finishing:
                        return
                    self._news.wait()
                data = b"".join(self._queue)
                self._queue.clear()
                self._queued_bytes = 0
            self._deliver(data)

    def _deliver(self, data: bytes) -> None:
        missing = self._lost_lines - self._told_lines
        if missing:
            notice = json.dumps({"event": "log_lines_lost", "level": "warning", "lines": missing})
            if self._pass_on(b"\n" * self._torn + notice.encode() + b"\n"):
                self._lose(data)
                return
            self._told_lines += missing
        left = self._pass_on(data)
        if left:
            self._lose(left)

    def _pass_on(self, data: bytes) -> bytes:
        """Write it and return what could not be written."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._write(self._descriptor, left) :]
            except BlockingIOError:  # somebody who shares the pipe made it so
                _wait_for_room(self._descriptor)
            except OSError:
                self._torn = self._torn or len(left) < len(data)
                return bytes(left)
        self._torn = False
        return b""

    def _lose(self, data: bytes) -> None:
        with self._news:
            self._lost_lines += data.count(b"\n")


def install() -> QueuedStderr:
    """Take the place of `sys.stderr` until the process ends. One that was started without it says nothing."""
    descriptor = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()
    made = QueuedStderr(descriptor)
    sys.stderr = made
    atexit.register(made.finish)
    return made


def _wait_for_room(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()
