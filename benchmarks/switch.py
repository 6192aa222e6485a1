"""The switch under load: how long the call takes, whether any request starts in a slot under rewrite, and whether the barrier is why.

Worker processes enter and leave without pause; control switches, drains the old slot, marks it as being rewritten for a moment, and then
switches back into it. A stale start is a request that sees the mark in the slot it was given. Then requests that take some milliseconds:
a switch is acknowledged by all workers once the longest of them is over. The litmus test shows the race bare, with the barrier and without.
Arguments: switches (100000), workers (4), litmus rounds (1000000). Exit status 1 when a claim fails.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks import litmus
from benchmarks.harness import emit, note, percentile, row
from node_agent.device.control_block import ControlBlock
from node_agent.device.words import CACHE_LINE, WORD, words
from node_agent.slots import Switch, WorkerGate

BENCH = "switch"
CALL_P99_US = 87.0
MAX_SECONDS = 60.0  # of the switching loop
_DRAIN_S = 30.0
_START_S = 120.0
_LOOKS = 8  # at the mark while inside: a request that takes a moment
SLOW_SWITCHES = 200
SLOW_S = (0.0, 0.02)  # that a slow request takes, drawn evenly
ACKNOWLEDGED_MS = 10.0  # beyond the longest request

_LINE = CACHE_LINE // WORD
_STOP = 0  # index of the word that ends the workers
_MARKS = _LINE  # one word per slot, set while control rewrites it
_TALLIES = 2 * _LINE  # a line per worker: enters, stale starts, nanoseconds of its longest request


@dataclass(frozen=True)
class Outcome:
    call_us: list[float]
    cycle_us: float  # switch, drain and rewrite, mean
    enters: int
    stale: int
    seconds: float


class Board:
    """Words that the benchmark itself shares with its workers."""

    def __init__(self, path: Path, workers: int) -> None:
        size = -(-(_TALLIES + workers * _LINE) * WORD // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, size)
        self.words = words(mmap.mmap(fd, size), 0, size // WORD)
        os.close(fd)

    def tally(self, worker: int) -> int:
        return _TALLIES + worker * _LINE


def spin(block_path: str, board_path: str, worker: int, workers: int) -> None:
    """One worker process: requests without pause until told to stop."""
    gate = WorkerGate(ControlBlock.open(Path(block_path)), worker)
    board = Board(Path(board_path), workers)
    seen, tally = board.words, board.tally(worker)
    enters = stale = 0
    while not seen[_STOP]:
        slot = gate.enter()
        for _ in range(_LOOKS):
            if seen[_MARKS + slot]:
                stale += 1
                break
        gate.leave(slot)
        enters += 1
        seen[tally], seen[tally + 1] = enters, stale
    gate.detach()


def serve_slowly(block_path: str, board_path: str, worker: int, workers: int) -> None:
    """One worker process whose requests take a while; it notes its longest."""
    gate = WorkerGate(ControlBlock.open(Path(block_path)), worker)
    board = Board(Path(board_path), workers)
    drawn = random.Random(worker)
    seen, tally = board.words, board.tally(worker)
    while not seen[_STOP]:
        begin = time.perf_counter_ns()
        slot = gate.enter()
        time.sleep(drawn.uniform(*SLOW_S))
        gate.leave(slot)
        seen[tally] += 1
        seen[tally + 2] = max(int(seen[tally + 2]), time.perf_counter_ns() - begin)
    gate.detach()


@contextmanager
def running(work: Callable[[str, str, int, int], None], workers: int) -> Iterator[tuple[Switch, Board]]:
    """Worker processes that all take requests; they have stopped when the block is over."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        block = ControlBlock.create(Path(directory) / "control")
        board = Board(Path(directory) / "board", workers)
        switch = Switch(block)
        switch.switch(0)
        context = multiprocessing.get_context("spawn")
        processes: list[BaseProcess] = []
        try:
            for worker in range(workers):
                arguments = (str(block.path), str(Path(directory) / "board"), worker, workers)
                processes.append(context.Process(target=work, args=arguments, daemon=True))
                processes[-1].start()
            _wait_all_running(board, workers)
            yield switch, board
            board.words[_STOP] = 1
            for process in processes:
                process.join(_DRAIN_S)
        finally:
            for process in processes:
                process.kill()
                process.join()


def measure(switches: int, workers: int) -> Outcome:
    with running(spin, workers) as (switch, board):
        calls, seconds = _switch_loop(switch, board, switches)
    tallies = [board.words[board.tally(worker) : board.tally(worker) + 2].tolist() for worker in range(workers)]
    return Outcome(calls, seconds / len(calls) * 1e6, sum(t[0] for t in tallies), sum(t[1] for t in tallies), seconds)


def acknowledge(workers: int) -> tuple[float, float]:
    """Milliseconds until all workers acknowledged, at most, and of the longest request."""
    slowest_s = 0.0
    with running(serve_slowly, workers) as (switch, board):
        for number in range(SLOW_SWITCHES):
            begin_s = time.monotonic()
            epoch = switch.switch(1 - number % 2).epoch
            while not switch.acknowledged(epoch):
                if time.monotonic() > begin_s + _DRAIN_S:
                    raise RuntimeError(f"workers {switch.waiting(epoch)} did not acknowledge within {_DRAIN_S} s")
                time.sleep(0.000_2)
            slowest_s = max(slowest_s, time.monotonic() - begin_s)
    longest_ns = max(int(board.words[board.tally(worker) + 2]) for worker in range(workers))
    return slowest_s * 1000, longest_ns / 1e6


def _wait_all_running(board: Board, workers: int) -> None:
    deadline = time.monotonic() + _START_S
    while not all(board.words[board.tally(worker)] for worker in range(workers)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {workers} workers took requests within {_START_S} s")
        time.sleep(0.01)


def _switch_loop(switch: Switch, board: Board, switches: int) -> tuple[list[float], float]:
    calls: list[float] = []
    begun = time.monotonic()
    old = 0
    for _ in range(switches):
        report = switch.switch(1 - old)
        calls.append(report.call_us)
        switch.wait_drained(old, time.monotonic() + _DRAIN_S)
        board.words[_MARKS + old] = 1
        for _ in range(_LOOKS):
            pass
        board.words[_MARKS + old] = 0
        old = report.slot
        if time.monotonic() - begun > MAX_SECONDS:
            break
    return calls, time.monotonic() - begun


def main(arguments: list[str]) -> int:
    given = [int(argument) for argument in arguments]
    switches, workers, rounds = (*given, *(100_000, 4, 1_000_000)[len(given) :])
    under_load = measure(switches, workers)
    load = f"{workers} workers, {len(under_load.call_us)} switches"
    p99 = percentile(under_load.call_us, 0.99)
    emit(row(BENCH, f"call p50, {load}", "us", percentile(under_load.call_us, 0.5)))
    emit(row(BENCH, f"call p99, {load}", "us", p99))
    emit(row(BENCH, f"call max, {load}", "us", max(under_load.call_us)))
    emit(row(BENCH, f"switch, drain and rewrite, {load}", "us", under_load.cycle_us))
    emit(row(BENCH, f"stale starts in {under_load.enters} requests", "1/s", under_load.stale / under_load.seconds))
    held = p99 <= CALL_P99_US and not under_load.stale
    note(f"{under_load.stale} stale starts; {'holds' if held else 'does not hold'}: call p99 <= {CALL_P99_US} us and no stale start")
    slowest_ms, longest_ms = acknowledge(workers)
    emit(row(BENCH, f"all acknowledged, slowest of {SLOW_SWITCHES}, {workers} workers", "ms", slowest_ms, ("longest request", longest_ms)))
    in_time = slowest_ms <= longest_ms + ACKNOWLEDGED_MS
    note(f"{'holds' if in_time else 'does not hold'}: acknowledged within the longest request and {ACKNOWLEDGED_MS:g} ms")
    return litmus.main([str(rounds)]) if held and in_time else 1
