"""Whether a history of operations can be explained by one register per key that takes each of them at one moment.

Two checkers. `search` needs nothing but times and values and looks for an order, key by key; it may give up (`SearchTooLarge`).
`by_revision` takes the order from the revisions of the replies and only verifies it, across all keys at once, in O(n log n). What
`by_revision` accepts `search` accepts too; the reverse holds only if the revisions tell the truth.

Both take a key for absent until the history writes it. An unanswered write may take effect at any time after it began, or never; an
unanswered read says nothing. Operations that touch at one instant count as concurrent: never a false alarm because of a coarse clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from tests.support.linearizability_revisions import by_revision
from tests.support.operations import Operation, by_key, refuse_malformed, say, say_value

__all__ = ["MAX_STATES", "Operation", "SearchTooLarge", "by_revision", "search"]

MAX_STATES = 100_000  # of one call of `search`: half a minute at worst on a busy processor
_COMPARED = 64  # states that a new one is compared with; more would find little more and cost the square of their number

_INVOKED, _RETURNED = range(2)  # of events at the same instant, in this order


class SearchTooLarge(Exception):
    """`search` went through as many states as it may; the history is neither proved nor refuted. Use a shorter one, or `by_revision`."""


def search(history: Sequence[Operation], max_states: int = MAX_STATES) -> str:
    """Empty, or the operations of one key that contradict each other, as few as are needed to see it."""
    refuse_malformed(history)
    budget = _Budget(max_states)
    for operations in by_key(history).values():
        walk = _Walk(operations, budget)
        if failed := walk.run():
            return _explain(operations, failed, walk.possible)
    return ""


# The search of one key. Wing and Gong's: try whatever may come next, and go back when it does not fit. Lowe's: an operation is placed only
# when one returns that needs it (just in time), and a state that was seen is not gone through again. For registers more is known, and
# without it a few seconds in which nobody is answered make 2^n states:
# - a read that fits the value is placed at once, since it changes nothing;
# - a write that no read sees can be placed just before any other one ("covered"); so no write in progress is owed any more once another is
#   placed, and only those are tried whose value a read in progress waits for, and the one that returns;
# - of writes with one value the one that returns first is tried, since the others can do later whatever it can;
# - a write that only reads in progress see fits in with them just before any other one.


class _Budget:
    """How many states may still be gone through."""

    def __init__(self, states: int) -> None:
        self.states = self.left = states


class _State(NamedTuple):
    value: str
    spent: int  # bits of the writes in progress that are placed
    owed: int  # bits of the operations in progress that must be placed before they return

    def without(self, bit: int) -> _State:
        return _State(self.value, self.spent & ~bit, self.owed & ~bit)

    def can_do_all_of(self, other: _State) -> bool:
        return self.value == other.value and not self.spent & ~other.spent and not self.owed & ~other.owed


class _Reached:
    """States, without those that can do nothing that an earlier one cannot."""

    def __init__(self) -> None:
        self.by_value: dict[str, list[_State]] = {}
        self._seen: set[_State] = set()

    def add(self, state: _State) -> bool:
        """False if a state is there already that can do as much."""
        if state in self._seen:
            return False
        self._seen.add(state)
        states = self.by_value.setdefault(state.value, [])
        if any(other.can_do_all_of(state) for other in states[-_COMPARED:]):
            return False
        states.append(state)
        return True

    def states(self) -> list[_State]:
        return [state for states in self.by_value.values() for state in states]


class _Walk:
    """All states in which one register can be, from event to event."""

    def __init__(self, operations: Sequence[Operation], budget: _Budget) -> None:
        self.possible: list[str] = []  # what the register could hold when the last operation returned
        self._budget = budget
        self._states = [_State("", 0, 0)]
        self._reads: dict[int, Operation] = {}  # in progress, by their bit
        self._writes: dict[int, Operation] = {}
        self._bits: dict[int, int] = {}  # of the operations in progress, by their number
        reads = [operation for operation in operations if operation.kind == "read" and operation.returned is not None]
        # Value -> when the last read of it begins.
        self._last_read = {read.value: read.invoked for read in sorted(reads, key=lambda read: read.invoked)}
        self._events: list[tuple[float, int, int, Operation]] = []
        for number, operation in enumerate(operations):
            if operation.returned is not None:
                self._events.append((operation.returned, _RETURNED, number, operation))
            elif operation.kind == "read" or operation.value not in self._last_read:
                continue  # it says nothing, or nobody saw it
            self._events.append((operation.invoked, _INVOKED, number, operation))
        self._events.sort()

    def run(self) -> Operation | None:
        """None, or the read that fits nowhere. (A write always fits last.)"""
        for _, what, number, operation in self._events:
            if what == _INVOKED:
                self._begin(number, operation)
                continue
            bit = self._bits.pop(number)
            states = self._place_by_now(bit, operation)
            if not states:
                return operation
            after = _Reached()
            for state in states:
                after.add(state.without(bit))
            self._states = after.states()
            self._writes.pop(bit, None)
            self._reads.pop(bit, None)
        return None

    def _begin(self, number: int, operation: Operation) -> None:
        used = sum(self._bits.values())
        bit = self._bits[number] = ~used & (used + 1)
        (self._reads if operation.kind == "read" else self._writes)[bit] = operation
        if operation.returned is not None:
            fits = operation.value if operation.kind == "read" else None
            self._states = [state if state.value == fits else state._replace(owed=state.owed | bit) for state in self._states]

    def _place_by_now(self, bit: int, operation: Operation) -> list[_State]:
        """The states in which the operation that returns is placed or covered, among those that can be reached by now."""
        first_last = sorted(self._writes.items(), key=lambda item: _end(item[1]), reverse=True)
        reached, waiting, fitting = _Reached(), list(self._states), []
        while waiting:
            state = waiting.pop()
            if not reached.add(state):
                continue
            self._budget.left -= 1
            if self._budget.left < 0:
                raise SearchTooLarge(
                    f"more than {self._budget.states} states at {say(operation)}; "
                    f"{len(self._writes)} writes and {len(self._reads)} reads of {operation.key!r} were in progress"
                )
            if not state.owed & bit:
                fitting.append(state)
            if not state.spent & bit and (state.owed & bit or operation.kind == "write"):
                ready = {write.value: write_bit for write_bit, write in first_last if not state.spent & write_bit}
                waiting += self._reachable(state, ready, operation)
        self.possible = sorted(reached.by_value)
        return fitting

    def _reachable(self, state: _State, ready: dict[str, int], returning: Operation) -> Iterator[_State]:
        """The states after one more write; `ready` holds the one to try for each value."""
        awaited = {read.value for bit, read in self._reads.items() if state.owed & bit}
        over = {value for value in awaited & ready.keys() if self._last_read[value] <= _end(returning)}
        for value, write_bit in ready.items():
            if value in awaited or value == returning.value:
                fits = over | {value}
                owed = sum(bit for bit, read in self._reads.items() if state.owed & bit and read.value not in fits)
                yield _State(value, state.spent | write_bit, owed)


def _end(operation: Operation) -> float:
    return inf if operation.returned is None else operation.returned


def _explain(operations: list[Operation], failed: Operation, possible: list[str]) -> str:
    """The read that fits nowhere, and the operations without those that the contradiction does not need.

    What began after the failure cannot have caused it. A read can go, and a write once nobody reads its value: an order of all is an order
    of the rest too. So a rest without an order proves that there is none of all.
    """
    end = _end(failed)
    rest = [operation for operation in operations if operation.invoked <= end and (operation.kind == "write" or _end(operation) <= end)]
    if not any(operation.kind == "write" and operation.value == failed.value for operation in rest) and failed.value:
        return f"{say(failed)}, but nobody had begun to write that by then"
    budget = _Budget(MAX_STATES)  # what cannot be shown to be dispensable within it stays
    size = len(rest)
    while size:
        before, at = len(rest), 0
        while at < len(rest):
            fewer = _without(rest, at, at + size)
            walk = _Walk(fewer, budget)
            if len(fewer) < len(rest) and _fails(walk):
                rest, possible = fewer, walk.possible
            else:
                at += size
        size = 1 if size == 1 and len(rest) < before else size // 2
    held = " or ".join(say_value(value) for value in possible)
    listed = "".join(f"\n  {say(operation)}" for operation in sorted(rest, key=lambda operation: operation.invoked))
    return f"no order of these explains every answer; when client {failed.client} read, {failed.key!r} could only be {held}:{listed}"


def _without(operations: list[Operation], begin: int, end: int) -> list[Operation]:
    read = {operation.value for operation in operations[:begin] + operations[end:] if operation.kind == "read"}
    kept = [operation for operation in operations[begin:end] if operation.kind == "write" and operation.value in read]
    return operations[:begin] + kept + operations[end:]


def _fails(walk: _Walk) -> bool:
    try:
        return walk.run() is not None
    except SearchTooLarge:
        return False
