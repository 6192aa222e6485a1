"""Loading weights that were checked when they entered the store: into a slot, with the vector of what landed there, against peers.

1 GiB of bf16 in 64 tensors; the page cache is warm and the arena populated, unless the case says otherwise. Ours ends when the slot is
verified. Peers run in the same process in turns with it, each with the best of its settings, which a first round finds. Arguments: size in
MiB (1024) and runs (7). Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness import emit, note, row, seconds
from benchmarks.load_peers import Peer, all_peers
from benchmarks.weights import Bench, filled, places
from consistency import vector
from node_agent.device.port import EMPTY_RECORD
from node_agent.memory import peak_growth
from node_agent.pour import Pace
from node_agent.staging import Manner
from raftmeta.core.manifest import Manifest

BENCH = "load"
TENSORS = 64
READ_BYTES = 8 << 20  # of one preadv
GROWTH_LIMIT_MB = 64 * 1.048576
SAFETENSORS, FAST, RUNAI, TENSORIZER = "safetensors load_file + clone", "fastsafetensors", "runai-model-streamer", "tensorizer verify_hash"
BARS = {  # threads -> peer -> least ratio
    1: {"preadv": 0.6, SAFETENSORS: 1.0, FAST: 2.0, RUNAI: 2.0, TENSORIZER: 2.5},
    2: {"preadv": 0.55, SAFETENSORS: 1.5, FAST: 3.0, RUNAI: 3.0, TENSORIZER: 4.0},
}


class Load:
    def __init__(self, bench: Bench, manifest: Manifest) -> None:
        self._bench, self._manifest = bench, manifest
        self.size = sum(tensor.size_bytes for tensor in manifest.tensors)

    def ours(self, threads: int) -> None:
        self._bench.forget(0)
        staged = self._bench.stage(self._manifest, 0, how=Manner(Pace(threads)))
        assert staged.counters.bytes_read == self.size, staged.counters

    def preadv(self, threads: int) -> None:
        """The same bytes into the same memory, and nothing else."""
        parts = [threading.Thread(target=self._read, args=(part, threads)) for part in range(threads)]
        for thread in parts:
            thread.start()
        for thread in parts:
            thread.join()

    def _read(self, part: int, threads: int) -> None:
        self._bench.arena.mark_dirty(0, EMPTY_RECORD)
        memory = self._bench.arena.staging_view(0)
        offset = part * (self.size // TENSORS)
        for tensor in self._manifest.tensors[part::threads]:
            blob = self._bench.store.open(tensor.sha256, tensor.size_bytes)
            for begin in range(0, tensor.size_bytes, READ_BYTES):
                end = min(begin + READ_BYTES, tensor.size_bytes)
                blob.read_into(begin, memory[offset + begin : offset + end])
            blob.close()
            offset += threads * tensor.size_bytes


def best_setting(peer: Peer) -> tuple[str, Callable[[], object]]:
    """The fastest of two tries each."""
    times = {name: min(seconds(work), seconds(work)) for name, work in peer.settings.items()}
    name = min(times, key=lambda setting: times[setting])
    return name, peer.settings[name]


def compare(load: Load, peers: list[tuple[str, str, Callable[[], object]]], threads: int, runs: int) -> bool:
    """Rows of one thread count. Whether every bar holds."""
    torch.set_num_threads(threads)
    samples: dict[str, list[float]] = {name: [] for name in ("ours", "preadv", *(name for name, _, _ in peers))}
    works: dict[str, Callable[[], object]] = {"ours": partial(load.ours, threads), "preadv": partial(load.preadv, threads)}
    works |= {name: work for name, _, work in peers}
    for turn in range(runs):
        for name, work in works.items() if turn % 2 == 0 else reversed(works.items()):
            samples[name].append(load.size / seconds(work) / 1e9)
    settings = {"preadv": f"threads={threads}"} | {name: setting for name, setting, _ in peers}
    ours = statistics.median(samples["ours"])
    held = True
    for name, setting in settings.items():
        value = statistics.median(samples[name])
        emit(row(BENCH, f"warm threads={threads}", "GB/s", ours, (f"{name} {setting}".strip(), value)))
        if ours / value < BARS[threads][name]:
            held = False
            note(f"does not hold: {ours / value:.2f} x {name}, the bar is {BARS[threads][name]} x")
    return held


def main(arguments: list[str]) -> int:
    size_mib = int(arguments[0]) if arguments else 1024
    runs = int(arguments[1]) if len(arguments) > 1 else 7
    vector.backend()
    with places() as (directory, arena_dir):
        bench, manifest = filled(directory, arena_dir, size_mib, TENSORS)
        load = Load(bench, manifest)
        emit(row(BENCH, "first threads=1", "GB/s", load.size / seconds(partial(load.ours, 1)) / 1e9))
        with peak_growth() as growth:
            load.ours(2)
            grown_mb = growth() / 1e6
        emit(row(BENCH, "growth of RssAnon, threads=2", "MB", grown_mb))
        held = grown_mb <= GROWTH_LIMIT_MB
        for threads in BARS:
            torch.set_num_threads(threads)
            peers = []
            for peer in all_peers(directory / "artifact" / "model.safetensors", threads):
                setting, work = best_setting(peer)
                peers.append((peer.name, setting, work))
            held = compare(load, peers, threads, runs) and held
        for threads in BARS:
            bench.drop_cache(manifest)
            emit(row(BENCH, f"cold threads={threads}", "GB/s", load.size / seconds(partial(load.ours, threads)) / 1e9))
        bench.close()
    note("holds: every bar" if held else "a bar is missed")
    return 0 if held else 1
