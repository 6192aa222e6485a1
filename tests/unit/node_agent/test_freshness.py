from __future__ import annotations

import numpy as np

from consistency.vector import TensorVector
from node_agent.freshness import Freshness


class Clock:
    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def of(**entries: str) -> dict[str, TensorVector]:
    return {name: TensorVector(entry, np.zeros((1, 2), np.uint64)) for name, entry in entries.items()}


def taken_entries(fresh: Freshness, slot: int) -> dict[str, str]:
    return {name: known.vector.entry for name, known in fresh.take(slot).items()}


def test_what_is_known_is_known_once_and_not_longer_than_its_age() -> None:
    clock = Clock()
    fresh = Freshness(100, clock)
    fresh.note(0, of(a="1", b="2"), {})
    clock.now += 60
    taken = fresh.take(0)
    assert {name: known.vector.entry for name, known in taken.items()} == {"a": "1", "b": "2"}
    assert fresh.take(0) == {}, "whoever takes is about to write"
    fresh.note(0, of(a="1", b="9"), taken)
    clock.now += 60
    assert taken_entries(fresh, 0) == {"b": "9"}, "a keeps its age, b was computed anew"


def test_slots_are_told_apart_and_all_can_be_forgotten() -> None:
    fresh = Freshness(100, Clock())
    fresh.note(0, of(a="1"), {})
    assert fresh.take(1) == {}
    fresh.clear()
    assert fresh.take(0) == {}


def test_an_age_of_nothing_knows_nothing() -> None:
    fresh = Freshness(0, Clock())
    fresh.note(0, of(a="1"), {})
    assert fresh.take(0) == {}


def test_what_a_slot_was_noted_to_hold_stays_known_to_the_scrub_at_any_age_until_somebody_writes() -> None:
    clock = Clock()
    fresh = Freshness(100, clock)
    noted = of(a="1", b="2")
    fresh.note(0, noted, {})
    clock.now += 10_000
    assert fresh.known(0) == fresh.known(0) == noted
    fresh.take(0)
    assert fresh.known(0) == {}
