"""The weight-consistency vector against SHA-256, BLAKE3, XXH3 and a memory copy, all in the same rounds, on one thread and on two.

The buffer is random and far larger than a second-level cache, so that all read memory. One thread is measured in processor time of this
process, which leaves out when others had the processor; two threads by the clock on the wall. A row is a backend against one peer; the
notes say whether the compiled backend reached its bars on one thread. Arguments: size in MiB (256) and rounds (7).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import blake3
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from benchmarks.harness import emit, interleaved, note, row, seconds
from consistency import vector
from consistency.vector_threads import threaded

BENCH = "vector"
BARS = {"sha256": 4.0, "memcpy": 0.6, "blake3": 1.2}  # of numba on one thread: at least so many times the peer
Data = NDArray[np.uint8]
Work = Callable[[], object]


def main(arguments: list[str]) -> int:
    size_mib = int(arguments[0]) if arguments else 256
    rounds = int(arguments[1]) if len(arguments) > 1 else 7
    torch.set_num_threads(1)
    data = np.random.default_rng(1).integers(0, 256, size_mib << 20, dtype=np.uint8)
    for threads in (1, 2):
        clock = time.process_time if threads == 1 else time.perf_counter
        with _ours(data, threads) as ours, _peers(data, threads) as peers:
            rates = interleaved({name: partial(_rate, data, work, clock) for name, work in {**ours, **peers}.items()}, rounds)
        for name in ours:
            for peer in peers:
                case = f"{name} {threads} thread{'s' * (threads > 1)} {size_mib} MiB"
                emit(row(BENCH, case, "GB/s", rates[name], (peer, rates[peer])))
        if threads == 1:
            _judge(rates)
    return 0


def _rate(data: Data, work: Work, clock: Callable[[], float]) -> float:
    begin = clock()
    work()
    return data.size / (clock() - begin) / 1e9


@contextmanager
def _ours(data: Data, threads: int) -> Iterator[dict[str, Work]]:
    """Every backend that computes in memory of the host; several threads are for the compiled one."""
    if threads > 1:
        with threaded(threads, vector.backend("numba")) as shared:
            yield {"numba": partial(vector.block_checks, data, shared)}
        return
    for name in vector.BACKENDS:
        note(f"{name}: compiled and checked after {seconds(partial(vector.backend, name)):.2f} s")
    yield {name: partial(vector.block_checks, data, vector.backend(name)) for name in vector.BACKENDS}


@contextmanager
def _peers(data: Data, threads: int) -> Iterator[dict[str, Work]]:
    """What can use several threads does; SHA-256 and XXH3 of one stream cannot."""
    copy = np.zeros_like(data)
    parts = list(zip(np.array_split(copy, threads), np.array_split(data, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        yield {
            "sha256": lambda: hashlib.sha256(data.data).digest(),
            "blake3": lambda: blake3.blake3(data.data, max_threads=threads).digest(),
            "xxh3": lambda: xxhash.xxh3_128_digest(data.data),
            "memcpy": partial(np.copyto, copy, data) if threads == 1 else lambda: list(pool.map(lambda part: np.copyto(*part), parts)),
        }


def _judge(rates: dict[str, float]) -> None:
    for peer, least in BARS.items():
        ratio = rates["numba"] / rates[peer]
        note(f"numba, one thread: {ratio:.2f} x {peer}, asked for {least} x: {'reached' if ratio >= least else 'MISSED'}")
