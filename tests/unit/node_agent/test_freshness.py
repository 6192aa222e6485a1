from __future__ import annotations

from node_agent.freshness import Freshness


class Clock:
    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def test_what_is_known_is_known_once_and_not_longer_than_its_age() -> None:
    clock = Clock()
    fresh = Freshness(100, clock)
    fresh.note(0, {"a": "1", "b": "2"}, {})
    clock.now += 60
    taken = fresh.take(0)
    assert {name: known.entry for name, known in taken.items()} == {"a": "1", "b": "2"}
    assert fresh.take(0) == {}, "whoever takes is about to write"
    fresh.note(0, {"a": "1", "b": "9"}, taken)
    clock.now += 60
    assert {name: known.entry for name, known in fresh.take(0).items()} == {"b": "9"}, "a keeps its age, b was computed anew"


def test_slots_are_told_apart_and_all_can_be_forgotten() -> None:
    fresh = Freshness(100, Clock())
    fresh.note(0, {"a": "1"}, {})
    assert fresh.take(1) == {}
    fresh.clear()
    assert fresh.take(0) == {}


def test_an_age_of_nothing_knows_nothing() -> None:
    fresh = Freshness(0, Clock())
    fresh.note(0, {"a": "1"}, {})
    assert fresh.take(0) == {}
