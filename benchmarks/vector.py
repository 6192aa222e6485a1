"""The weight-consistency vector against SHA-256 and a memory copy, one thread each, in the same run.

The buffer is random and far larger than a second-level cache, so that all three read memory. Arguments: size in MiB (256) and runs (7).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.harness import emit, note, paired, row, seconds
from consistency import vector

BENCH = "vector"


def main(arguments: list[str]) -> int:
    size_mib = int(arguments[0]) if arguments else 256
    runs = int(arguments[1]) if len(arguments) > 1 else 7
    data = np.random.default_rng(1).integers(0, 256, size_mib << 20, dtype=np.uint8)
    copy = np.zeros_like(data)

    def rate(work: Callable[[], object]) -> Callable[[], float]:
        return lambda: data.size / seconds(work) / 1e9

    peers = {"sha256": rate(lambda: hashlib.sha256(data.data)), "memcpy": rate(lambda: np.copyto(copy, data))}
    for name in vector.BACKENDS:
        ready_s = seconds(partial(vector.backend, name))
        note(f"{name}: compiled and checked after {ready_s:.2f} s")
        ours = rate(partial(vector.block_checks, data, vector.backend(name)))
        for peer, sample in peers.items():
            result = paired(ours, sample, runs)
            emit(row(BENCH, f"{name} 1 thread {size_mib} MiB", "GB/s", result.value, (peer, result.peer_value)))
    return 0
