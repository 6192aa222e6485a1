"""What all benchmarks share: one row format, paired runs, medians.

A benchmark measures our side and a named peer in the same process run, alternating, so that a noisy machine disturbs both alike. A row is
one JSON line with `ratio` = value / peer_value whatever the unit; whether more or less is better follows from the unit. A benchmark module
has `main(arguments) -> exit status` and prints rows with `emit`; `python -m benchmarks NAME` runs it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

UNITS = ("1/s", "s", "ms", "us", "GB/s", "MB", "bytes")


@dataclass(frozen=True)
class Row:
    bench: str
    case: str
    value: float
    unit: str  # one of UNITS
    peer: str  # "" when the case has no peer
    peer_value: float | None
    ratio: float | None  # value / peer_value


@dataclass(frozen=True)
class Paired:
    """Medians of alternating runs, in the unit of the samples."""

    value: float
    peer_value: float

    @property
    def ratio(self) -> float:
        return self.value / self.peer_value


def row(bench: str, case: str, unit: str, value: float, peer: tuple[str, float] | None = None) -> Row:
    assert unit in UNITS, unit
    if peer is None:
        return Row(bench, case, _rounded(value), unit, "", None, None)
    name, peer_value = peer
    return Row(bench, case, _rounded(value), unit, name, _rounded(peer_value), _rounded(value / peer_value))


def emit(made: Row) -> None:
    print(json.dumps(asdict(made)), flush=True)


def note(text: str) -> None:
    """For the reader at the terminal; never among the rows."""
    print(text, file=sys.stderr, flush=True)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def paired(ours: Callable[[], float], peer: Callable[[], float], runs: int) -> Paired:
    """Medians over `runs` samples of each side after one warm-up of both; the sides take turns in going first."""
    ours()
    peer()
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs):
        order = ((0, ours), (1, peer)) if turn % 2 == 0 else ((1, peer), (0, ours))
        for side, sample in order:
            samples[side].append(sample())
    return Paired(statistics.median(samples[0]), statistics.median(samples[1]))


def interleaved(samples: Mapping[str, Callable[[], float]], runs: int) -> dict[str, float]:
    """Medians of `runs` samples of each after one warm-up of all; every round begins with the next of them."""
    names = list(samples)
    for name in names:
        samples[name]()
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(runs):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(samples[name]())
    return {name: statistics.median(values) for name, values in taken.items()}


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` (0..1) of the samples do not exceed."""
    ordered = sorted(samples)
    rank = math.ceil(round(len(ordered) * share, 6))  # rounded, because 100 * 0.07 is 7.000000000000001
    return ordered[max(0, rank - 1)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
