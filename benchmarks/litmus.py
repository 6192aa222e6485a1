"""The store-buffering litmus test over the words of a control block: does the barrier do what the switch needs of it?

Two processes meet in every round. The worker announces itself in its count and then loads the active word; control stores the active word,
issues the barrier (or not), and then loads the count. A violation is a round in which each missed the other: the worker would serve from a
slot that control believes empty. Without the barrier any processor with a store buffer shows it, x86 included. The loops are compiled, and
their loads and stores are atomic instructions of the compiler (relaxed for the words under test), so it can neither drop nor reorder them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from benchmarks.harness import emit, note, row
from node_agent.device.control_block import ACTIVE, ControlBlock, count_index, row_start
from node_agent.device.membarrier import NUMBERS, Kind

MAX_SPINS = 4_000_000_000  # some seconds: the other process is gone
DELAYS = 256  # control waits 0..DELAYS-1 turns after the start signal, so that the two meet at some of them
BATCH = 20_000  # rounds per call into compiled code

_NUMBER = NUMBERS.get(platform.machine(), 0)
_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 4

# Words used for the meeting, in rows of workers that are not attached: each in cache lines of its own.
_COUNT = count_index(0, 0)
_GO, _DONE, _SEEN = row_start(1), row_start(2), row_start(2) + 1


@dataclass(frozen=True)
class Result:
    rounds: int
    violations: int
    seconds: float


def _access(ordering_load: str, ordering_store: str) -> tuple[Any, Any]:
    @intrinsic
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
            return builder.load_atomic(pointer, ordering_load, 8, typ=ir.IntType(64))

        return types.uint64(types.uint64), generate

    @intrinsic
    def store(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
            builder.store_atomic(arguments[1], pointer, ordering_store, 8)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), generate

    return load, store


load_relaxed, store_relaxed = _access("monotonic", "monotonic")
load_acquire, store_release = _access("acquire", "release")


@numba.njit(nogil=True)
def worker_rounds(words: np.uint64, first: int, last: int) -> int:
    """Announce, look again. Returns the last round done."""
    active, count = words + np.uint64(8 * ACTIVE), words + np.uint64(8 * _COUNT)
    go, done, seen = words + np.uint64(8 * _GO), words + np.uint64(8 * _DONE), words + np.uint64(8 * _SEEN)
    for number in range(first, last + 1):
        spins = 0
        while load_acquire(go) != np.uint64(number):
            load_relaxed(active)  # keeps the line in this core's cache: the load under test must be quick
            spins += 1
            if spins > MAX_SPINS:
                return number - 1
        store_relaxed(count, np.uint64(1))
        value = load_relaxed(active)
        store_relaxed(seen, value)
        store_release(done, np.uint64(number))
    return last


@numba.njit(nogil=True)
def control_rounds(words: np.uint64, first: int, last: int, command: int) -> int:
    """Switch, then look whether the worker is inside. Returns the violations, or -1 when the worker is gone. `command` 0: no barrier."""
    active, count = words + np.uint64(8 * ACTIVE), words + np.uint64(8 * _COUNT)
    go, done, seen = words + np.uint64(8 * _GO), words + np.uint64(8 * _DONE), words + np.uint64(8 * _SEEN)
    violations = 0
    for number in range(first, last + 1):
        store_release(go, np.uint64(number))
        for _ in range(number % DELAYS):
            load_relaxed(count)
        store_relaxed(active, np.uint64(number << 8))
        if command:
            _syscall(_NUMBER, command, 0, 0)
        inside = load_relaxed(count)
        spins = 0
        while load_acquire(done) != np.uint64(number):
            spins += 1
            if spins > MAX_SPINS:
                return -1
        if inside == np.uint64(0) and load_relaxed(seen) != np.uint64(number << 8):
            violations += 1
        store_relaxed(count, np.uint64(0))
    return violations


def _address(block: ControlBlock) -> np.uint64:
    return np.uint64(np.frombuffer(block.words, np.uint64).ctypes.data)


def _worker(path: str, rounds: int) -> None:
    block = ControlBlock.open(Path(path))
    done = worker_rounds(_address(block), 1, rounds)
    sys.exit(0 if done == rounds else 1)


def run(rounds: int, barrier: bool, seconds: float = 60.0, until_first: bool = False) -> Result:
    """At most `rounds` rounds and `seconds`; with `until_first` it also ends at the first violation."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        block = ControlBlock.create(Path(directory) / "litmus")
        command = int(Kind(block.barrier.kind)) if barrier else 0
        context = multiprocessing.get_context("spawn")
        worker = context.Process(target=_worker, args=(str(block.path), rounds), daemon=True)
        worker.start()
        words = _address(block)
        begun = time.monotonic()
        done = violations = 0
        try:
            while done < rounds and not (until_first and violations) and time.monotonic() - begun < seconds:
                last = min(done + BATCH, rounds)
                found = control_rounds(words, done + 1, last, command)
                if found < 0:
                    raise RuntimeError(f"litmus: the worker process is gone after round {done}")
                violations += found
                done = last
        finally:
            worker.kill()
            worker.join()
            block.close()
        return Result(done, violations, time.monotonic() - begun)


def main(arguments: list[str]) -> int:
    """Arguments: rounds (2000000). Exit status 1 unless violations are seen without the barrier, and none with it."""
    rounds = int(arguments[0]) if arguments else 2_000_000
    off, on = run(rounds, barrier=False), run(rounds, barrier=True)
    note(f"litmus: {on.violations} violations in {on.rounds} rounds with the barrier, {off.violations} in {off.rounds} without")
    peer = ("barrier off", off.violations / off.seconds) if off.violations else None
    emit(row("switch", f"litmus violations, {on.rounds} rounds", "1/s", on.violations / on.seconds, peer))
    return 0 if off.violations and not on.violations else 1
