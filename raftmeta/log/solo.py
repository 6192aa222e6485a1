"""The network of a single member: nobody to talk to, but other threads can wake it."""

from __future__ import annotations

import os
import select
import threading

from raftmeta.log.messages import AnyMessage
from raftmeta.log.peers import PeerEvent


class SoloNetwork:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._closing = threading.Lock()  # once closed, the number may be another file's
        self._closed = False

    def start(self) -> None:
        """Nothing to bind."""

    def poll(self, timeout_s: float) -> list[PeerEvent]:
        if self._poll.poll(timeout_s * 1000):  # not select, which takes no number above 1023
            os.eventfd_read(self._fd)
        return []

    def send(self, peer: str, message: AnyMessage) -> bool:
        return False

    def flush(self) -> None:
        """Nothing is queued."""

    def wake(self) -> None:
        """From any thread, also after `close`."""
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """May be called twice."""
        with self._closing:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
