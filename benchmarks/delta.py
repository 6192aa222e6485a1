"""Staging what differs: against what the slot holds already, and against what the active slot holds, beside staging everything.

1 GiB of bf16 in 100 tensors. Peer of every case is the whole version into an empty slot, with as many threads, in turns. Arguments: size in
MiB (1000) and runs (7). Exit status 1 when a bar is missed: 15 % of time and bytes for a tenth changed, no byte for nothing changed.
"""

from __future__ import annotations

import statistics

from benchmarks.harness import emit, note, row, seconds
from benchmarks.weights import Bench, change, fill, make, places, slot_bytes, write
from consistency import vector
from node_agent.pour import Pace
from node_agent.staging import Manner, Staged
from raftmeta.core.manifest import Manifest

BENCH = "delta"
TENSORS = 100
BAR = 0.15
THREADS = (1, 2)


def main(arguments: list[str]) -> int:
    size_mib = int(arguments[0]) if arguments else 1000
    runs = int(arguments[1]) if len(arguments) > 1 else 7
    vector.backend()
    with places() as (directory, arena_dir):
        weights = make(TENSORS, (size_mib * (1 << 20) // TENSORS // 2 // 4096, 4096))
        versions: list[Manifest] = []
        bench = None
        for number in (0, 1):
            weights = weights if number == 0 else change(weights, 0.1, seed=7)
            versions.append(write(directory / f"v{number}", weights))
            bench = bench or Bench(directory, arena_dir, slot_bytes(versions[0]))
            fill(bench.store, weights)
        assert bench is not None
        del weights
        compared = [_compare(bench, versions, threads, runs) for threads in THREADS]  # all of them, whatever the first says
        held = all(compared)
        bench.close()
    note("holds: every bar" if held else "a bar is missed")
    return 0 if held else 1


def _compare(bench: Bench, versions: list[Manifest], threads: int, runs: int) -> bool:
    """Rows of one thread count. Whether every bar holds."""
    pace = Pace(threads)
    size = sum(tensor.size_bytes for tensor in versions[0].tensors)
    times: dict[str, list[float]] = {"whole": [], "10 % changed, rest kept": [], "10 % changed, rest from active": [], "unchanged": []}
    moved: dict[str, int] = {}

    def timed(case: str, manifest: Manifest, slot: int, active: int | None, how: Manner) -> Staged:
        result: list[Staged] = []
        times[case].append(seconds(lambda: result.append(bench.stage(manifest, slot, active, how))))
        counters = result[0].counters
        moved[case] = counters.bytes_read + counters.bytes_from_active
        return result[0]

    for turn in range(2 * runs):
        now = versions[turn % 2]
        bench.forget(0)
        before = timed("whole", versions[1 - turn % 2], 0, None, Manner(pace))
        staged = timed("10 % changed, rest kept", now, 0, None, Manner(pace, before.vectors))
        timed("unchanged", now, 0, None, Manner(pace, staged.vectors))
        bench.forget(1)
        timed("10 % changed, rest from active", versions[1 - turn % 2], 1, 0, Manner(pace))
    whole = statistics.median(times["whole"])
    held = True
    for case in list(times)[1:]:
        value = statistics.median(times[case])
        emit(row(BENCH, f"{case}, threads={threads}", "ms", value * 1000, ("whole version", whole * 1000)))
        emit(row(BENCH, f"{case}: bytes moved, threads={threads}", "bytes", moved[case], ("whole version", size)))
        if case == "10 % changed, rest kept":
            held = held and value <= BAR * whole and moved[case] <= BAR * size
        if case == "unchanged":
            held = held and not moved[case]
    return held
