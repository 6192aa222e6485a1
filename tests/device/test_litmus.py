"""The race that the switch's barrier closes, shown with and without it. Bounded: each arm ends after its rounds or its seconds."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.device
pytest.importorskip("numba")
if len(os.sched_getaffinity(0)) < 2:
    pytest.skip("two processors are needed for a race between two", allow_module_level=True)

from benchmarks import litmus, switch  # noqa: E402

ROUNDS = 20_000_000  # about 1 in 100 shows the race on an idle machine; far fewer on a busy one
SECONDS = 60.0


def test_the_litmus_fails_without_the_barrier_and_holds_with_it_over_as_many_rounds() -> None:
    off = litmus.run(ROUNDS, barrier=False, seconds=SECONDS, until_first=True)
    assert off.violations, f"{off.rounds} rounds without a barrier showed no violation: the test has lost its sight"
    on = litmus.run(20 * off.rounds, barrier=True, seconds=SECONDS)
    assert on.violations == 0
    assert on.rounds >= off.rounds


def test_no_request_starts_in_a_slot_that_is_being_rewritten() -> None:
    outcome = switch.measure(switches=5_000, workers=2)
    assert outcome.stale == 0
    assert len(outcome.call_us) == 5_000
    assert outcome.enters > 5_000
