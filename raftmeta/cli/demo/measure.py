"""Figures from samples. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from raftmeta.cli.demo.report import Activation, Latency, Requests
from raftmeta.core import block_file

COUNTERS = ("bytes_fetched", "bytes_read", "bytes_from_active", "bytes_kept", "bytes_total", "tensors_changed")


class Sample(NamedTuple):
    """One request of the load."""

    side: str
    scheduled_s: float  # monotonic instant it was due, whether or not it could be sent then
    latency_s: float  # from that instant to the end of the answer
    outcome: str  # ok | lost | wrong
    label: str  # version that the answer names, "" without one
    detail: str  # why it was lost or wrong


class Window(NamedTuple):
    """A stretch of the story in monotonic seconds."""

    begin_s: float
    end_s: float

    def holds(self, instant_s: float) -> bool:
        return self.begin_s <= instant_s < self.end_s


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def requests(samples: Iterable[Sample]) -> Requests:
    outcomes = [sample.outcome for sample in samples]
    return Requests(len(outcomes), outcomes.count("ok"), outcomes.count("lost"), outcomes.count("wrong"))


def latency(samples: Sequence[Sample], steady: Window, during: Sequence[Window]) -> Latency:
    """Of answered requests only; lost ones are counted as lost."""
    answered = [sample for sample in samples if sample.outcome != "lost"]
    calm = [sample.latency_s * 1e3 for sample in answered if steady.holds(sample.scheduled_s)]
    busy = [sample.latency_s * 1e3 for sample in answered if any(window.holds(sample.scheduled_s) for window in during)]
    figures = (percentile(calm, 0.50), percentile(calm, 0.99), percentile(busy, 0.50), percentile(busy, 0.99))
    return Latency(*(round(figure, 2) for figure in figures))


def activation(rollout: Mapping[str, Any]) -> Activation:
    """The cost of a finished rollout, from the record with its attestations."""
    counters = [item["counters"] for item in rollout["attestations"]]
    most = {name: max((item[name] for item in counters), default=0) for name in COUNTERS}
    return Activation(
        to=rollout["to_version"],
        kind=rollout["kind"],
        total_s=round((rollout["ended_ms"] - rollout["started_ms"]) / 1000, 3),
        switch_call_us_max=max((item["switch_call_us"] for item in counters), default=0),
        **most,
    )


def longest_gap_ms(instants_s: Sequence[float], around_s: float) -> float:
    """The longest time between two acknowledgements, of those that ended after `around_s`; 0 when none did."""
    gaps = [(b - a) * 1e3 for a, b in pairwise(instants_s) if b > around_s]
    return round(max(gaps, default=0.0), 1)


def differing_bytes(manifest: Mapping[str, Any], others: Sequence[Mapping[str, Any]], unbound: frozenset[str] = frozenset()) -> int:
    """Bytes of the tensors whose content stands in none of `others` under the same name."""
    known = [{tensor["name"]: tensor["sha256"] for tensor in other["tensors"]} for other in others]
    return sum(
        tensor["end"] - tensor["begin"]
        for tensor in manifest["tensors"]
        if tensor["name"] not in unbound and all(names.get(tensor["name"]) != tensor["sha256"] for names in known)
    )


def block_check_bytes(manifest: Mapping[str, Any]) -> int:
    """Size of the file of block checks, 0 without one."""
    return sum(file["size_bytes"] for file in manifest["files"] if block_file.is_name(file["name"]))
