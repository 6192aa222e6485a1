"""Links between the processes of an agent that outlive the processes: each is made again whenever its other end comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from node_agent.ipc import ConnectionLost, Link
from node_agent.messages import Numbered, Push, Reply, Served, WorkerState

RECONNECT_S = 0.05


class Peer:
    """A link to one process of the tree that is made again whenever it breaks."""

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        self._path = path
        self._changed = changed
        self._link: Link | None = None
        self.served: Sequence[Served] = ()

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.connected

    async def call(self, make: Callable[[int], Numbered], timeout_s: float) -> Reply:
        if self._link is None:
            raise ConnectionLost("not connected")
        return await self._link.call(make, timeout_s)

    async def keep_connected(self) -> None:
        """Runs until cancelled."""
        while True:
            lost = asyncio.Event()
            link = Link(self._said, lambda lost=lost: self._gone(lost))  # type: ignore[misc]
            try:
                await link.connect(self._path)
            except OSError:
                await asyncio.sleep(RECONNECT_S)
                continue
            self._link = link
            try:
                await lost.wait()
            finally:
                await link.close()
            self._changed()

    def _gone(self, lost: asyncio.Event) -> None:
        self.served = ()  # at once: who looks before the link is made again must not see what an ended process said
        lost.set()

    def _said(self, push: Push) -> None:
        if isinstance(push, WorkerState):
            self.served = push.served
            self._changed()
