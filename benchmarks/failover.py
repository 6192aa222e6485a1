"""`python -m benchmarks failover`: how long writes pause when the leader is killed or stopped, beside etcd, and when it hands over.

Three members a side, plain HTTP, on this machine; our side and etcd take turns trial by trial, and what was killed is back and has caught
up before the next one. The gap runs from the signal to the first acknowledged new write through a surviving member; both sides have the
same writers (`writers.py`). etcd has its defaults: heartbeat 100 ms, election timeout 1 s, drawn up to 2 s. Ours has its own: heartbeat 100
ms, election timeout drawn from [1.0, 1.5) s, and a closed connection to the leader starts a pre-vote after one heartbeat.

A planned transfer has no peer: 500 writes/s in the leader's process, on a fixed schedule, while it hands leadership over; the gap is the
longest time between two acknowledgements. `--trials N` (40) of each kind, `--quick` makes 3, `--only kill,stop,transfer`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from benchmarks import commit, etcd
from benchmarks.harness import emit, note, percentile, row
from benchmarks.writers import Target, gap_s
from tests.support.real_cluster import RealCluster, manifest

PEER = "etcd 3.4"
TRIALS, QUICK_TRIALS = 40, 3
TRANSFERS, QUICK_TRANSFERS = 20, 4
TRANSFER_RATE = 500
SETTLE_S = 60.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SHOWN = {"kill": "kill -9 of the leader", "stop": "SIGSTOP of the leader"}


class Side(Protocol):
    def settled(self) -> int | None:
        """The leader's number once everybody is up, follows it and has caught up."""

    def target(self, member: int) -> Target: ...
    def signal(self, member: int, number: int) -> None: ...
    def restart(self, member: int) -> None: ...


class Ours:
    def __init__(self, cluster: RealCluster, token: str) -> None:
        self._cluster, self._zones = cluster, list(cluster.servers)
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=2.0, trust_env=False)
        self._token = token
        self._numbers = itertools.count(1)
        self._body = json.dumps({"manifest": manifest("bench")}, separators=(",", ":")).encode()

    def settled(self) -> int | None:
        shown = [self._http.get(f"{url}/v1/cluster?consistency=stale").json() for url in self._cluster.urls.values()]
        agreed = len({(each["leader_id"], each["term"], each["applied_index"]) for each in shown}) == 1
        linked = all(member["role"] in ("leader", "follower") for each in shown for member in each["members"])
        leaders = [number for number, each in enumerate(shown) if each["role"] == "leader"]
        ready = all(self._http.get(f"{url}/readyz").status_code == 200 for url in self._cluster.urls.values())
        return leaders[0] if agreed and linked and ready and len(leaders) == 1 else None

    def target(self, member: int) -> Target:
        place = urlsplit(self._cluster.urls[self._zones[member]])
        return Target(place.hostname or "", place.port or 0, self._request)

    def _request(self) -> bytes:
        head = (
            f"PUT /v1/models/bench/versions/{next(self._numbers)} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {self._token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(self._body)}\r\n\r\n"
        )
        return head.encode() + self._body

    def signal(self, member: int, number: int) -> None:
        process = self._cluster.servers[self._zones[member]].process
        assert process is not None
        os.killpg(process.pid, number)

    def restart(self, member: int) -> None:
        server = self._cluster.servers[self._zones[member]]
        server.kill()  # it is dead; this waits for it
        server.start()


class Etcd:
    def __init__(self, members: list[etcd.Member]) -> None:
        self._members = members
        self._numbers = itertools.count(1)

    def settled(self) -> int | None:
        shown: list[Any] = [etcd.post(f"{member.url}/v3/maintenance/status", {}, None) for member in self._members]
        leaders = {each["leader"] for each in shown}
        same = len({(each["raftTerm"], each["raftAppliedIndex"]) for each in shown}) == 1
        ids = [each["header"]["member_id"] for each in shown]
        (leader,) = leaders if len(leaders) == 1 else ("0",)
        return ids.index(leader) if same and leader in ids else None

    def target(self, member: int) -> Target:
        place = urlsplit(self._members[member].url)
        return Target(place.hostname or "", place.port or 0, self._request)

    def _request(self) -> bytes:
        body = etcd.put_body(f"key-{next(self._numbers):010d}")
        return (
            f"POST /v3/kv/put HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def signal(self, member: int, number: int) -> None:
        self._members[member].signal(number)

    def restart(self, member: int) -> None:
        self._members[member].restart()


@contextlib.contextmanager
def ours() -> Iterator[Side]:
    with tempfile.TemporaryDirectory(prefix="raftmeta-") as folder:
        cluster = RealCluster(Path(folder), plain_api=True)
        for file in sorted(cluster.directory.glob("**/server.toml")):
            commit.make_plain(file)
        with cluster:
            client = tomllib.loads((cluster.directory / "client.toml").read_text())
            yield Ours(cluster, (cluster.directory / client["token_file"]).read_text().strip())


@contextlib.contextmanager
def peer() -> Iterator[Side]:
    with etcd.members(flags=("--heartbeat-interval", "100", "--election-timeout", "1000")) as members:
        yield Etcd(members)


def settle(side: Side) -> int:
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, httpx.HTTPError, KeyError, ValueError):
            leader = side.settled()
            if leader is not None:
                return leader
        time.sleep(0.1)
    raise RuntimeError(f"{type(side).__name__} did not come to rest within {SETTLE_S:g} s")


def trial(side: Side, kind: str) -> float:
    """One gap in seconds. The member is up again afterwards, though not at rest yet."""
    leader = settle(side)
    time.sleep(random.uniform(0.0, 0.5))  # anywhere between two heartbeats
    targets = [side.target(member) for member in range(3) if member != leader]
    gap = gap_s(targets, lambda: side.signal(leader, SIGNALS[kind]))
    if kind == "kill":
        side.restart(leader)
    else:
        side.signal(leader, signal.SIGCONT)
    return gap


def measure(kinds: list[str], trials: int) -> None:
    missing = etcd.available()
    if missing:
        note(missing)
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(ours())]
        if not missing:
            sides.append(stack.enter_context(peer()))
        gaps: dict[str, tuple[list[float], ...]] = {kind: tuple([] for _ in sides) for kind in kinds}
        for turn in range(trials):
            for kind in kinds:
                order = list(range(len(sides)))
                for side in order if turn % 2 == 0 else reversed(order):
                    gaps[kind][side].append(trial(sides[side], kind) * 1000)
            note(f"trial {turn + 1} of {trials}: " + ", ".join(f"{kind} {[round(side[-1]) for side in gaps[kind]]} ms" for kind in kinds))
        for each in sides:
            settle(each)
    shares: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "p90": lambda found: percentile(found, 0.9)}
    for kind in kinds:
        for name, share in shares.items():
            values = [share(found) for found in gaps[kind]]
            beside = (PEER, values[1]) if len(values) > 1 else None
            emit(row("failover", f"{SHOWN[kind]}, write gap {name} of {trials}", "ms", values[0], beside))


def transfers(count: int) -> None:
    """Leadership goes round; every process in turn writes, hands over, and goes on writing as a follower."""
    gaps, before, slowest, failed = [], [], [], 0
    with commit.members(plain=True) as (processes, _):
        ids = [str(process.ask("status")["id"]) for process in processes]
        for turn in range(count):
            target = (turn + 1) % 3
            commit.wait_linked(processes)
            found = processes[turn % 3].ask(f"transfer {ids[target]} {TRANSFER_RATE} 2")
            if found["leader"] != ids[target]:
                raise RuntimeError(f"{ids[turn % 3]} did not hand over to {ids[target]}: {found}")
            gaps.append(float(str(found["gap_ms"])))
            before.append(float(str(found["gap_before_ms"])))
            note(f"{ids[turn % 3]} to {ids[target]}: gap {gaps[-1]:.0f} ms, {before[-1]:.0f} ms in the second before")
            slowest.append(float(str(found["slowest_ms"])))
            failed += int(str(found["failed"]))
    case = f"planned transfer at {TRANSFER_RATE} writes/s"
    emit(row("failover", f"{case}, write gap median of {count}", "ms", statistics.median(gaps)))
    emit(row("failover", f"{case}, write gap p99 of {count}", "ms", percentile(gaps, 0.99)))
    emit(row("failover", f"{case}, longest pause in the second before p99 of {count}", "ms", percentile(before, 0.99)))
    emit(row("failover", f"{case}, slowest write p99 of {count}", "ms", percentile(slowest, 0.99)))
    note(f"{failed} writes during {count} transfers ended without an outcome")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks failover", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=0, help=f"of each kind, {TRIALS} when left out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="kill,stop,transfer")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    kinds = [kind for kind in SIGNALS if kind in wanted]
    if kinds:
        measure(kinds, options.trials or (QUICK_TRIALS if options.quick else TRIALS))
    if "transfer" in wanted:
        transfers(QUICK_TRANSFERS if options.quick else TRANSFERS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main([]))
