"""Which tensors of a slot this process has computed the vector of lately, so that staging what differs need not read all the rest again.

Known by the slot's own memory only, and fresh only for as long as the node's settings say; whoever is about to write takes what is known,
which forgets it, and notes it again once the slot is whole. A process that starts knows nothing. Whatever its age, what is known is what
the scrub holds the memory against: entries were equal to the manifest's when they were noted, and block checks are part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from consistency.vector import TensorVector


class Known(NamedTuple):
    vector: TensorVector
    at_ns: int  # when it was computed


class Freshness:
    def __init__(self, max_age_ns: int, clock_ns: Callable[[], int]) -> None:
        self._max_age_ns = max_age_ns
        self._clock_ns = clock_ns
        self._slots: dict[int, dict[str, Known]] = {}

    def take(self, slot: int) -> dict[str, Known]:
        """What is known and young enough, by tensor. From here on nothing is known of the slot."""
        oldest = self._clock_ns() - self._max_age_ns
        return {name: known for name, known in self._slots.pop(slot, {}).items() if known.at_ns > oldest}

    def note(self, slot: int, vectors: Mapping[str, TensorVector], taken: Mapping[str, Known]) -> None:
        """The slot holds these. Those that were taken as known keep their age."""
        now = self._clock_ns()
        self._slots[slot] = {
            name: taken[name] if name in taken and taken[name].vector.entry == vector.entry else Known(vector, now)
            for name, vector in vectors.items()
        }

    def known(self, slot: int) -> dict[str, TensorVector]:
        """What the slot was last noted to hold, of any age. It stays known."""
        return {name: known.vector for name, known in self._slots.get(slot, {}).items()}

    def clear(self) -> None:
        self._slots.clear()
