"""SHA-256 of tensors from the memory of a slot, for who does not want to rely on the vector alone.

A page at a time, so that whoever asks may stop between two pages and nothing goes on: the bytes of one page are bounded, but for a tensor
that is larger by itself. Reading runs in pieces on a thread that gives way to everybody else (`background`), within the budget
of all background work, and ends with the piece in which it was given up.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from node_agent.background import give_way
from node_agent.budget import Budget
from node_agent.layout import Placement

PIECE_BYTES = 2 << 20  # a millisecond or two of SHA-256
MAX_PAGE_BYTES = 1 << 30  # about a second of it
MAX_PAGE_TENSORS = 4_096  # some 500 KB of JSON


class Page(NamedTuple):
    places: tuple[Placement, ...]
    following: str  # the last name of this page when more follow, "" at the end


def page_of(places: Sequence[Placement], after: str, limit_bytes: int) -> Page:
    """The tensors behind `after` in order of their names: as many as the limit takes, and one at least."""
    rest = sorted((place for place in places if place.name > after), key=lambda place: place.name)
    size, end = 0, 0
    for place in rest[:MAX_PAGE_TENSORS]:
        size += place.size_bytes
        if end and size > limit_bytes:
            break
        end += 1
    return Page(tuple(rest[:end]), rest[end - 1].name if end < len(rest) else "")


def compute(memory: memoryview, places: Sequence[Placement], budget: Budget | None, given_up: Callable[[], bool]) -> dict[str, str] | None:
    """tensor -> SHA-256 of its bytes in `memory`, None once it was given up. Blocks."""
    found: dict[str, str] = {}
    faults: list[BaseException] = []

    def work() -> None:
        try:
            give_way()
            for place in places:
                with memory[place.offset : place.end] as data:
                    found[place.name] = _one(data, budget, given_up)
        except _GivenUp:
            found.clear()
        except BaseException as fault:  # noqa: BLE001 - raised again by the thread that waits for this one
            faults.append(fault)

    thread = threading.Thread(target=work, name="digests")
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return found if len(found) == len(places) else None


class _GivenUp(Exception):
    pass


def _one(data: memoryview, budget: Budget | None, given_up: Callable[[], bool]) -> str:
    sha = hashlib.sha256()
    for begin in range(0, len(data), PIECE_BYTES):
        if given_up():
            raise _GivenUp
        with data[begin : begin + PIECE_BYTES] as piece:
            if budget is not None:
                budget.spend(len(piece))
            sha.update(piece)
    return sha.hexdigest()
