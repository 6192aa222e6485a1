"""Defects that were planted are noticed within a few seeds. `python -m tests.simulation --planted` runs the whole table."""

from __future__ import annotations

import pytest

from tests.simulation.planted import PLANTS, Plant, find

QUICK = (
    "no sync of the journal",
    "vote not stored (and no pre-vote)",
    "term not stored",
    "outcomes left out of snapshots",
    "repeats not recognized",
    "matching entries cut",
    "older terms committed by count",
    "an acknowledgement of one entry too many",
    "apply depends on the process",
    "a wrong state is not set aside",
)  # found by one of the first seeds; the others need more than a suite has time for


@pytest.mark.parametrize("name", QUICK)
def test_the_simulation_notices(name: str) -> None:
    (plant,) = [plant for plant in PLANTS if plant.name == name]
    found = find(plant, budget=12)
    assert found.seed, f"{name}: nothing broke in {found.tried} seeds"


@pytest.mark.parametrize("kinds", sorted({plant.plan.get("kinds", ()) for plant in PLANTS}), ids="+".join)
def test_without_the_defect_nothing_breaks_in_the_runs_that_show_it(kinds: tuple[str, ...]) -> None:
    plan = next(plant.plan for plant in PLANTS if plant.plan.get("kinds", ()) == kinds)
    found = find(Plant("none", "", plan=plan), first=101, budget=2)
    assert not found.seed, found.what
