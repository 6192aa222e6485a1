"""What tending a deployment tells the metrics: how long steps took, what was moved, what a switch cost, what failed."""

from __future__ import annotations

from contextlib import AbstractContextManager

from node_agent import metric_table as table
from node_agent.failure import Failure
from node_agent.metrics import Meter
from raftmeta.core.types import StageCounters


class Observer:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def step(self, deployment: str, name: str) -> AbstractContextManager[None]:
        """Around a step; one that fails is not counted here."""
        assert name in table.STEPS, name
        return self._meter.timed(table.STEP_SECONDS, deployment, name)

    def fetched(self, deployment: str, size_bytes: int) -> None:
        self._meter.count(table.FETCHED, deployment, amount=size_bytes)

    def placed(self, deployment: str, counters: StageCounters) -> None:
        """A version is in a slot, by staging or because it was there."""
        self._meter.count(table.READ, deployment, amount=counters.bytes_read)
        self._meter.count(table.FROM_ACTIVE, deployment, amount=counters.bytes_from_active)
        self._meter.count(table.KEPT, deployment, amount=counters.bytes_kept)

    def paused(self, deployment: str, call_us: float) -> None:
        self._meter.observe(table.PAUSE_SECONDS, call_us / 1e6, deployment)

    def answered(self, deployment: str, lag_ms: int) -> None:
        """Every worker answers with what an order named; -1 when it is not known since when it was due."""
        if lag_ms >= 0:
            self._meter.observe(table.SWITCH_SECONDS, lag_ms / 1e3, deployment)

    def scrubbed(self, deployment: str, size_bytes: int) -> None:
        self._meter.count(table.SCRUB_BYTES, deployment, amount=size_bytes)

    def scrub_passed(self, deployment: str) -> None:
        self._meter.count(table.SCRUB_PASSES, deployment)

    def found(self, deployment: str, kind: str) -> None:
        """A difference between what serves and what was verified, by the kind of the finding."""
        self._meter.count(table.SCRUB_FINDINGS, deployment, kind)

    def mended(self, deployment: str, outcome: str) -> None:
        self._meter.count(table.SCRUB_REPAIRS, deployment, outcome)

    def failed(self, deployment: str, failure: Failure) -> None:
        phase = failure.phase if failure.phase in table.PHASES else "other"
        self._meter.count(table.FAILURES, deployment, failure.failure_class.value, phase)
