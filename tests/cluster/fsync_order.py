"""`python -m tests.cluster.fsync_order [--writes N]`: was every acknowledged write synced before its reply was sent?

The witness is strace, outside the program: it sees, per process and in order, the write that carries a command's idempotency key into the
journal, the fdatasync of that file that returned after it, and the write that carries the same key back to the client. With one member the
sync must have returned there before the reply left; with three, on the leader and on at least one follower. Requires strace.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.real_cluster import RealCluster

CALLS = "pwrite64,fdatasync,fsync,write,writev,sendto,sendmsg"
_CALL = re.compile(r"^(\w+)\((\d+)(?:</[^>]*>|<[^>]*>)?(.*)$")
_TOOK = re.compile(r"<(\d+\.\d+)>$")


@dataclass
class Trace:
    """What one process did, in order of time: (when it returned, fd) of syncs; (when, fd) of journal writes and replies by key."""

    synced: list[tuple[float, float, int]] = field(default_factory=list)  # (entered, returned, fd)
    journaled: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # key -> (returned, fd)
    replied: dict[str, float] = field(default_factory=dict)  # key -> entered


@dataclass(frozen=True)
class Row:
    key: str
    replied_at: float
    durable_on: tuple[str, ...]  # zones whose sync of this write returned before the reply left
    leader: str


def read_trace(folder: Path, keys: list[str]) -> Trace:
    """The calls of one process and its threads, from the files that `strace -ff` wrote."""
    trace = Trace()
    for file in sorted(folder.iterdir()):
        for line in file.read_text(errors="replace").splitlines():
            match = re.match(r"^(\d+\.\d+) (.*)$", line)
            took = _TOOK.search(line)
            call = _CALL.match(match[2]) if match else None
            if match is None or took is None or call is None:
                continue
            entered = float(match[1])
            returned = entered + float(took[1])
            name, fd, rest = call[1], int(call[2]), call[3]
            if name in ("fdatasync", "fsync"):
                if "= 0 " in rest:
                    trace.synced.append((entered, returned, fd))
                continue
            for key in keys:
                if key not in rest:
                    continue
                if name == "pwrite64":
                    trace.journaled.setdefault(key, []).append((returned, fd))
                elif "HTTP/1.1 2" in rest:
                    trace.replied.setdefault(key, entered)
    trace.synced.sort()
    return trace


def judge(traces: dict[str, Trace], keys: list[str], leader: str) -> list[Row]:
    """For each key the zones where a sync, entered after the journal write, returned before the reply was sent."""
    rows = []
    for key in keys:
        replied = [trace.replied[key] for trace in traces.values() if key in trace.replied]
        assert len(replied) == 1, f"{key}: {len(replied)} replies were seen"
        durable = [
            zone
            for zone, trace in traces.items()
            if any(
                fd == synced_fd and wrote <= entered and returned <= replied[0]
                for wrote, fd in trace.journaled.get(key, [])
                for entered, returned, synced_fd in trace.synced
            )
        ]
        rows.append(Row(key, replied[0], tuple(durable), leader))
    return rows


def measure(directory: Path, zones: tuple[str, ...], writes: int) -> list[Row]:
    """Run a cluster under strace, write one after the other through every member in turn, and judge."""

    def prefix(zone: str) -> list[str]:
        (directory / f"strace-{zone}").mkdir()
        return ["strace", "-ff", "-ttt", "-T", "-s", "65536", "-e", f"trace={CALLS}", "-o", str(directory / f"strace-{zone}" / "t")]

    keys = []
    with RealCluster(directory, zones, prefix, plain_api=True) as cluster:
        cluster.wait_ready()
        leader = cluster.leader()
        for number in range(writes):
            key = f"witness-{number:06d}-{time.time_ns():x}"
            answer = cluster.publish(zones[number % len(zones)], f"v{number}", key)
            assert answer.status_code == 201, answer.text
            keys.append(key)
        assert cluster.leader() == leader, "the leader changed during the run; run it again"
        for server in cluster.servers.values():
            server.terminate(30.0)
    return judge({zone: read_trace(directory / f"strace-{zone}", keys) for zone in zones}, keys, leader)


def violations(rows: list[Row], members: int) -> list[Row]:
    need = members // 2 + 1
    return [row for row in rows if row.leader not in row.durable_on or len(row.durable_on) < need]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.fsync_order", description=__doc__)
    parser.add_argument("--writes", type=int, default=100)
    options = parser.parse_args()
    if shutil.which("strace") is None:
        print("strace is not installed; on Debian: apt-get install strace")
        return 2
    failed = False
    for zones in (("a",), ("a", "b", "c")):
        with tempfile.TemporaryDirectory(prefix="fsync-order-") as folder:
            rows = measure(Path(folder), zones, options.writes)
        bad = violations(rows, len(zones))
        failed = failed or bool(bad)
        on_all = sum(len(row.durable_on) == len(zones) for row in rows)
        print(
            f"{len(zones)} member{'s' if len(zones) > 1 else ''}: {len(rows)} writes, "
            f"{len(rows) - len(bad)} synced on {'the leader and a follower' if len(zones) > 1 else 'the member'} before the reply was sent "
            f"({on_all} on all), {len(bad)} violations"
        )
        for row in bad[:10]:
            print(f"  {row.key}: durable on {', '.join(row.durable_on) or 'nobody'} when the reply left, leader {row.leader}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
