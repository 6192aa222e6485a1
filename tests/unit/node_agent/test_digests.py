"""SHA-256 of what a slot holds: pages of it, and reading that ends when nobody wants it any more."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent import digests
from node_agent.layout import Placement


def places(sizes: dict[str, int]) -> list[Placement]:
    made, offset = [], 0
    for name, size in sizes.items():
        made.append(Placement(name, "U8", (size,), offset, size))
        offset += size
    return made


@given(st.dictionaries(st.text("abcé\U0001f600.", min_size=1, max_size=4), st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_pages_give_every_tensor_once_in_order_and_are_larger_than_asked_only_for_one_tensor(sizes: dict[str, int], limit: int) -> None:
    seen: list[str] = []
    after = ""
    while True:
        page = digests.page_of(places(sizes), after, limit)
        assert len(page.places) == 1 or sum(place.size_bytes for place in page.places) <= limit
        seen += [place.name for place in page.places]
        if not page.following:
            break
        assert page.following == seen[-1]
        after = page.following
    assert seen == sorted(sizes)


@given(st.integers(0, 9), st.integers(1, 4))
def test_a_page_has_a_bounded_number_of_tensors(count: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "MAX_PAGE_TENSORS", most)
        page = digests.page_of(places({f"t{number}": 0 for number in range(count)}), "", 1 << 20)
    assert len(page.places) == min(count, most)
    assert page.following == (f"t{most - 1}" if count > most else "")


def test_each_tensor_gets_the_digest_of_its_own_bytes() -> None:
    memory = bytes(range(256)) * 20_000  # three pieces
    made = places({"a": 100, "empty": 0, "large": digests.PIECE_BYTES + 5})
    found = digests.compute(memoryview(memory), made, None, lambda: False)
    assert found == {place.name: hashlib.sha256(memory[place.offset : place.end]).hexdigest() for place in made}


def test_reading_that_is_given_up_ends_with_its_piece_and_gives_nothing() -> None:
    asked = 0

    def given_up() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    made = places({"a": 10, "large": 3 * digests.PIECE_BYTES})
    assert digests.compute(memoryview(bytes(4 * digests.PIECE_BYTES)), made, None, given_up) is None
    assert asked == 3


def test_what_breaks_while_memory_is_read_reaches_who_asked() -> None:
    def given_up() -> bool:
        raise OSError(5, "gone")

    with pytest.raises(OSError, match="gone"):
        digests.compute(memoryview(b"x" * 10), places({"a": 10}), None, given_up)
