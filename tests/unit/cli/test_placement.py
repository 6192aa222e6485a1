from __future__ import annotations

import pytest

from raftmeta.cli import placement


@pytest.mark.parametrize(
    ("zones", "expected"),
    [
        ("a", []),
        ("a b c", []),
        ("a a b b c", []),
        ("a a c", ["zone a holds 2 of 3"]),
        ("a b", ["2 members bear the loss of no more than 1 do", "zone a holds 1 of 2", "zone b holds 1 of 2"]),
        ("a a b c", ["4 members bear the loss of no more than 3 do", "zone a holds 2 of 4"]),
        ("a a a b c", ["zone a holds 3 of 5"]),
    ],
)
def test_a_zone_without_which_nothing_can_be_decided_is_named(zones: str, expected: list[str]) -> None:
    found = placement.of_members(zones.split())
    assert len(found) == len(expected) and all(note.startswith(start) for note, start in zip(found, expected, strict=True)), found
