"""A keeper of the host's memory in a thread of the test."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node_agent.device.keeper import Holdings, Keeper
from node_agent.device.keeper_client import KeeperClient
from node_agent.device.memory_maker import MemfdMaker

PAGE = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def keeping(path: Path, limit_bytes: int = 64 * PAGE, user: int | None = None, max_connections: int = 8) -> Iterator[KeeperClient]:
    keeper = Keeper(path, Holdings(MemfdMaker(), limit_bytes), user, max_connections)
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            keeper.serve_ready(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield KeeperClient(path)
    finally:
        ended.set()
        thread.join()
        keeper.close()
