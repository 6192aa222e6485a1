"""The gate on the rate of requests: a version becomes ready on this node only while its deployment is quiet enough. Off by default.

The rate is at most R where the last W requests took at least W / R seconds to come. So a deployment is quiet when fewer than W came within
that span, which also holds where hardly any come; what is decided on is always a span in which the limit would have meant W requests or
more. A node that has watched for less than the span does not know yet. Nobody waits longer than the time that was set: the rollout then
fails here, and everywhere, with nothing changed.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple

from node_agent.refusal import Refusal

MIN_WINDOW = 200  # requests; a rate of fewer says little
LOOKS_PER_SPAN = 50
SHORTEST_STEP_S = 0.002


class Quiet(NamedTuple):
    """The limit and the time to wait for it."""

    requests_per_s: float
    window_requests: int
    wait_s: float

    @property
    def span_s(self) -> float:
        """In which the limit lets the whole window come."""
        return self.window_requests / self.requests_per_s


class Gate:
    """Belongs to one event loop; `watch` runs beside whoever waits."""

    def __init__(self, quiet: Quiet, counted: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        """`counted`: requests so far by deployment; it never falls."""
        self._quiet = quiet
        self._counted = counted
        self._clock = clock
        self._seen: list[tuple[float, Mapping[str, float]]] = []  # from just before the span on

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._step_s)

    def look(self) -> None:
        """Take in what was counted by now."""
        now = self._clock()
        self._seen.append((now, dict(self._counted())))
        del self._seen[: max(0, bisect_right(self._seen, now - self._quiet.span_s, key=lambda seen: seen[0]) - 1)]

    def came(self, deployment: str) -> float | None:
        """Requests within the last span or a little more, None when it was not watched for so long."""
        if not self._seen or self._clock() - self._seen[0][0] < self._quiet.span_s:
            return None
        return self._counted().get(deployment, 0.0) - self._seen[0][1].get(deployment, 0.0)

    def is_open(self, deployment: str) -> bool:
        came = self.came(deployment)
        return came is not None and came < self._quiet.window_requests

    async def passed(self, deployment: str) -> None:
        """Returns once the deployment is quiet. Raises Refusal not_quiet past the time."""
        deadline = self._clock() + self._quiet.wait_s
        while not self.is_open(deployment):
            if self._clock() >= deadline:
                raise self._refusal(deployment)
            await asyncio.sleep(self._step_s)

    @property
    def _step_s(self) -> float:
        return max(SHORTEST_STEP_S, min(1.0, self._quiet.span_s / LOOKS_PER_SPAN))

    def _refusal(self, deployment: str) -> Refusal:
        quiet, came = self._quiet, self.came(deployment)
        expected = f"fewer than {quiet.window_requests} requests within {quiet.span_s:g} s at some moment of {quiet.wait_s:g} s"
        return Refusal("not_quiet", f"requests of {deployment}", expected, "too short a look" if came is None else f"{came:.0f}", "gate")
