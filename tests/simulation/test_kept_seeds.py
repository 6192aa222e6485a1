"""Seeds that once found something, each with what it found. Run for ever, with the plan that found it."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import Cluster, Plan

KEPT = {
    770124: "a leader that missed a report never got it again while nothing was written",
    880410: "of the simulation: a member was taken for cut off that another fault had linked again",
    9910347: "of the simulation: what a member had said before it started again was taken for news",
}


@pytest.mark.parametrize("seed", KEPT)
def test_a_seed_that_found_something_passes(seed: int) -> None:
    report = Cluster(Plan(seed, members=5 if seed % 4 == 0 else 3)).run()
    assert report.acknowledged > 0
