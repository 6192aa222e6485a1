"""Sorted sequences behave like sorted lists, wherever their chunks are cut."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from raftmeta.core.sequences import CHUNK, SortedKeys


def keys_of(numbers: range) -> SortedKeys[int]:
    return SortedKeys[int]().extended(numbers)


@pytest.mark.parametrize("count", [0, 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_growing_at_the_end_keeps_everything_in_order(count: int) -> None:
    at_once, in_steps = keys_of(range(count)), SortedKeys[int]()
    for number in range(count):
        in_steps = in_steps.extended([number])
    assert list(at_once) == list(in_steps) == list(range(count))
    assert len(at_once) == len(in_steps) == count


def test_growing_by_nothing_is_the_same_value() -> None:
    keys = keys_of(range(3))
    assert keys.extended([]) is keys


def test_growing_with_a_key_that_is_not_greater_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        keys_of(range(3)).extended([2])


def test_adding_a_key_that_is_there_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        keys_of(range(3)).added(1)


def test_pages_begin_after_a_key_whether_it_is_there_or_not() -> None:
    keys = keys_of(range(0, 10 * CHUNK, 2))
    for key in (-1, 0, 1, 2 * CHUNK - 2, 2 * CHUNK - 1, 2 * CHUNK, 20 * CHUNK):
        assert list(keys.after(key)) == [number for number in range(0, 10 * CHUNK, 2) if number > key]
    assert list(keys.after(None)) == list(keys)


def test_a_tuple_is_found_by_its_beginning() -> None:
    keys = SortedKeys[tuple[int, str]]().extended((number, "x") for number in range(3 * CHUNK))
    for number in (0, 1, CHUNK - 1, CHUNK, 3 * CHUNK - 1):
        assert keys.first_after((number,)) == (number, "x")


def test_removing_merges_what_became_small() -> None:
    keys = keys_of(range(20 * CHUNK))
    for number in range(20 * CHUNK):
        if number % CHUNK:
            keys = keys.removed(number)
    assert list(keys) == list(range(0, 20 * CHUNK, CHUNK))
    assert len(keys._chunks) <= 2


def test_inserting_in_the_middle_cuts_chunks_in_halves() -> None:
    keys = keys_of(range(0, 4 * CHUNK, 4))
    for number in range(1, 4 * CHUNK, 4):
        keys = keys.added(number)
        assert max(map(len, keys._chunks)) <= CHUNK
    assert min(map(len, keys._chunks)) >= CHUNK // 4


@settings(max_examples=60, deadline=None)
@given(hs.lists(hs.integers(0, 400), max_size=300), hs.integers(-1, 401))
def test_it_behaves_like_a_sorted_list(numbers: list[int], start: int) -> None:
    keys, model = SortedKeys[int](), list[int]()
    for number in numbers:
        before = list(keys)
        if number in model:
            changed = keys.removed(number)
            model.remove(number)
        else:
            changed = keys.added(number)
            model = sorted([*model, number])
        assert list(keys) == before  # the value it was made from is untouched
        keys = changed
        assert list(keys) == model
        assert len(keys) == len(model)
    assert list(keys.after(start)) == model[bisect_right(model, start) :]
