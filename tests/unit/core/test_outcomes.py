"""The store of outcomes: order, look-ups on the newest and on older values, and dropping across chunks."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from raftmeta.core.outcomes import CHUNK, Draft, Outcomes


def numbered(first: int, last: int) -> list[tuple[str, bytes]]:
    return [(f"key-{number}", b"%d" % number) for number in range(first, last)]


def extended(outcomes: Outcomes, records: list[tuple[str, bytes]], dropped: int = 0) -> Outcomes:
    draft = Draft(outcomes)
    for key, record in records:
        draft.add(key, record)
    for _ in range(dropped):
        draft.drop_oldest(draft.oldest()[0])
    return draft.finish()


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_records_come_back_in_order_and_by_key(count: int) -> None:
    outcomes = Outcomes.of(numbered(0, count))
    assert len(outcomes) == count
    assert list(outcomes.items()) == numbered(0, count)
    assert all(outcomes.get(key) == record for key, record in numbered(0, count))
    assert outcomes.get("other") is None
    assert [outcomes.at(place)[0] for place in range(count)] == [key for key, _ in numbered(0, count)]


def test_membership_is_that_of_keys() -> None:
    outcomes = Outcomes.of(numbered(0, 2))
    assert "key-1" in outcomes
    assert "key-2" not in outcomes
    assert 1 not in outcomes


@pytest.mark.parametrize("dropped", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK])
def test_whole_chunks_go_when_their_records_do(dropped: int) -> None:
    outcomes = extended(Outcomes.of(numbered(0, 3 * CHUNK)), [], dropped)
    assert list(outcomes.items()) == numbered(dropped, 3 * CHUNK)
    assert len(outcomes._chunks) == 3 - dropped // CHUNK
    grown = extended(outcomes, numbered(3 * CHUNK, 3 * CHUNK + 5))
    assert list(grown.items()) == numbered(dropped, 3 * CHUNK + 5)


def test_an_older_value_still_finds_its_own_and_nothing_newer() -> None:
    old = Outcomes.of(numbered(0, 10))
    new = extended(old, numbered(10, 20), dropped=5)
    assert [old.get(key) for key, _ in numbered(0, 10)] == [record for _, record in numbered(0, 10)]
    assert old.get("key-12") is None
    assert new.get("key-3") is None
    assert new.get("key-12") == b"12"


def test_two_values_may_be_made_from_one() -> None:
    old = Outcomes.of(numbered(0, 3))
    left, right = extended(old, [("left", b"l")]), extended(old, [("right", b"r")])
    assert (left.get("left"), left.get("right")) == (b"l", None)
    assert (right.get("left"), right.get("right")) == (None, b"r")
    assert list(old.items()) == numbered(0, 3)


def test_an_abandoned_draft_leaves_the_value_as_fast_as_it_was() -> None:
    outcomes = Outcomes.of(numbered(0, 3))
    draft = Draft(outcomes)
    draft.abandon()
    index = outcomes.take()
    assert sum(len(shard) for shard in index) == 3
    outcomes.give(index)
    assert outcomes.get("key-1") == b"1"


def test_a_look_up_that_loses_the_index_on_its_way_walks() -> None:
    class Vanishing(list):  # type: ignore[type-arg]
        """Loses its element between the question whether there is one and the answer."""

        def __getitem__(self, place: object) -> object:
            self.clear()
            raise IndexError

    class Taken(list):  # type: ignore[type-arg]
        """Loses its element after it was read."""

        def __getitem__(self, place: object) -> object:
            return self.pop()

    for kind in (Vanishing, Taken):
        outcomes = Outcomes.of(numbered(0, 3))
        outcomes._cell = kind(outcomes._cell)
        assert outcomes.get("key-2") == b"2"
        assert outcomes.get("key-9") is None


def test_the_draft_sees_what_was_added_and_dropped() -> None:
    draft = Draft(Outcomes.of(numbered(0, 2)))
    draft.add("new", b"n")
    assert (draft.count, draft.get("new"), draft.get("key-0")) == (3, b"n", b"0")
    assert draft.oldest() == ("key-0", b"0")
    draft.drop_oldest(draft.oldest()[0])
    draft.drop_oldest(draft.oldest()[0])
    assert draft.oldest() == ("new", b"n")
    draft.drop_oldest(draft.oldest()[0])
    assert (draft.count, draft.get("new")) == (0, None)
    assert list(draft.finish().items()) == []


@settings(max_examples=50, deadline=None)
@given(hs.lists(hs.tuples(hs.integers(0, 2 * CHUNK), hs.integers(0, 2 * CHUNK)), max_size=8))
def test_it_behaves_like_an_ordered_dictionary(steps: list[tuple[int, int]]) -> None:
    outcomes, model, number = Outcomes.of(), OrderedDict[str, bytes](), 0
    for added, dropped in steps:
        records = numbered(number, number + added)
        number += added
        model.update(records)
        dropped = min(dropped, len(model))
        for _ in range(dropped):
            model.popitem(last=False)
        outcomes = extended(outcomes, records, dropped)
        assert list(outcomes.items()) == list(model.items())
        assert all(outcomes.get(key) == record for key, record in model.items())
        assert len(outcomes) == len(model)
