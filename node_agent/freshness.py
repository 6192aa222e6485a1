"""Which tensors of a slot this process has computed the vector of lately, so that staging what differs need not read all the rest again.

Known by the slot's own memory only, and only for as long as the node's settings say; whoever is about to write takes what is known, which
forgets it, and notes it again once the slot is whole. A process that starts knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Known(NamedTuple):
    entry: str  # of the vector
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

    def note(self, slot: int, entries: Mapping[str, str], taken: Mapping[str, Known]) -> None:
        """The slot holds these. Those that were taken as known keep their age."""
        now = self._clock_ns()
        self._slots[slot] = {
            name: taken[name] if name in taken and taken[name].entry == entry else Known(entry, now) for name, entry in entries.items()
        }

    def clear(self) -> None:
        self._slots.clear()
