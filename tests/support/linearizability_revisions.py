"""Whether the order that the revisions of the replies tell explains a history; O(n log n), all keys at once.

A write makes its revision, alone; a read shows its key as of its revision. So revisions must not go back in real time, and a read shows the
newest write of its key up to its revision, or an unanswered one that can have taken a revision in between.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec

from tests.support.operations import Operation, by_key, refuse_malformed, say


def by_revision(history: Sequence[Operation]) -> str:
    """Empty, or the operations that contradict each other."""
    refuse_malformed(history)
    return _one_write_each(history) or _real_time(history) or _values(history)


class _Gap(msgspec.Struct, frozen=True, order=True):
    """Somewhere from `first` to `last` an unanswered write must have taken a revision, because `read` shows it and `shown` does not."""

    first: int
    last: int
    number: int  # makes the order total
    write: Operation
    read: Operation
    shown: Operation | None


def _one_write_each(history: Sequence[Operation]) -> str:
    made: dict[int, Operation] = {}
    for operation in history:
        if operation.kind == "read" or operation.returned is None:
            continue
        if operation.revision < 1:
            return f"an answered write has a revision of 1 or more, this one has none: {say(operation)}"
        if operation.revision in made:
            return f"two writes made revision {operation.revision}: {say(made[operation.revision])}; {say(operation)}"
        made[operation.revision] = operation
    return ""


def _newest_before(history: Sequence[Operation]) -> list[Operation | None]:
    """For each operation the one with the highest revision that had returned before it began."""
    returned = sorted((operation.returned, number) for number, operation in enumerate(history) if operation.returned is not None)
    newest: Operation | None = None
    found: list[Operation | None] = [None] * len(history)
    at = 0
    for number in sorted(range(len(history)), key=lambda number: history[number].invoked):
        while at < len(returned) and returned[at][0] < history[number].invoked:
            operation = history[returned[at][1]]
            if newest is None or operation.revision > newest.revision:
                newest = operation
            at += 1
        found[number] = newest
    return found


def _real_time(history: Sequence[Operation]) -> str:
    for operation, before in zip(history, _newest_before(history), strict=True):
        if operation.returned is None or before is None:
            continue
        if operation.revision < before.revision:
            return f"revisions went back: {say(before)}; later {say(operation)}"
        if operation.kind == "write" and operation.revision == before.revision:
            return f"a revision was seen before its write began: {say(before)}; later {say(operation)}"
    return ""


def _values(history: Sequence[Operation]) -> str:
    """Each read shows the newest write of its key, after unanswered writes have been put where reads need them."""
    floors: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)  # of unanswered writes, by key and value
    for number, (operation, before) in enumerate(zip(history, _newest_before(history), strict=True)):
        if operation.kind == "write" and operation.returned is None:
            floors[operation.key, operation.value].append((before.revision + 1 if before else 1, number))
    spare = {written: deque(sorted(lowest)) for written, lowest in floors.items()}
    gaps: list[_Gap] = []
    for key, operations in by_key(history).items():
        shown: Operation | None = None
        answered = (operation for operation in operations if operation.returned is not None)
        for operation in sorted(answered, key=lambda operation: (operation.revision, operation.kind == "read")):
            if operation.kind == "read" and operation.value != (shown.value if shown else ""):
                # The write with the lowest floor serves best: what it could do for a later read, any other that fits here can do too.
                begin = shown.revision + 1 if shown else 1
                writes = spare.get((key, operation.value))
                if not writes or max(writes[0][0], begin) > operation.revision:
                    return _misfit(operation, shown)
                lowest, number = writes.popleft()
                gaps.append(_Gap(max(lowest, begin), operation.revision, number, history[number], operation, shown))
            shown = operation
    return _fill(gaps, {operation.revision for operation in history if operation.kind == "write" and operation.returned is not None})


def _misfit(read: Operation, shown: Operation | None) -> str:
    instead = f"the newest up to there is: {say(shown)}" if shown else "no write of this key was answered up to there"
    return f"a read shows another value than its revision has: {say(read)}; {instead}; no unanswered write fits in between"


def _fill(gaps: list[_Gap], taken: set[int]) -> str:
    """Give each gap a free revision of its own, the gap that ends first before the others; this finds a way if there is one."""
    waiting: list[tuple[int, int, _Gap]] = []
    gaps = sorted(gaps, reverse=True)
    revision = 0
    while gaps or waiting:
        revision = revision + 1 if waiting else max(revision + 1, gaps[-1].first)
        while gaps and gaps[-1].first <= revision:
            gap = gaps.pop()
            heappush(waiting, (gap.last, gap.number, gap))
        if revision in taken:
            continue
        last, _, gap = heappop(waiting)
        if revision > last:
            instead = f" and {say(gap.shown)}" if gap.shown else ""
            between = f"from {gap.first} to {last} that no other write made"
            return f"an unanswered write has no revision {between}: {say(gap.write)}; needed by {say(gap.read)}{instead}"
    return ""
