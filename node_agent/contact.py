"""Whether the control plane is there: a node says what it holds as often as members want to hear it, and asks them for a quorum.

It is there while it answers linearizable reads. Whoever answers for another cluster, or from before what this node obeyed, is not believed:
its list may be empty, and must not take away what serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from node_agent.desired import Count, read
from node_agent.journal import Journal
from node_agent.plan import NO_ORDER, Order
from node_agent.runtime import log
from raftmeta.core.errors import RaftmetaError

PROBE_S = 5.0  # between linearizable reads that prove a quorum is in reach
PROBE_TIMEOUT_S = 5.0
FIRST_HEARTBEAT_S = 1.0  # until a member says how often it wants one


class Revised(Protocol):
    """A reply: a JSON object and where it belongs."""

    @property
    def revision(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def __getitem__(self, key: str, /) -> Any: ...


class Members(Protocol):
    async def cluster(self) -> Revised:
        """A linearizable read; its revision is where a watch begins."""

    async def heartbeat(self, node: str, status: Mapping[str, Any]) -> Mapping[str, Any]: ...


class ClusterView(msgspec.Struct, frozen=True):
    """What this node takes from an answer about the cluster."""

    cluster_id: str


class HeartbeatView(msgspec.Struct, frozen=True):
    interval_ms: Count


class Contact:
    def __init__(self, node: str, members: Members, journal: Journal) -> None:
        self._node = node
        self._members = members
        self._journal = journal
        self._heard_at = time.monotonic()
        self.reachable = False
        self._why_lost = ""

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def look(self) -> dict[str, Any]:
        """For the status of the node."""
        return {"reachable": self.reachable, "reason": self._why_lost, "silent_s": round(self.silent_s, 3)}

    async def beat(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Until cancelled: heartbeats with what `status` gives each time."""
        interval_s = FIRST_HEARTBEAT_S
        while True:
            said = status()
            with suppress(RaftmetaError):  # `probe` says whether the control plane is there
                reply = read(await self._members.heartbeat(self._node, said), HeartbeatView)
                interval_s = min(60.0, max(0.1, reply.interval_ms / 1000))
            await asyncio.sleep(interval_s)

    async def probe(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    where = await self._members.cluster()
                self.refuse_strangers(where)
                self.heard(where.generation)
            except RaftmetaError as error:
                self.lost(error)
            except TimeoutError:
                self.lost(RaftmetaError("no_quorum", f"no linearizable read within {PROBE_TIMEOUT_S:g} s"))
            await asyncio.sleep(PROBE_S)

    def refuse_strangers(self, where: Revised) -> None:
        """Raises RaftmetaError integrity."""
        journal = self._journal
        cluster_id, known = read(where, ClusterView).cluster_id, journal.record.cluster_id
        if known and cluster_id != known:
            raise RaftmetaError("integrity", f"the members are of cluster {cluster_id!r}, this node listens to {known!r}")
        obeyed = max((record.fence for record in journal.record.deployments.values()), default=NO_ORDER)
        if Order(where.generation, where.revision) < obeyed:
            found = (where.generation, where.revision)
            raise RaftmetaError("integrity", f"the members are at {found}, this node obeyed an order of {tuple(obeyed)}")
        if not known:
            journal.join(cluster_id)

    def heard(self, generation: int) -> None:
        self._heard_at = time.monotonic()
        if not self.reachable:
            log.info("control_plane_reachable", generation=generation)
        self.reachable, self._why_lost = True, ""

    def lost(self, error: RaftmetaError) -> None:
        if self.reachable or not self._why_lost:
            log.warning("control_plane_unreachable", reason=str(error), note="what serves goes on")
        self.reachable, self._why_lost = False, str(error)
