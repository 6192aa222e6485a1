"""One member process of the `commit` benchmark: the log, TLS, fsync and apply of a real member, without the HTTP server.

Reads commands from standard input, one a line, answers each with one line of JSON: `status`, `load CLIENTS SECONDS`, `stop`. A load runs
CLIENTS coroutines in this process, each publishing versions one after the other. `transfer`, `churn`, `fill`, `grow` and `trickle` are the
loads of member_loads.py, with their parameters in order.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from pathlib import Path

import structlog
import uvloop

from api.bridge import Bridge
from benchmarks import member_loads
from benchmarks.harness import percentile
from raftmeta import collector, config
from raftmeta.core.commands import Command as Envelope
from raftmeta.core.commands import Publish, encode
from raftmeta.core.types import VersionSummary
from raftmeta.member import Member

TIMEOUT_S = 10.0

MANIFEST = hashlib.sha512(b"benchmark").digest() * 2  # opaque to apply, which checks its digest
_DIGEST = hashlib.sha256(b"benchmark").hexdigest()
SUMMARY = VersionSummary(_DIGEST, _DIGEST, _DIGEST, _DIGEST, hashlib.sha256(MANIFEST).hexdigest(), 1 << 20, 1 << 20, 4, 100)


def publication(model: str, number: int) -> Publish:
    return Publish(model, f"v{number}", SUMMARY, MANIFEST)


async def load(member: Member, clients: int, seconds: float, run: int) -> dict[str, float]:
    bridge = Bridge(asyncio.get_running_loop())
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    async def client(name: int) -> None:
        count = 0
        while True:
            began = time.perf_counter()
            if began >= until:
                return
            count += 1
            key = f"{time.time_ns() // 1_000_000:013d}-{run:x}-{name:x}-{count:x}"
            future = member.log.propose(publication(f"model-{run}-{name}", count), key, "anonymous", TIMEOUT_S)
            outcome = await bridge.result(future, TIMEOUT_S)
            assert outcome.code == "ok", outcome
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client(name) for name in range(clients)))
    took = time.perf_counter() - began
    return {
        "rate": len(latencies) / took,
        "p50_ms": percentile(latencies, 0.5) * 1000,
        "p99_ms": percentile(latencies, 0.99) * 1000,
        "command_bytes": len(encode(Envelope(1, "k" * 24, "anonymous", "m", 1_700_000_000_000, publication("model-1-1", 1)))),
    }


def status(member: Member) -> dict[str, object]:
    found = member.log.status()
    return {
        "id": found.member_id,
        "role": found.role,
        "leader": found.leader_id,
        "term": found.term,
        "applied": found.applied_revision,
        "entries": found.last_index,
        "snapshot": found.snapshot_index,
        "linked": all(each.role in ("leader", "follower") for each in found.members),
        "hash": member.state.state_hash.hex(),
        "fault": found.fault,
    }


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    member = Member.open(config.load(Path(sys.argv[1])))
    member.start()
    collector.settle()
    run = 0
    churn: member_loads.Churn | None = None
    for line in sys.stdin:
        answer: dict[str, object]
        match line.split():
            case ["status"]:
                answer = status(member)
            case ["load", clients, seconds]:
                run += 1
                answer = {**uvloop.run(load(member, int(clients), float(seconds), run))}
            case ["transfer", target, rate, seconds]:
                answer = uvloop.run(member_loads.handover(member, target, int(rate), float(seconds)))
            case ["churn", clients, live, size, writes]:
                churn = churn or member_loads.Churn(member, int(clients), int(live), int(size))
                answer = uvloop.run(churn.slice(int(writes)))
            case ["fill", prefix, versions, tensors]:
                answer = uvloop.run(member_loads.fill(member, prefix, int(versions), int(tensors)))
            case ["grow", size]:
                answer = uvloop.run(member_loads.grow(member, int(size)))
            case ["trickle", rate, seconds, wanted]:
                answer = uvloop.run(member_loads.trickle(member, int(rate), float(seconds), int(wanted)))
            case _:
                break
        print(json.dumps(answer), flush=True)
    member.stop()


if __name__ == "__main__":
    main()
