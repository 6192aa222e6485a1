"""`python -m benchmarks scale`: what many versions cost: memory, a snapshot beside commits, a restart.

100,000 versions of 20 tensors, then 1,000 of 1,000, published in batches. First straight into a state by apply, in a process of its own:
bytes a version, a snapshot and its way back. Then through the log of a real member, alone so that nobody else's work stands beside its own:
small writes on a schedule without and with a snapshot under way (the bar: no commit waits longer than 50 ms), and the time from starting
`raftmeta server` on that directory until it is ready (the bar: 5 s), as the load left it and once the snapshot is there. A member without
versions stands beside as the peer of restart and memory. `--quick` makes a twentieth of it, `--case 20` or `--case 1000` one of the two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks import commit
from benchmarks.harness import emit, note, row
from benchmarks.process import disk_mb, rss_mb
from tests.support.real_cluster import RealCluster

CASES = {20: 100_000, 1_000: 1_000}  # versions by tensors of each
QUICK_SHARE = 20
RESTARTS = 3  # of which the median counts
TRICKLE_RATE, TRICKLE_S = 200, 5
JOURNAL_BYTES = 32 << 20  # the smallest that makes a snapshot due
SHORT_OF_IT = 31 << 20
READY_S = 120.0


@dataclass(frozen=True)
class Ready:
    seconds: float  # from starting the process
    rss_mb: float


class Alone:
    """A directory for a member of its own cluster, run as a benchmark member or as a server."""

    def __init__(self, folder: Path) -> None:
        self._cluster = RealCluster(folder, zones=("a",), plain_api=True)
        (self._file,) = sorted(self._cluster.directory.glob("**/server.toml"))
        self.data = self._file.parent / "data"

    def process(self) -> commit.Process:
        process = commit.Process(self._file)
        commit.wait_leader(process)
        return process

    def limit(self, line: str) -> None:
        self._file.write_text(self._file.read_text() + f"\n[limits]\n{line}\n")

    def ready(self) -> Ready:
        """The median of some starts of `raftmeta server`, each ended by SIGKILL once it was ready."""
        found = sorted((self._start() for _ in range(RESTARTS)), key=lambda each: each.seconds)
        return found[len(found) // 2]

    def _start(self) -> Ready:
        server = self._cluster.servers["a"]
        url = self._cluster.urls["a"] + "/readyz"
        began = time.perf_counter()
        server.start()
        try:
            with httpx.Client(timeout=1.0, trust_env=False) as client:
                while time.perf_counter() - began < READY_S:
                    try:
                        if client.get(url).status_code == 200:
                            assert server.process is not None
                            return Ready(time.perf_counter() - began, rss_mb(server.process.pid))
                    except httpx.HTTPError:
                        time.sleep(0.01)
            raise RuntimeError(f"the member was not ready within {READY_S:g} s: {server.text()[-800:]}")
        finally:
            server.kill()


def in_state(case: str, versions: int, tensors: int) -> None:
    command = [sys.executable, "-m", "benchmarks.scale_state", str(versions), str(tensors)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    emit(row("scale", f"{case}: memory of a version in the state", "bytes", found["rss_bytes"], ("its records", found["state_bytes"])))
    emit(row("scale", f"{case}: apply of one version of a batch", "us", found["apply_us"]))
    emit(row("scale", f"{case}: snapshot of the state encoded, alone", "s", found["snapshot_s"]))
    emit(row("scale", f"{case}: state restored from it, alone", "s", found["restore_s"]))
    note(f"{case}: the snapshot has {found['snapshot_bytes'] / 1e6:.0f} MB")


def in_member(case: str, versions: int, tensors: int, empty: Ready) -> None:
    with tempfile.TemporaryDirectory(prefix="raftmeta-") as folder:
        alone = Alone(Path(folder))
        process = alone.process()
        try:
            filled = process.ask(f"fill scale {versions} {tensors}")
            status = process.ask("status")
        finally:
            process.end()
        note(f"{case}: published in {float(str(filled['seconds'])):.0f} s, {disk_mb(alone.data):.0f} MB on disk, {status}")
        left = alone.ready()
        emit(row("scale", f"{case}: restart to ready, as the load left it", "s", left.seconds, ("no versions", empty.seconds)))
        alone.limit(f"snapshot_journal_bytes = {JOURNAL_BYTES}")
        stalls(case, alone)
        ready = alone.ready()
    emit(row("scale", f"{case}: restart to ready, snapshot and journal", "s", ready.seconds, ("no versions", empty.seconds)))
    state_bytes = float(str(filled["state_bytes"])) / versions
    per_version = (left.rss_mb - empty.rss_mb) * 1e6 / versions
    emit(row("scale", f"{case}: memory of a version in a member", "bytes", per_version, ("its records", state_bytes)))
    emit(row("scale", f"{case}: memory of the member", "MB", left.rss_mb, ("no versions", empty.rss_mb)))


def stalls(case: str, alone: Alone) -> None:
    process = alone.process()
    try:
        calm = process.ask(f"trickle {TRICKLE_RATE} {TRICKLE_S} 0")
        process.ask(f"grow {SHORT_OF_IT}")
        busy = process.ask(f"trickle {TRICKLE_RATE} {TRICKLE_S} 1")
    finally:
        process.end()
    if busy["snapshots"] != 1:
        raise RuntimeError(f"{case}: expected one snapshot under the trickle, found {busy['snapshots']}")
    for name in ("p50", "p99", "max"):
        beside = ("without a snapshot", float(str(calm[f"{name}_ms"])))
        emit(row("scale", f"{case}: commit {name} while a snapshot is made", "ms", float(str(busy[f"{name}_ms"])), beside))
    note(f"{case}: the trickle with the snapshot took {float(str(busy['seconds'])):.0f} s")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--case", type=int, choices=tuple(CASES), help="tensors of a version; both when left out")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="raftmeta-") as folder:
        empty = Alone(Path(folder)).ready()
    for tensors in [options.case] if options.case else CASES:
        versions = CASES[tensors] // (QUICK_SHARE if options.quick else 1)
        case = f"{versions} versions of {tensors} tensors"
        in_state(case, versions, tensors)
        in_member(case, versions, tensors, empty)
    return 0


if __name__ == "__main__":
    raise SystemExit(main([]))
