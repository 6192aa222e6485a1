"""The relation of two vectors of revisions is a partial order, whatever they hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from consistency.applied import Applied, Relation, relation

VECTORS = st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=3)
OPPOSITE = {Relation.BEHIND: Relation.AHEAD, Relation.AHEAD: Relation.BEHIND}


@given(VECTORS, VECTORS)
def test_it_reads_the_same_from_both_sides(first: Applied, second: Applied) -> None:
    assert relation(second, first) is OPPOSITE.get(relation(first, second), relation(first, second))


@given(VECTORS, VECTORS, VECTORS)
def test_behind_is_transitive(first: Applied, second: Applied, third: Applied) -> None:
    at_most = {Relation.EQUAL, Relation.BEHIND}
    if relation(first, second) in at_most and relation(second, third) in at_most:
        assert relation(first, third) in at_most


@given(VECTORS, st.sampled_from("abc"))
def test_one_more_order_of_any_control_plane_is_ahead(before: Applied, plane: str) -> None:
    generation, revision = before.get(plane, (0, 0))
    assert relation({**before, plane: (generation, revision + 1)}, before) is Relation.AHEAD
    assert relation({**before, plane: (generation + 1, 0)}, before) is Relation.AHEAD, "a generation outweighs every revision"


def test_nothing_applied_is_the_same_as_not_heard_of() -> None:
    assert relation({"a": (0, 0)}, {}) is Relation.EQUAL


def test_each_ahead_in_something_is_concurrent() -> None:
    assert relation({"a": (1, 5), "b": (1, 2)}, {"a": (1, 4), "b": (1, 3)}) is Relation.CONCURRENT
    assert relation({"a": (1, 5)}, {"b": (1, 5)}) is Relation.CONCURRENT
