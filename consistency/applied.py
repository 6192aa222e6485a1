"""What a node has applied, and how two of them stand to each other: the partial order of vectors of revisions. Pure.

A component is the last order, as (generation, revision), that a node obeyed of one control plane, under that control plane's name. Nodes of
one cluster have one component and are always in order; where zones decide by themselves there is a component for each, and two nodes can
each have obeyed something that the other has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

NOTHING = (0, 0)

Applied = Mapping[str, tuple[int, int]]  # control plane -> (generation, revision) of the last order obeyed; one left out: nothing


class Relation(StrEnum):
    EQUAL = "equal"
    BEHIND = "behind"  # the first has obeyed less
    AHEAD = "ahead"
    CONCURRENT = "concurrent"  # each has obeyed what the other has not


def relation(first: Applied, second: Applied) -> Relation:
    planes = first.keys() | second.keys()
    less = any(first.get(plane, NOTHING) < second.get(plane, NOTHING) for plane in planes)
    more = any(first.get(plane, NOTHING) > second.get(plane, NOTHING) for plane in planes)
    if less and more:
        return Relation.CONCURRENT
    return Relation.BEHIND if less else Relation.AHEAD if more else Relation.EQUAL
