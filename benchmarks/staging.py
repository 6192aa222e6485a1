"""Whether requests notice that weights are staged beside them: latencies of windows with and without, and of windows without and without.

A client asks a node at a stated share of its capacity. Windows follow each other in random order within rounds: quiet, quiet again (A/A),
`staging` (another process of this node's kind pours a version into an arena without pause, as an agent beside requests does it: idle
priority, and the default budget), `scrub` (such a process reads a version in its arena without pause, as an agent does after damage;
usually it takes an hour for that), and `update` (a second, heavy deployment of the same node is activated anew without pause: fetch, stage,
verify, try, bind in the same workers, switch). A figure is the ratio of percentiles over all windows of a kind, with an interval by
bootstrap over windows. Too much processor time of others, or an A/A interval that is too wide, makes the run inconclusive, which is no
pass. Arguments: rounds (50), seconds of a window (2), load in percent of one worker (40), MiB of the heavy version (256),
workers (1).
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks import nodes
from benchmarks.asker import LOST, WRONG, Floats, Seen, asking
from benchmarks.encoders import write_heavy
from benchmarks.harness import emit, note, row
from benchmarks.nodes import ServingNode, serving_node

BENCH = "staging"
SEED = 20260  # of the order of windows and of the bootstrap
EDGE_S = 0.1  # at the begin of a window: what was on its way
SETTLE_S = 0.2  # between two windows
RESAMPLES = 2000
CONFIDENCE = 0.95
BARS = {"p99, lower end": 1.08, "p99, upper end": 1.25, "p50": 1.05}
MAX_FOREIGN = 0.10  # of all processors' time
WIDEST_AA = 1.5  # upper over lower end
KINDS = ("quiet", "quiet again", "staging", "scrub", "update")
HEAVY = "heavy"
HEAVY_VERSIONS = 3  # two slots hold two: the third is always staged whole


@dataclass(frozen=True)
class Window:
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Ratio:
    value: float
    low: float
    high: float


@dataclass
class Work:
    """Something that goes on between `on` and `off`."""

    on: Callable[[], None]
    off: Callable[[], None]
    done: list[int] = field(default_factory=list)  # what was finished


def main(arguments: list[str]) -> int:
    given = [int(argument) for argument in arguments]
    rounds, window_s, load, heavy_mib, workers = (*given, *(50, 2, 40, 256, 1)[len(given) :])
    with serving_node(1, workers=workers, max_deployments=2) as node:
        heavy = write_heavy(node.artifacts / HEAVY, HEAVY_VERSIONS, heavy_mib << 20)
        node.publish(HEAVY, heavy)
        node.declare(HEAVY, HEAVY)
        for number in range(1, HEAVY_VERSIONS + 1):
            node.activate(number, HEAVY)
        service_s = node.service_time_s()
        rate = load / 100 / service_s
        note(f"one request takes {service_s * 1000:.1f} ms; {rate:.0f} are sent a second, {load} % of what one worker can do")
        with (
            pouring(heavy_mib, "stage") as staging,
            pouring(heavy_mib, "scrub") as scrub,
            updating(node) as update,
            asking(node.agent.url, nodes.DEPLOYMENT, rate, node.expected, node.root) as asker,
        ):
            own = _Own()
            windows = _windows(rounds, window_s, {"staging": staging, "scrub": scrub, "update": update})
            foreign = own.foreign_share()
        seen = asker.result
    note(f"{sum(staging.done)} versions poured, {sum(scrub.done)} read, {len(update.done)} updates; others took {foreign:.1%} of all time")
    return _judge(seen, windows, foreign)


def _windows(rounds: int, window_s: float, works: dict[str, Work]) -> list[Window]:
    order = random.Random(SEED)
    windows = []
    for _ in range(rounds):
        for kind in order.sample(KINDS, len(KINDS)):
            work = works.get(kind)
            if work is not None:
                work.on()
            begin_s = time.monotonic()
            time.sleep(window_s)
            windows.append(Window(kind, begin_s + EDGE_S, time.monotonic()))
            if work is not None:
                work.off()
            time.sleep(SETTLE_S)
    return windows


def _judge(seen: Seen, windows: Sequence[Window], foreign: float) -> int:
    lost, wrong = seen.count(LOST), seen.count(WRONG)
    note(f"{len(seen.due_s)} requests, {lost} lost, {wrong} wrong")
    samples = {kind: [seen.between(w.begin_s, w.end_s) for w in windows if w.kind == kind] for kind in KINDS}
    if not all(window.size for kind in samples.values() for window in kind):
        note("does not hold: in some window nothing was answered")
        return 1
    ratios = {kind: _ratios(samples[kind], samples["quiet"]) for kind in KINDS[1:]}
    for kind, found in ratios.items():
        for name, ratio in found.items():
            value = float(np.percentile(np.concatenate(samples[kind]), _share(name))) * 1000
            quiet = float(np.percentile(np.concatenate(samples["quiet"]), _share(name))) * 1000
            emit(row(BENCH, f"{kind}: {name}, {len(samples[kind])} windows", "ms", value, ("quiet", quiet)))
            note(f"{kind}: {name} x {ratio.value:.3f}, {CONFIDENCE:.0%} of resamples within {ratio.low:.3f} .. {ratio.high:.3f}")
    alike = ratios["quiet again"]["p99"]
    if foreign > MAX_FOREIGN or alike.high / alike.low > WIDEST_AA:
        note(f"inconclusive: others took {foreign:.1%} (limit {MAX_FOREIGN:.0%}), A/A p99 within {alike.low:.2f} .. {alike.high:.2f}")
        return 1
    missed = [text for kind in ("staging", "scrub", "update") for text in _missed(kind, ratios[kind])]
    for text in missed:
        note(f"does not hold: {text}")
    if not missed and not lost and not wrong:
        note("holds")
    return 1 if missed or lost or wrong else 0


def _missed(kind: str, found: dict[str, Ratio]) -> list[str]:
    values = {"p99, lower end": found["p99"].low, "p99, upper end": found["p99"].high, "p50": found["p50"].value}
    return [f"{kind}: {name} is {values[name]:.3f}, the bar {bar}" for name, bar in BARS.items() if values[name] > bar]


def _ratios(kind: Sequence[Floats], quiet: Sequence[Floats]) -> dict[str, Ratio]:
    """Of percentiles of all samples together; the interval resamples whole windows, since neighbours in time are alike."""
    rng = np.random.default_rng(SEED)
    result = {}
    for name in ("p50", "p99"):
        share = _share(name)
        drawn = []
        for _ in range(RESAMPLES):
            ours = np.concatenate([kind[n] for n in rng.integers(0, len(kind), len(kind))])
            theirs = np.concatenate([quiet[n] for n in rng.integers(0, len(quiet), len(quiet))])
            drawn.append(np.percentile(ours, share) / np.percentile(theirs, share))
        value = float(np.percentile(np.concatenate(kind), share) / np.percentile(np.concatenate(quiet), share))
        low, high = np.percentile(drawn, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
        result[name] = Ratio(value, float(low), float(high))
    return result


def _share(name: str) -> float:
    return float(name.removeprefix("p"))


class _Own:
    """How much of the machine this benchmark takes with all that it started."""

    def __init__(self) -> None:
        self._begin_s, self._busy_s, self._own_s = time.monotonic(), nodes.machine_busy_s(), self._sum_s()

    @staticmethod
    def _sum_s() -> float:
        return sum(map(nodes.cpu_s, nodes.descendants()))

    def foreign_share(self) -> float:
        others_s = (nodes.machine_busy_s() - self._busy_s) - (self._sum_s() - self._own_s)
        return max(0.0, others_s) / ((time.monotonic() - self._begin_s) * nodes.processors())


@contextmanager
def pouring(size_mib: int, what: str) -> Iterator[Work]:
    """A process that pours or reads while it is told to."""
    words = [sys.executable, "-m", "benchmarks.pourer", str(size_mib), what]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def say(word: str) -> str:
        stdin.write(word + "\n")
        stdin.flush()
        return stdout.readline()

    done: list[int] = []
    try:
        if not stdout.readline():
            raise RuntimeError("the pouring process did not start")
        yield Work(lambda: _expect(say("on"), "on"), lambda: done.append(int(say("off"))), done)
        stdin.close()
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def _expect(found: str, word: str) -> None:
    if found.strip() != word:
        raise RuntimeError(f"the pouring process said {found!r}")


@contextmanager
def updating(node: ServingNode) -> Iterator[Work]:
    """The heavy deployment is activated again and again while it is told to."""
    goes, over = threading.Event(), threading.Event()
    idle = threading.Event()
    done: list[int] = []
    faults: list[Exception] = []

    def work() -> None:
        number = 0
        while not over.is_set():
            if not goes.wait(0.1):
                idle.set()
                continue
            try:
                node.activate(number % HEAVY_VERSIONS + 1, HEAVY)
            except Exception as fault:  # noqa: BLE001 - told by `off`
                faults.append(fault)
                return
            number += 1
            done.append(number)

    def on() -> None:
        idle.clear()
        goes.set()

    def off() -> None:
        goes.clear()
        while not idle.wait(0.1):
            if faults:
                raise faults[0]

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield Work(on, off, done)
    finally:
        over.set()
        thread.join()
