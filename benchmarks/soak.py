"""Whether a node pays for many updates with memory or time: distinct versions one after the other, against the same node left alone.

A client asks all the time and knows what every version answers, so a lost request, a wrong label and an answer mixed of two versions all
show. Then a fresh node is asked at the same rate for the same time without any update. Memory is the anonymous memory of all processes of
the tree; its growth counts from the first updates on, when all libraries have taken what they take once. Latency is fitted by a line over
medians of equal parts of the run. Arguments: versions (1000), rate (10), workers (2). Exit status 1 when a bar is missed: nothing lost or
wrong, memory within 1 % or 4 MiB of the control run, a slope that does not differ from the control's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.asker import LOST, WRONG, Floats, Seen, asking
from benchmarks.harness import emit, note, row
from benchmarks.nodes import DEPLOYMENT, ServingNode, anonymous_mb, serving_node

BENCH = "soak"
WARM_UP = 20  # updates that do not count
PARTS = 40  # of a run, for the line
LEAST_MB = 4 * 1.048576
SHARE = 0.01
DIFFERENT = 1.96  # standard errors
SAMPLE_S = 1.0
LAST_SAMPLES = 10  # whose median is what a run ends with: collectors come and go


@dataclass(frozen=True)
class Run:
    seen: Seen
    begin_s: float  # from here on it counts
    end_s: float
    memory_mb: Floats  # [samples] from there on

    @property
    def growth_mb(self) -> float:
        return float(np.median(self.memory_mb[-LAST_SAMPLES:]) - np.median(self.memory_mb[:LAST_SAMPLES]))

    @property
    def slope(self) -> tuple[float, float]:
        """Milliseconds an hour, and the standard error of that."""
        edges = np.linspace(self.begin_s, self.end_s, PARTS + 1)
        medians = np.array([np.median(self.seen.between(begin, end)) * 1000 for begin, end in pairwise(edges)])
        hours = (edges[:-1] - self.begin_s) / 3600
        (slope, _), covariance = np.polyfit(hours, medians, 1, cov=True)
        return float(slope), math.sqrt(float(covariance[0, 0]))


def main(arguments: list[str]) -> int:
    given = [int(argument) for argument in arguments]
    versions, rate, workers = (*given, *(1000, 10, 2)[len(given) :])
    with serving_node(versions, workers=workers) as node:
        updated = _run(node, rate, lambda: _update(node, versions))
    note(f"{versions} versions in {updated.end_s - updated.begin_s:.0f} s; now as long without any")
    with serving_node(1, workers=workers) as node:
        control = _run(node, rate, lambda: _wait(node, updated.end_s - updated.begin_s))
    return _judge(versions, updated, control)


def _run(node: ServingNode, rate: int, work: Callable[[], tuple[float, Floats]]) -> Run:
    with asking(node.agent.url, DEPLOYMENT, rate, node.expected, node.root) as asker:
        begin_s, memory = work()
        end_s = time.monotonic()
    return Run(asker.result, begin_s, end_s, memory)


class _Memory:
    """Of all processes of a node, looked at now and then."""

    def __init__(self, node: ServingNode) -> None:
        self._node = node
        self._next_s = 0.0
        self.samples_mb: list[float] = []

    def look(self) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SAMPLE_S
            self.samples_mb.append(sum(map(anonymous_mb, self._node.pids())))


def _update(node: ServingNode, versions: int) -> tuple[float, Floats]:
    for number in range(2, WARM_UP + 2):
        node.activate(number)
    memory, begin_s = _Memory(node), time.monotonic()
    for number in range(WARM_UP + 2, versions + 1):
        node.activate(number)
        memory.look()
    return begin_s, np.array(memory.samples_mb)


def _wait(node: ServingNode, seconds: float) -> tuple[float, Floats]:
    memory, begin_s = _Memory(node), time.monotonic()
    while time.monotonic() < begin_s + seconds:
        memory.look()
        time.sleep(SAMPLE_S / 4)
    return begin_s, np.array(memory.samples_mb)


def _judge(versions: int, updated: Run, control: Run) -> int:
    lost, wrong = updated.seen.count(LOST), updated.seen.count(WRONG)
    note(f"{len(updated.seen.due_s)} requests over {versions - 1} updates: {lost} lost, {wrong} wrong or mixed")
    held = not lost and not wrong
    allowed = max(LEAST_MB, SHARE * float(np.median(updated.memory_mb[:LAST_SAMPLES])))
    case = f"growth over {versions - 1 - WARM_UP} updates"
    emit(row(BENCH, f"{case}: anonymous memory of all processes", "MB", updated.growth_mb, ("without updates", control.growth_mb)))
    note(f"memory {np.median(updated.memory_mb[:LAST_SAMPLES]):.0f} MB at first, {updated.growth_mb - control.growth_mb:+.1f} MB "
         f"against the control run, allowed are {allowed:.1f}")  # fmt: skip
    held = held and updated.growth_mb - control.growth_mb <= allowed
    (ours, our_error), (theirs, their_error) = updated.slope, control.slope
    distance = (ours - theirs) / math.hypot(our_error, their_error)
    note(f"latency slope {ours:+.2f} ± {our_error:.2f} ms an hour, without updates {theirs:+.2f} ± {their_error:.2f}: "
         f"{distance:+.1f} standard errors apart, the limit is {DIFFERENT}")  # fmt: skip
    held = held and distance <= DIFFERENT
    for name, share in (("p50", 50), ("p99", 99)):
        values = [float(np.percentile(run.seen.between(run.begin_s, run.end_s), share)) * 1000 for run in (updated, control)]
        emit(row(BENCH, f"{name} while updating", "ms", values[0], ("without updates", values[1])))
    note("holds" if held else "a bar is missed")
    return 0 if held else 1
