"""A client that writes without pause, to see how long a killed leader is felt and that nothing acknowledged is lost.

Each write publishes a tiny version of a model of its own, one after the other; an acknowledgement is the reply of a quorum's decision. The
client retries under one key, so a write whose answer was lost is not written twice. Afterwards every acknowledged version must be there,
with its checksum.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from raftmeta.client import Client, Page, all_items
from raftmeta.core.errors import RaftmetaError

MODEL = "demo-ledger"
PAUSE_S = 0.02  # between a reply and the next write; the gap is measured to within this
MAX_WRITES = 20_000
PAGE = 500

_EMPTY_ROOT = hashlib.sha256(b"raftmeta-wcv-1 root\0" + (0).to_bytes(8, "little")).hexdigest()  # the vector of no tensors


class Write(NamedTuple):
    label: str
    checksum: str
    acknowledged_s: float  # monotonic


class Writer:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._stop = False
        self.writes: list[Write] = []
        self.refused: list[RaftmetaError] = []

    async def run(self) -> None:
        """Write until `stop`. A write that ends without an answer is not acknowledged and is left out."""
        for number in range(MAX_WRITES):
            if self._stop:
                return
            label = f"w{number:06d}"
            try:
                reply = await self._client.publish(MODEL, label, note(label))
            except RaftmetaError as error:
                self.refused.append(error)
                if len(self.refused) >= 10:
                    return
                continue
            self.writes.append(Write(label, str(reply["checksum"]), time.monotonic()))
            await asyncio.sleep(PAUSE_S)

    def stop(self) -> None:
        self._stop = True

    async def wait_for_more(self, count: int, timeout_s: float) -> bool:
        """Whether `count` further writes are acknowledged in time."""
        goal = len(self.writes) + count
        deadline = time.monotonic() + timeout_s
        while len(self.writes) < goal and time.monotonic() < deadline:
            await asyncio.sleep(PAUSE_S)
        return len(self.writes) >= goal

    async def missing(self) -> list[str]:
        """Labels that were acknowledged and are not there, or hold something else."""
        found: dict[str, str] = {}
        async for item in all_items(lambda page: self._client.list_versions(MODEL, Page(PAGE, page.after))):
            found[item["label"]] = item["checksum"]
        return [write.label for write in self.writes if found.get(write.label) != write.checksum]


def note(label: str) -> Mapping[str, Any]:
    """A sound manifest of one small file and no tensors."""
    content = f"entry {label}\n".encode()
    file = {"name": "note.txt", "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "role": "other"}
    return {
        "format": "raftmeta-manifest-1",
        "engine": "none",
        "files": [file],
        "tensors": [],
        "unbound": [],
        "vector_root": _EMPTY_ROOT,
        "sources": [],
    }
