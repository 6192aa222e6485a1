"""Counting, and the one page that the front makes of all processes of an agent.

What only rises (counters, histograms) is added to the process's tally, which outlives it (`tally`). What is so at a moment (gauges) stays
in the process; the front asks for it over the sockets, and leaves out what belongs to a process that does not answer. The only file of the
agent that imports prometheus_client.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from node_agent.messages import GaugeSample
from node_agent.metric_table import BY_NAME, METRICS, SERIES_LOST, Kind, Spec
from node_agent.tally import Tally

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUM = -1  # in place of a bucket's number


class _Key(msgspec.Struct, frozen=True, array_like=True):
    """The name of one sum in a tally. `bucket`: of a histogram, its number or SUM; of a counter 0."""

    metric: str
    labels: tuple[str, ...]
    bucket: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Key).decode


class Meter:
    """Counts for one process."""

    def __init__(self, tally: Tally | None = None) -> None:
        self._tally = tally or Tally.private()
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}

    @property
    def tally(self) -> Tally:
        return self._tally

    def count(self, spec: Spec, *labels: str, amount: float = 1.0) -> None:
        assert spec.kind is Kind.COUNTER and len(labels) == len(spec.labels) and amount >= 0, spec.name
        self._tally.add(_encode(_Key(spec.name, labels)), amount)

    def observe(self, spec: Spec, value: float, *labels: str) -> None:
        assert spec.kind is Kind.HISTOGRAM and len(labels) == len(spec.labels), spec.name
        self._tally.add(_encode(_Key(spec.name, labels, bisect_left(spec.buckets, value))), 1.0)
        self._tally.add(_encode(_Key(spec.name, labels, SUM)), max(0.0, value))

    @contextmanager
    def timed(self, spec: Spec, *labels: str) -> Iterator[None]:
        """Seconds of the block, if it ends well."""
        begun = time.perf_counter()
        yield
        self.observe(spec, time.perf_counter() - begun, *labels)

    def set(self, spec: Spec, value: float, *labels: str) -> None:
        assert spec.kind is Kind.GAUGE and len(labels) == len(spec.labels), spec.name
        self._gauges[spec.name, labels] = float(value)

    def clear(self, *specs: Spec) -> None:
        """Forget what was set for deployments that may be gone."""
        names = {spec.name for spec in specs}
        self._gauges = {key: value for key, value in self._gauges.items() if key[0] not in names}

    def gauges(self) -> tuple[GaugeSample, ...]:
        return tuple(GaugeSample(name, labels, value) for (name, labels), value in sorted(self._gauges.items()))


def totals(tally: Tally, spec: Spec) -> dict[str, float]:
    """What one process counted, by the first label of a counter."""
    found: dict[str, float] = {}
    for name, value in tally.sums().items():
        key = _decode(name)
        if key.metric == spec.name:
            found[key.labels[0]] = found.get(key.labels[0], 0.0) + value
    return found


def page(tallies: Mapping[tuple[str, str], Tally], gauges: Iterable[Sequence[GaugeSample]]) -> bytes:
    """The text of all metrics: what the tallies say together, by role and index of who counts, and the gauges."""
    sums: dict[_Key, float] = {_Key(SERIES_LOST.name, process): float(tally.lost) for process, tally in tallies.items()}
    for tally in tallies.values():
        for name, value in tally.sums().items():
            key = _decode(name)
            sums[key] = sums.get(key, 0.0) + value
    families = {spec.name: Metric(spec.full_name, spec.help, spec.kind.value) for spec in METRICS}
    for spec in METRICS:
        series = sorted({key.labels for key in sums if key.metric == spec.name} | ({()} if not spec.labels else set()))
        for labels in series if spec.kind is not Kind.GAUGE else ():
            _add_sums(families[spec.name], spec, labels, sums)
    for part in gauges:
        for sample in part:
            spec = BY_NAME[sample.metric]
            families[spec.name].add_sample(spec.full_name, dict(zip(spec.labels, sample.labels, strict=True)), sample.value)

    class Page:
        def collect(self) -> Iterable[Metric]:
            return [families[name] for name in sorted(families)]

    registry = CollectorRegistry()
    registry.register(Page())
    return generate_latest(registry)


def _add_sums(family: Metric, spec: Spec, labels: tuple[str, ...], sums: dict[_Key, float]) -> None:
    named = dict(zip(spec.labels, labels, strict=True))
    if spec.kind is Kind.COUNTER:
        family.add_sample(f"{spec.full_name}_total", named, sums.get(_Key(spec.name, labels), 0.0))
        return
    count = 0.0
    for number, bound in enumerate((*map(str, spec.buckets), "+Inf")):
        count += sums.get(_Key(spec.name, labels, number), 0.0)
        family.add_sample(f"{spec.full_name}_bucket", named | {"le": bound}, count)
    family.add_sample(f"{spec.full_name}_sum", named, sums.get(_Key(spec.name, labels, SUM), 0.0))
    family.add_sample(f"{spec.full_name}_count", named, count)
