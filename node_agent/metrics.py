"""Counters of one process, and the one page that the front makes of all processes of an agent.

Each process counts in its own registry; the front asks the others for theirs over the sockets and merges families of equal name. A worker's
samples carry its index, never a version: versions come and go without bound. The only file of the agent that imports prometheus_client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from node_agent.messages import Family, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "raftmeta_agent_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Meter:
    """Declares and holds the metrics of one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(_PREFIX + name, help_text, labels, registry=self._registry)

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(_PREFIX + name, help_text, labels, registry=self._registry)

    def seconds(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Histogram:
        return Histogram(_PREFIX + name, help_text, labels, registry=self._registry, buckets=_SECONDS)

    def families(self) -> tuple[Family, ...]:
        return tuple(
            Family(
                metric.name,
                metric.documentation,
                metric.type,
                tuple(Sample(sample.name, dict(sample.labels), sample.value) for sample in metric.samples),
            )
            for metric in self._registry.collect()
        )


def page(parts: Iterable[Sequence[Family]]) -> bytes:
    """The text of all families together; the first of a name gives help and kind."""
    merged: dict[str, Metric] = {}
    for families in parts:
        for family in families:
            metric = merged.setdefault(family.name, Metric(family.name, family.help, family.kind))
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)

    class Page:
        def collect(self) -> Iterable[Metric]:
            return [merged[name] for name in sorted(merged)]

    registry = CollectorRegistry()
    registry.register(Page())
    return generate_latest(registry)
