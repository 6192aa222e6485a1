"""Async HTTP SDK: the CLI, the agent and the checker speak to members through it, and through nothing else.

    async with Client(["http://127.0.0.1:7400"]) as client:
        reply = await client.get_deployment("search")

See `client` for the calls, `transport` for retries and fail-over, `watch` for the event stream, `config` for connection settings.
"""

from raftmeta.client.client import Client, all_items
from raftmeta.client.transport import Options
from raftmeta.client.values import FIRST_PAGE, LINEARIZABLE, STALE, Bookmark, Change, ChangeEvent, Page, Read, Reply, idempotency_key
from raftmeta.client.watch import WatchOptions
from raftmeta.core.errors import RaftmetaError

__all__ = [
    "FIRST_PAGE",
    "LINEARIZABLE",
    "STALE",
    "Bookmark",
    "Change",
    "ChangeEvent",
    "Client",
    "Options",
    "Page",
    "RaftmetaError",
    "Read",
    "Reply",
    "WatchOptions",
    "all_items",
    "idempotency_key",
]
