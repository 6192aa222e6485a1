"""Leases that keep requests back: each ends by itself, whoever asked for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.holds import MAX_HOLD_S, MAX_LEASE_S, Holds


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.ended: list[tuple[str, float]] = []
        self.holds = Holds(lambda: self.now, lambda name, seconds: self.ended.append((name, seconds)))


def test_a_hold_ends_with_its_lease_when_nobody_renews_it() -> None:
    scene = Scene()
    assert scene.holds.hold("a", 1.0) == 1.0
    scene.now += 0.999
    assert scene.holds.is_held("a") and not scene.holds.is_held("b")
    scene.now += 0.001
    assert not scene.holds.is_held("a")
    scene.now += 5
    scene.holds.expire()
    assert scene.ended == [("a", 1.0)], "as long as it held, not until somebody looked"


def test_a_renewed_hold_goes_on_and_one_that_is_let_go_is_over() -> None:
    scene = Scene()
    scene.holds.hold("a", 1.0)
    scene.now += 0.75
    assert scene.holds.hold("a", 1.0) == 1.0
    scene.now += 0.5
    assert scene.holds.is_held("a")
    scene.holds.let_go("a")
    scene.holds.let_go("a")
    assert not scene.holds.is_held("a")
    assert scene.ended == [("a", 1.25)]


def test_whoever_renewed_them_is_gone_so_all_of_them_are_over() -> None:
    scene = Scene()
    scene.holds.hold("a", 1.0)
    scene.holds.hold("b", 1.0)
    scene.holds.let_all_go()
    assert not scene.holds.is_held("a") and not scene.holds.is_held("b")
    assert sorted(scene.ended) == [("a", 0.0), ("b", 0.0)]


@pytest.mark.parametrize("end", ["let go", "all let go", "silence"])
def test_a_hold_that_is_renewed_for_ever_ends_with_the_bound_and_another_one_begins_only_after_its_end(end: str) -> None:
    scene = Scene()
    begun = scene.now
    while lasts := scene.holds.hold("a", 1.0):
        scene.now += min(lasts, 0.75)
        assert scene.now - begun <= MAX_HOLD_S
    assert not scene.holds.is_held("a") and scene.now - begun == MAX_HOLD_S
    assert scene.ended == [("a", MAX_HOLD_S)]
    for _ in range(1000):
        scene.now += 0.25
        scene.holds.expire()
        assert scene.holds.hold("a", 1.0) == 0.0 and not scene.holds.is_held("a")
    if end == "let go":
        scene.holds.let_go("a")
    elif end == "all let go":
        scene.holds.let_all_go()
    else:
        scene.now += MAX_HOLD_S
    assert scene.holds.hold("a", 1.0) == 1.0


def test_gaps_between_leases_move_no_bound() -> None:
    scene = Scene()
    begun = scene.now
    while scene.holds.hold("a", 1.0):
        scene.now += 1.5
        scene.holds.expire()
    assert scene.now - begun <= MAX_HOLD_S + 1.5


@given(st.lists(st.floats(0.01, MAX_LEASE_S), min_size=1, max_size=200))
def test_no_renewal_holds_longer_than_the_bound(leases: list[float]) -> None:
    scene = Scene()
    begun = scene.now
    for lease in leases:
        lasts = scene.holds.hold("a", lease)
        assert 0 <= lasts <= lease + 1e-6
        if not lasts:
            assert scene.now - begun >= MAX_HOLD_S - 1e-6
            break
        assert scene.holds.is_held("a")
        scene.now += lasts * 0.9
        assert scene.now - begun <= MAX_HOLD_S + 1e-6
    for name, seconds in scene.ended:
        assert name == "a" and seconds <= MAX_HOLD_S + 1e-6


@pytest.mark.parametrize("lease", [0.0, -1.0, MAX_LEASE_S + 0.1])
def test_a_lease_without_end_or_sense_is_refused(lease: float) -> None:
    scene = Scene()
    with pytest.raises(ValueError, match="lease"):
        scene.holds.hold("a", lease)
    assert not scene.holds.is_held("a")
