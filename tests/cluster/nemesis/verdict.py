"""What a run comes to: convergence, acknowledged writes, both checkers, and how long writes stood still under each kind of fault."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from tests.cluster.nemesis.clients import registers
from tests.cluster.nemesis.faults import Event
from tests.cluster.nemesis.plan import Kind
from tests.support.linearizability import Operation, SearchTooLarge, by_revision, search

SEARCHED = 160  # operations of a register that the exhaustive search looks at, from its first on


class Judgement(msgspec.Struct, frozen=True):
    """`violations` is empty when every promise was kept."""

    violations: tuple[str, ...]
    searched: int  # registers that the exhaustive search went through
    too_large: int  # registers that were too much for it; by_revision judged them all the same


def judge(history: Sequence[Operation]) -> Judgement:
    """Both checkers: the one by revision on everything, the exhaustive one on each register."""
    found = []
    if fault := by_revision(history):
        found.append(f"by revision: {fault}")
    searched = too_large = 0
    for name, operations in registers(history).items():
        try:
            fault = search(opening(operations, SEARCHED))
        except SearchTooLarge:
            too_large += 1
            continue
        searched += 1
        if fault:
            found.append(f"search of {name}: {fault}")
    return Judgement(tuple(found), searched, too_large)


def opening(operations: Sequence[Operation], count: int) -> list[Operation]:
    """A history as it stood at the moment when its operation number `count` began: what was not answered by then is open."""
    if len(operations) <= count:
        return list(operations)
    ordered = sorted(operations, key=lambda operation: operation.invoked)
    moment = ordered[count].invoked
    return [
        msgspec.structs.replace(operation, returned=None, revision=0)
        if operation.returned is not None and operation.returned >= moment
        else operation
        for operation in ordered[:count]
    ]


def missing_writes(history: Sequence[Operation], shown: dict[str, dict[str, str]]) -> list[str]:
    """Registers whose newest acknowledged write, and no other that may have come behind it, is what a member shows at the end."""
    newest: dict[str, Operation] = {}
    unanswered: dict[str, set[str]] = defaultdict(set)
    for operation in history:
        if operation.kind != "write":
            continue
        if operation.returned is None:
            unanswered[operation.key].add(operation.value)
        elif operation.key not in newest or operation.revision > newest[operation.key].revision:
            newest[operation.key] = operation
    missing = []
    for zone, values in shown.items():
        for name, value in values.items():
            write = newest[name]
            if value != write.value and value not in unanswered[name]:
                missing.append(f"{name} on {zone} shows {value!r}, but {write.value!r} was acknowledged at revision {write.revision}")
    return missing


def longest_gaps(acknowledged: Sequence[Operation], events: Sequence[Event], until: float) -> dict[Kind, float]:
    """The longest time without an acknowledged write, by the kind of fault in whose time (up to the next fault) it was."""
    times = sorted(operation.returned for operation in acknowledged if operation.returned is not None)
    longest: dict[Kind, float] = defaultdict(float)
    ends = [event.begin for event in events[1:]] + [until]
    for event, end in zip(events, ends, strict=True):
        inside = [event.begin, *(time for time in times if event.begin < time < end), end]
        longest[event.kind] = max(longest[event.kind], max(after - before for before, after in pairwise(inside)))
    return longest
