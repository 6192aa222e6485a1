"""The loads that run inside a benchmark member's process, beside the plain one of `commit_member`.

`handover`: open-loop writes while leadership moves. `Churn`: publish and delete at a bounded live set. `fill`: versions with many tensors.
`grow`: journal without state. `trickle`: small writes on a schedule, until a snapshot was made. Each returns what its line of JSON says;
times are of this process's clock.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from api.bridge import Bridge
from benchmarks.harness import percentile
from benchmarks.manifests import items, publication
from raftmeta.core.commands import Body, DeleteVersion, PublishBatch
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Outcome
from raftmeta.member import Member

TIMEOUT_S = 10.0
WARM_UP_S = 0.2  # of a load, which begins with the coroutines' first steps
FILL_BATCH_BYTES = 2 << 20  # of the items of one command, which may have 4 MiB
FILL_CLIENTS = 2
GROW_BYTES = 512 << 10  # of one manifest
TRICKLE_BYTES = 4 << 10
SNAPSHOT_S = 180.0  # a trickle does not wait for it longer


class Proposer:
    """Commands under keys of their own; an outcome that is not "ok" ends the benchmark."""

    def __init__(self, member: Member) -> None:
        self._log = member.log
        self._bridge = Bridge(asyncio.get_running_loop())
        self._run = time.time_ns()
        self._count = 0

    async def __call__(self, body: Body) -> Outcome:
        self._count += 1
        key = f"{time.time_ns() // 1_000_000:013d}-{self._run:x}-{self._count:x}"
        outcome = await self._bridge.result(self._log.propose(body, key, "admin", TIMEOUT_S), TIMEOUT_S)
        assert outcome.code == "ok", outcome
        return outcome


async def handover(member: Member, target: str, rate: int, seconds: float) -> dict[str, object]:
    """Writes on a fixed schedule; at half time leadership moves. The gap is between two acknowledgements, from the last one before on."""
    propose = Proposer(member)
    acknowledged: list[float] = []
    latencies: list[float] = []
    failed = 0

    async def write(number: int, due: float) -> None:
        nonlocal failed
        try:
            await propose(publication(f"handover-{began_ns}", number))
        except RaftmetaError:
            failed += 1
        else:
            acknowledged.append(time.perf_counter())
            latencies.append(acknowledged[-1] - due)

    began, began_ns = time.perf_counter(), time.time_ns()
    moved = 0.0
    tasks = []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        if not moved and due - began >= seconds / 2:
            moved = time.perf_counter()
            member.transfer(target)
        tasks.append(asyncio.create_task(write(number, due)))
    await asyncio.gather(*tasks)
    return {
        "leader": member.log.status().leader_id,
        "gap_ms": _longest_gap(acknowledged, moved, began + seconds) * 1000,
        "gap_before_ms": _longest_gap(acknowledged, began + WARM_UP_S, moved) * 1000,
        "slowest_ms": max(latencies) * 1000,
        "failed": failed,
    }


def _longest_gap(acknowledged: list[float], begin: float, end: float) -> float:
    """Seconds without an acknowledgement, `begin` standing for the last one before it."""
    times = [begin, *(at for at in acknowledged if begin < at < end)]
    return max((later - earlier for earlier, later in pairwise(times)), default=end - begin)


class Churn:
    """Every client publishes, and deletes what it published `live` publications ago. Goes on from where the last slice ended."""

    def __init__(self, member: Member, clients: int, live: int, manifest_bytes: int) -> None:
        self._member, self._clients, self._live, self._bytes = member, clients, live, manifest_bytes
        self._published = [0] * clients
        self._deleted = [0] * clients

    async def slice(self, writes: int) -> dict[str, object]:
        propose = Proposer(self._member)
        latencies: list[float] = []
        left = writes

        async def client(name: int) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                began = time.perf_counter()
                await propose(self._next(name))
                latencies.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(client(name) for name in range(self._clients)))
        state = self._member.state
        return {
            "rate": len(latencies) / (time.perf_counter() - began),
            "p50_ms": percentile(latencies, 0.5) * 1000,
            "p99_ms": percentile(latencies, 0.99) * 1000,
            "max_ms": max(latencies) * 1000,
            "outcomes": len(state.outcomes),
            "max_outcomes": state.limits.max_outcomes,
            "versions": len(state.versions),
            "state_bytes": state.size_bytes,
            "snapshot_index": self._member.log.status().snapshot_index,
        }

    def _next(self, name: int) -> Body:
        if self._published[name] - self._deleted[name] >= self._live:
            self._deleted[name] += 1
            return DeleteVersion(f"churn-{name}", f"v{self._deleted[name]}")
        self._published[name] += 1
        return publication(f"churn-{name}", self._published[name], self._bytes)


async def fill(member: Member, prefix: str, versions: int, tensors: int) -> dict[str, object]:
    """Publish that many versions, in batches of FILL_BATCH_BYTES by a few clients."""
    propose = Proposer(member)
    source = items(prefix, versions, tensors, FILL_BATCH_BYTES)

    async def client() -> None:
        for batch in source:
            await propose(PublishBatch(batch))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(FILL_CLIENTS)))
    return {"seconds": time.perf_counter() - began, "versions": len(member.state.versions), "state_bytes": member.state.size_bytes}


async def grow(member: Member, size_bytes: int) -> dict[str, object]:
    """Let the journal grow by that much, and leave the state as it was."""
    propose = Proposer(member)
    model = f"grow-{time.time_ns()}"
    for number in range(max(size_bytes // GROW_BYTES, 1)):
        await propose(publication(model, number, GROW_BYTES))
        await propose(DeleteVersion(model, f"v{number}"))
    return {"journal_bytes": member.log.status().journal_bytes}


async def trickle(member: Member, rate: int, seconds: float, snapshots: int) -> dict[str, object]:
    """Publish and delete in turn, one write every 1/rate s, for `seconds` and until that many snapshots were made, at most SNAPSHOT_S.

    Latencies count from when a write was due, so that a stall shows in everything that it delays.
    """
    propose = Proposer(member)
    model = f"trickle-{time.time_ns()}"
    latencies: list[float] = []
    await propose(publication(model, 0, TRICKLE_BYTES))  # a member that was started a moment ago applies its journal first
    seen = {member.log.status().snapshot_index}
    tasks: list[asyncio.Task[None]] = []

    async def write(body: Body, due: float) -> None:
        await propose(body)
        latencies.append(time.perf_counter() - due)
        seen.add(member.log.status().snapshot_index)

    began = due = time.perf_counter()
    while due - began < seconds or (len(seen) <= snapshots and due - began < SNAPSHOT_S):
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        label, second = divmod(len(tasks) + 2, 2)
        body = DeleteVersion(model, f"v{label}") if second else publication(model, label, TRICKLE_BYTES)
        tasks.append(asyncio.create_task(write(body, due)))
        due = began + len(tasks) / rate
    await asyncio.gather(*tasks)
    return {
        "p50_ms": percentile(latencies, 0.5) * 1000,
        "p99_ms": percentile(latencies, 0.99) * 1000,
        "max_ms": max(latencies) * 1000,
        "seconds": time.perf_counter() - began,
        "snapshots": len(seen) - 1,
    }
