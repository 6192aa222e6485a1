"""`python -m benchmarks churn --writes 2000000`: memory, disk and latency of a member that never rests, while its state stays the same.

One member, a process of its own with its real log, snapshots on: what could grow (state, outcomes by key, events, journal, allocator) is in
every member alike, and three members on one machine would measure its scheduler. 64 clients publish and delete in turn, so that a bounded
number of versions lives; each command adds an outcome, until the window of outcomes is full and each one drops another. Sampled every 5 %,
with the smallest journal that a snapshot may be due at, so that each slice of the whole run has one or two.

The window is 1,000,000 outcomes, as in every cluster; it is part of the replicated state, no setting. `--window N` begins with a snapshot
of an empty state that has another limit, for a quick look. Flat is what the rows compare: the first slice that began with everything full
(the window, the events kept for watches, the journal's tail in memory) with the last. `--quick` makes 100,000 writes, window 20,000.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import commit
from benchmarks.harness import emit, note, row
from benchmarks.process import disk_mb, rss_mb
from raftmeta import codec, config
from raftmeta.cli.init import InitOptions, run
from raftmeta.core.state import State
from raftmeta.core.types import Limits
from raftmeta.durable import OsDisk
from raftmeta.log import configuration as cfg
from raftmeta.log.configuration import MemberSpec, configuration_of
from raftmeta.parts import open_parts

WRITES, QUICK_WRITES, QUICK_WINDOW = 2_000_000, 100_000, 20_000
CLIENTS = 64
LIVE = 100  # versions a client keeps
MANIFEST_BYTES = 1_000
JOURNAL_MB = 32
BUFFERS_FULL_AT = 60_000  # writes: 100,000 events and 32 MiB of the journal's tail are held by then, see raftmeta.config and log.journal
SLICES = 20
DISK_LOOKS = 4  # a slice; the highest counts


@dataclass(frozen=True)
class Sample:
    writes: int  # so far
    rss_mb: float
    disk_mb: float  # the highest of the slice
    rate: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    full: bool  # everything that is bounded was full when the slice began


@contextlib.contextmanager
def member(window: int) -> Iterator[tuple[commit.Process, Path]]:
    """A single member and its data directory."""
    with tempfile.TemporaryDirectory(prefix="raftmeta-") as folder, contextlib.ExitStack() as stack:
        made = run(Path(folder) / "cluster", ["a"], InitOptions(base_port=0))
        file = made.servers[0]
        file.write_text(file.read_text() + f"\n[limits]\nsnapshot_journal_bytes = {JOURNAL_MB << 20}\n")
        settings = config.load(file)
        if window:
            begin_with_window(file, settings, window)
        process = commit.Process(file)
        stack.callback(process.end)
        commit.wait_leader(process)
        yield process, settings.data_dir


def begin_with_window(file: Path, settings: config.ServerConfig, window: int) -> None:
    """Let the member found its cluster, then give it a later snapshot, of an empty state that keeps that many outcomes."""
    process = commit.Process(file)
    try:
        commit.wait_leader(process)
        status = process.ask("status")
    finally:
        process.end()
    index, term = int(str(status["entries"])) + 1, int(str(status["term"]))
    members = configuration_of(tuple(MemberSpec(each.id, each.zone, each.peer_address, each.api_url) for each in settings.members))
    parts = open_parts(settings, OsDisk())
    parts.journal.await_snapshot(index, term)
    parts.store.write(index, term, cfg.encode(members), codec.snapshot_chunks(State.empty(Limits(max_outcomes=window))))
    parts.journal.close()


def measure(process: commit.Process, data: Path, writes: int) -> list[Sample]:
    samples: list[Sample] = []
    snapshots: set[int] = set()
    full = False
    for number in range(1, SLICES + 1):
        parts = []
        disk = 0.0
        for _ in range(DISK_LOOKS):
            parts.append(process.ask(f"churn {CLIENTS} {LIVE} {MANIFEST_BYTES} {writes // SLICES // DISK_LOOKS}"))
            disk = max(disk, disk_mb(data))
        last = parts[-1]
        sample = Sample(
            writes=number * (writes // SLICES),
            rss_mb=rss_mb(process.pid),
            disk_mb=disk,
            rate=statistics.median(_number(part, "rate") for part in parts),
            p50_ms=statistics.median(_number(part, "p50_ms") for part in parts),
            p99_ms=statistics.median(_number(part, "p99_ms") for part in parts),
            max_ms=max(_number(part, "max_ms") for part in parts),
            full=full,
        )
        snapshots.add(int(_number(last, "snapshot_index")))
        full = _number(last, "outcomes") >= _number(last, "max_outcomes") and sample.writes >= BUFFERS_FULL_AT
        samples.append(sample)
        note(
            f"{sample.writes:>9} writes: rss {sample.rss_mb:.0f} MB, disk {disk:.0f} MB, {sample.rate:.0f}/s, p50 {sample.p50_ms:.1f} ms, "
            f"p99 {sample.p99_ms:.1f} ms, max {sample.max_ms:.0f} ms, {last['outcomes']} outcomes{' (full)' if full else ''}, "
            f"{last['versions']} versions in {last['state_bytes']} bytes, {len(snapshots) - 1} snapshots seen"
        )
    return samples


def report(samples: list[Sample]) -> None:
    after = [sample for sample in samples if sample.full]
    if len(after) < 2:
        note("not everything filled: more --writes or a smaller --window; all slices are compared instead")
        after = samples
    first, last = after[0], after[-1]
    began = f"slice that ends at write {first.writes}"
    emit(row("churn", f"rss at write {last.writes}", "MB", last.rss_mb, (began, first.rss_mb)))
    emit(row("churn", f"commit p50 at write {last.writes}", "ms", last.p50_ms, (began, first.p50_ms)))
    emit(row("churn", f"commit p99 at write {last.writes}", "ms", last.p99_ms, (began, first.p99_ms)))
    half = len(after) // 2
    halves = [statistics.median(sample.p99_ms for sample in part) for part in (after[:half], after[half:])]
    emit(row("churn", "commit p99, median of the later half of slices", "ms", halves[1], ("earlier half", halves[0])))
    emit(row("churn", "commit slowest, with the window full", "ms", max(sample.max_ms for sample in after)))
    disk = [max(sample.disk_mb for sample in part) for part in (samples[: len(samples) // 2], samples[len(samples) // 2 :])]
    emit(row("churn", "disk, highest of the later half of slices", "MB", disk[1], ("earlier half", disk[0])))
    emit(row("churn", "rate, median of slices", "1/s", statistics.median(sample.rate for sample in samples)))


def _number(answer: dict[str, object], name: str) -> float:
    return float(str(answer[name]))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks churn", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--writes", type=int, default=0, help=f"{WRITES} when left out")
    parser.add_argument("--window", type=int, default=0, help="outcomes kept; the product's 1,000,000 when left out")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    writes = options.writes or (QUICK_WRITES if options.quick else WRITES)
    window = options.window or (QUICK_WINDOW if options.quick else 0)
    with member(window) as (process, data):
        report(measure(process, data, writes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main([]))
