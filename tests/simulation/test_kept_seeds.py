"""Seeds that once found something, each with what it found. Run for ever, with the plan that found it."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import Cluster, Plan

KEPT = {  # seed -> (stormy seconds, calm seconds, what it found)
    770124: (30.0, 30.0, "a leader that missed a report never got it again while nothing was written"),
    880410: (30.0, 30.0, "of the simulation: a member was taken for cut off that another fault had linked again"),
    9910347: (30.0, 30.0, "of the simulation: what a member had said before it started again was taken for news"),
    20261852: (16.0, 18.0, "of the simulation: the same, by a member that was paused and read its inbox late"),
    30010254: (20.5, 18.0, "of the simulation: a disk was replaced while a member that was down held the removal of another one"),
    30010299: (20.5, 18.0, "of the simulation: the same, with the removal in the log of a member that came back"),
    39013308: (20.5, 18.0, "what a member said before it had caught up came late, and one that waited for it was not set aside for 10 s"),
    37010592: (20.5, 18.0, "of the simulation: what a member had said before it was set aside, read late by one that was paused"),
}


@pytest.mark.parametrize("seed", KEPT)
def test_a_seed_that_found_something_passes(seed: int) -> None:
    stormy_s, calm_s, _ = KEPT[seed]
    report = Cluster(Plan(seed, members=5 if seed % 4 == 0 else 3, stormy_s=stormy_s, calm_s=calm_s)).run()
    assert report.acknowledged > 0
