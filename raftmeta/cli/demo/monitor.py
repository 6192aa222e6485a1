"""Keeps the picture of the zones up to date while the story goes on. Looks only; a member that does not answer is shown as such.

Each member is asked for its own view (a stale read), which costs it less than a millisecond; once a second is enough for people.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from raftmeta.cli.demo.load import Load
from raftmeta.cli.demo.measure import percentile
from raftmeta.cli.demo.screen import Picture, ZoneRow
from raftmeta.client import STALE, Client
from raftmeta.core.errors import RaftmetaError

if TYPE_CHECKING:
    from raftmeta.cli.demo.fleet import Fleet

EVERY_S = 1.0
ANSWER_S = 0.5


class Monitor:
    """An async context: looks for as long as the block lasts."""

    def __init__(self, fleet: Fleet, picture: Picture, loads: Sequence[Load]) -> None:
        from raftmeta.cli.demo.fleet import AGENTS, ZONES

        self._fleet = fleet
        self._loads = loads
        self._rows = {zone: ZoneRow(zone, member=zone) for zone in ZONES}
        for zone, node, side in AGENTS:
            self._rows[zone].node, self._rows[zone].side = node, side
        self._picture = picture
        self._task: asyncio.Task[None] | None = None
        self._clients: dict[str, Client] = {}

    async def __aenter__(self) -> Monitor:
        urls = dict(zip(self._rows, self._fleet.connection().urls, strict=True))
        self._clients = {zone: self._fleet.client([url], timeout_s=ANSWER_S) for zone, url in urls.items()}
        self._picture.zones = list(self._rows.values())
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        for client in self._clients.values():
            await client.close()

    async def _run(self) -> None:
        while True:
            await asyncio.gather(*(self._look(zone) for zone in self._rows))
            self._traffic()
            await asyncio.sleep(EVERY_S)

    async def _look(self, zone: str) -> None:
        row = self._rows[zone]
        if zone not in self._fleet.members:
            row.role = "killed"
            return
        try:
            seen = await self._clients[zone].cluster(STALE)
            row.role, row.revision = str(seen["role"]), seen.revision
            if row.role == "leader":
                for item in (await self._clients[zone].nodes(STALE))["items"]:
                    self._serving(item)
        except RaftmetaError:
            row.role = "unreachable"

    def _serving(self, item: dict[str, object]) -> None:
        for row in self._rows.values():
            deployments = item.get("deployments")
            if row.node == item.get("node") and isinstance(deployments, dict):
                row.serves = ", ".join(str(value.get("version", "")) for value in deployments.values())

    def _traffic(self) -> None:
        now = time.monotonic()
        for load in self._loads:
            recent = [sample for sample in load.recent if now - sample.scheduled_s < 5.0]
            for row in self._rows.values():
                if row.side == load.target.side:
                    answered = [sample for sample in recent if sample.outcome == "ok"]
                    row.rate = len(answered) / 5.0
                    row.p99_ms = percentile([sample.latency_s * 1e3 for sample in answered], 0.99)
                    row.lost = sum(sample.outcome != "ok" for sample in load.samples)
