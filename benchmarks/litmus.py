"""The store-buffering litmus test over the words of a control block: does the barrier do what the switch needs of it?

Two processes meet in every round. The worker announces itself in its count and then loads the active word; control stores the active word,
issues the barrier (or not), and then loads the count. A violation is a round in which each missed the other: the worker would serve from a
slot that control believes empty. Without the barrier any processor with a store buffer shows it, x86 included. The loops are compiled, and
their loads and stores are atomic instructions of the compiler (relaxed for the words under test), so it can neither drop nor reorder them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
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

DELAYS = 256  # control waits 0..DELAYS-1 turns after the start signal, so that the two meet at some of them
BATCH = 2_000  # rounds per call into compiled code
LOOKS = 1024  # without success before the processor is offered to others: the peer may be waiting for it
START_S = 120.0  # for the worker to compile its loop, on a busy machine too

_NUMBER = NUMBERS.get(platform.machine(), 0)
_libc = ctypes.CDLL(None)
_syscall, _yield, _time = _libc.syscall, _libc.sched_yield, _libc.time  # called from compiled code, so with their types
_syscall.restype, _syscall.argtypes = ctypes.c_long, [ctypes.c_long] * 4
_yield.restype, _yield.argtypes = ctypes.c_int, []
_time.restype, _time.argtypes = ctypes.c_long, [ctypes.c_size_t]

# Words used for the meeting, in rows of workers that are not attached: each in cache lines of its own.
_COUNT = count_index(0, 0)
_GO, _DONE, _SEEN, _READY = row_start(1), row_start(2), row_start(2) + 1, row_start(3)


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
def _reached(word: np.uint64, number: int, warmed: np.uint64, deadline: int) -> bool:
    """Wait until the word has this value; False after the deadline (Unix seconds). `warmed` stays in this core's cache meanwhile."""
    looks = 0
    while load_acquire(word) != np.uint64(number):
        load_relaxed(warmed)  # the load under test must be quick
        looks += 1
        if looks % LOOKS == 0:
            _yield()
            if _time(0) > deadline:
                return False
    return True


@numba.njit(nogil=True)
def worker_rounds(words: np.uint64, first: int, last: int, deadline: int) -> int:
    """Announce, look again. Returns the last round done."""
    active, count = words + np.uint64(8 * ACTIVE), words + np.uint64(8 * _COUNT)
    go, done, seen = words + np.uint64(8 * _GO), words + np.uint64(8 * _DONE), words + np.uint64(8 * _SEEN)
    for number in range(first, last + 1):
        if not _reached(go, number, active, deadline):
            return number - 1
        store_relaxed(count, np.uint64(1))
        value = load_relaxed(active)
        store_relaxed(seen, value)
        store_release(done, np.uint64(number))
    return last


@numba.njit(nogil=True)
def control_rounds(words: np.uint64, rounds: tuple[int, int], command: int, deadline: int) -> int:
    """Switch, then look whether the worker is inside. Returns the violations, -1 when the worker is silent. `command` 0: no barrier."""
    active, count = words + np.uint64(8 * ACTIVE), words + np.uint64(8 * _COUNT)
    go, done, seen = words + np.uint64(8 * _GO), words + np.uint64(8 * _DONE), words + np.uint64(8 * _SEEN)
    violations = 0
    for number in range(rounds[0], rounds[1] + 1):
        store_release(go, np.uint64(number))
        for _ in range(number % DELAYS):
            load_relaxed(count)
        store_relaxed(active, np.uint64(number << 8))
        if command:
            _syscall(_NUMBER, command, 0, 0)
        inside = load_relaxed(count)
        if not _reached(done, number, done, deadline):
            return -1
        if inside == np.uint64(0) and load_relaxed(seen) != np.uint64(number << 8):
            violations += 1
        store_relaxed(count, np.uint64(0))
    return violations


def _address(block: ControlBlock) -> np.uint64:
    return np.uint64(np.frombuffer(block.words, np.uint64).ctypes.data)


def _worker(path: str, rounds: int, processor: int, seconds: float) -> None:
    os.sched_setaffinity(0, {processor})
    block = ControlBlock.open(Path(path))
    words = _address(block)
    worker_rounds(words, 1, 0, 0)  # compiles
    block.words[_READY] = 1
    worker_rounds(words, 1, rounds, int(time.time() + seconds))


def run(rounds: int, barrier: bool, seconds: float = 60.0, until_first: bool = False) -> Result:
    """At most about `rounds` rounds and `seconds`; with `until_first` it also ends at the first violation.

    Worker and control are bound to a processor each: on a common one there is no race.
    """
    usable = os.sched_getaffinity(0)
    mine, other = sorted(usable)[:2]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        block = ControlBlock.create(Path(directory) / "litmus")
        command = int(Kind(block.barrier.kind)) if barrier else 0
        arguments = (str(block.path), rounds, other, START_S + 2 * seconds)
        worker = multiprocessing.get_context("spawn").Process(target=_worker, args=arguments, daemon=True)
        worker.start()
        try:
            words = _address(block)
            control_rounds(words, (1, 0), command, 0)  # compiles
            _wait_ready(block, worker)
            os.sched_setaffinity(0, {mine})
            begun = time.monotonic()
            done = violations = 0
            while done < rounds and not (until_first and violations) and time.monotonic() - begun < seconds:
                last = min(done + BATCH, rounds)
                found = control_rounds(words, (done + 1, last), command, int(time.time() + seconds))
                if found < 0:
                    raise RuntimeError(
                        f"litmus: the worker did not answer for {seconds} s after round {done}, exit status {worker.exitcode}"
                    )
                violations, done = violations + found, last
            return Result(done, violations, time.monotonic() - begun)
        finally:
            os.sched_setaffinity(0, usable)
            worker.kill()
            worker.join()
            block.close()


def _wait_ready(block: ControlBlock, worker: BaseProcess) -> None:
    deadline = time.monotonic() + START_S
    while not block.words[_READY]:
        if not worker.is_alive() or time.monotonic() > deadline:
            raise RuntimeError(f"litmus: the worker did not start within {START_S} s, exit status {worker.exitcode}")
        time.sleep(0.01)


def main(arguments: list[str]) -> int:
    """Arguments: rounds (1000000). Exit status 1 unless violations are seen without the barrier, and none with it."""
    rounds = int(arguments[0]) if arguments else 1_000_000
    off, on = run(rounds, barrier=False), run(rounds, barrier=True)
    note(f"litmus: {on.violations} violations in {on.rounds} rounds with the barrier, {off.violations} in {off.rounds} without")
    peer = ("barrier off", off.violations / off.seconds) if off.violations else None
    emit(row("switch", f"litmus violations, {on.rounds} rounds", "1/s", on.violations / on.seconds, peer))
    return 0 if off.violations and not on.violations else 1
