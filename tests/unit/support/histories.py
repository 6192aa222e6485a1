"""Histories to try the checkers of linearizability on: known ones by hand, and those of a register that works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import msgspec
from hypothesis import strategies as st

from tests.support.linearizability import Operation


class Case(msgspec.Struct, frozen=True):
    """The operations are those of clients 1, 2, 3 and so on; the clients that a refusal names, if one is expected."""

    name: str
    operations: Sequence[Operation]
    searched: Sequence[int] = ()
    revised: Sequence[int] = ()


def write(value: str, invoked: float, returned: float | None, revision: int = 0, key: str = "k") -> Operation:
    return Operation(0, key, "write", value, invoked, returned, revision)


def read(value: str, invoked: float, returned: float | None, revision: int = 0, key: str = "k") -> Operation:
    return Operation(0, key, "read", value, invoked, returned, revision)


FINE = [
    Case("nothing", []),
    Case("one after the other", [write("a", 0, 1, 1), read("a", 2, 3, 1), write("b", 4, 5, 2), read("b", 6, 7, 2)]),
    Case("a key that nobody wrote", [read("", 0, 1), write("a", 2, 3, 1, "j"), read("", 4, 5, 1)]),
    Case("a read beside a write sees it", [write("a", 0, 9, 1), read("a", 1, 2, 1), read("a", 3, 4, 1)]),
    Case("a read beside a write does not see it yet", [write("a", 0, 9, 1), read("", 1, 2, 0), read("a", 3, 4, 1)]),
    Case("an instant in common is no order", [write("a", 0, 1, 1), read("", 1, 2, 0), read("a", 2, 3, 1)]),
    Case("writes side by side, the later one first", [write("a", 0, 9, 2), write("b", 1, 8, 1), read("b", 2, 3, 1), read("a", 4, 5, 2)]),
    Case("a write that nobody sees beside others", [write("a", 0, 9, 1), write("b", 0, 9, 2), write("c", 0, 9, 3), read("c", 10, 11, 3)]),
    Case("a deleted key", [write("a", 0, 1, 1), write("", 2, 3, 2), read("", 4, 5, 2)]),
    Case("one value twice", [write("a", 0, 1, 1), write("b", 2, 3, 2), read("b", 4, 5, 2), write("a", 6, 7, 3), read("a", 8, 9, 3)]),
    Case("an unanswered write that nobody sees", [write("a", 0, 1, 1), write("b", 2, None), read("a", 3, 4, 1), read("a", 5, 6, 1)]),
    Case("an unanswered write seen late", [write("a", 0, None), write("b", 1, 2, 1), read("b", 3, 4, 1), read("a", 5, 6, 2)]),
    Case("an unanswered write seen after revisions of other keys", [write("a", 0, None), write("x", 1, 2, 1, "j"), read("a", 3, 4, 2)]),
    Case("an unanswered write that begins as its read ends", [write("a", 1, None), read("a", 0, 1, 1)]),
    Case(
        "one value twice, the longer write last",
        [write("a", 0, 9, 3), write("a", 0, 3, 1), read("a", 1, 2, 1), write("b", 4, 5, 2), read("b", 6, 7, 2), read("a", 8, 9, 3)],
    ),
    Case(
        "a long read that does not take the first chance",
        [write("a", 0, None), read("a", 0, 9, 2), write("b", 1, 2, 1), read("b", 3, 4, 1), read("a", 5, 6, 2)],
    ),
    Case(
        "a long read that must take the first chance",
        [write("a", 0, 5, 1), read("a", 0, 5, 1), write("b", 1, 2, 2), read("b", 6, 7, 2), write("a", 8, 9, 3), read("a", 10, 11, 3)],
    ),
    Case("an unanswered read", [write("a", 0, 1, 1), read("b", 2, None), read("a", 3, 4, 1)]),
    Case(
        "two unanswered writes of one value, seen twice",
        [write("a", 0, None), write("a", 0, None), write("b", 3, 4, 2), read("a", 1, 2, 1), read("b", 5, 6, 2), read("a", 7, 8, 3)],
    ),
    Case(
        "the unanswered write that has less choice gets the revision",
        [write("a", 0, None), write("x", 0, None, 0, "j"), read("x", 1, 5, 1, "j"), read("a", 1, 5, 2)],
    ),
    Case("keys do not mix", [write("a", 0, 1, 1), write("x", 2, 3, 2, "j"), read("a", 4, 5, 2), read("x", 6, 7, 2, "j")]),
]

BOTH_REFUSE = [
    Case("a stale read", [write("a", 0, 1, 1), write("b", 2, 3, 2), read("a", 4, 5, 2)], [1, 2, 3], [2, 3]),
    Case("a stale read with its old revision", [write("a", 0, 1, 1), write("b", 2, 3, 2), read("a", 4, 5, 1)], [1, 2, 3], [2, 3]),
    Case("a lost write", [write("a", 0, 1, 1), read("", 2, 3, 1)], [1, 2], [1, 2]),
    Case("a write lost after it was seen", [write("a", 0, 9, 1), read("a", 1, 2, 1), read("", 3, 4, 1)], [1, 2, 3], [2, 3]),
    Case(
        "a stale read, after a write and its read that have nothing to do with it",
        [write("z", 0, 1, 1), write("a", 2, 9, 2), read("z", 2, 3, 1), write("b", 10, 11, 3), read("a", 12, 13, 3)],
        [2, 4, 5],
        [4, 5],
    ),
    Case(
        "a stale read beside another fault",
        [write("a", 0, 1, 1), write("b", 2, 3, 2), read("a", 4, 6, 2), read("x", 5, 7, 2)],
        [1, 2, 3],
        [2, 3],
    ),
    Case("a value that nobody wrote", [write("a", 0, 1, 1), read("x", 2, 3, 1)], [2], [1, 2]),
    Case("a value of another key", [write("a", 0, 1, 1, "j"), read("a", 2, 3, 1)], [2], [2]),
    Case("a read from the future", [read("a", 0, 1, 1), write("a", 2, 3, 1)], [1], [1, 2]),
    Case("writes against real time", [write("a", 0, 1, 2), write("b", 2, 3, 1), read("a", 4, 5, 2)], [1, 2, 3], [1, 2]),
    Case(
        "two reads that go back beside a write",
        [write("a", 0, 1, 1), write("b", 2, 9, 2), read("b", 3, 4, 2), read("a", 5, 6, 1)],
        [1, 2, 3, 4],
        [3, 4],
    ),
    Case(
        "two readers that disagree on the order of two writes",
        [write("a", 0, 9, 1), write("b", 0, 9, 2), read("a", 1, 2, 1), read("b", 3, 4, 2), read("b", 1, 2, 2), read("a", 3, 4, 1)],
        [1, 2, 3, 4, 5, 6],
        [5, 6],
    ),
    Case(
        "an unanswered write seen, then not",
        [write("a", 0, 1, 1), write("b", 2, None), read("b", 3, 4, 2), read("a", 5, 6, 2)],
        [1, 2, 3, 4],
        [3, 4],
    ),
    Case(
        "one unanswered write that happens twice",
        [write("a", 0, None), read("a", 1, 2, 1), write("b", 3, 4, 2), read("a", 5, 6, 3)],
        [1, 2, 3, 4],
        [3, 4],
    ),
    Case("an unanswered write seen before it began", [read("a", 0, 1, 1), write("a", 2, None)], [1], [1]),
    Case("a deleted key that comes back", [write("a", 0, 1, 1), write("", 2, 3, 2), read("a", 4, 5, 3)], [1, 2, 3], [2, 3]),
]

ONLY_REVISIONS_REFUSE = [
    Case("revisions that go back between clients", [write("a", 0, 1, 1), read("a", 2, 3, 5), read("a", 4, 5, 4)], (), [2, 3]),
    Case("revisions that go back between keys", [write("a", 0, 1, 2), write("x", 2, 3, 1, "j")], (), [1, 2]),
    Case("one revision for two writes", [write("a", 0, 9, 1), write("b", 0, 9, 1)], (), [1, 2]),
    Case("one revision for writes of two keys", [write("a", 0, 9, 1), write("x", 0, 9, 1, "j")], (), [1, 2]),
    Case("an answered write without a revision", [write("a", 0, 1)], (), [1]),
    Case("a revision read before its write began", [read("", 0, 1, 1), write("x", 2, 3, 1, "j")], (), [1, 2]),
    Case("a value beside its write at the revision before", [write("a", 0, 9, 2), read("a", 1, 8, 1)], (), [2]),
    Case("a value beside the next write at its revision", [write("a", 0, 9, 1), write("b", 0, 9, 2), read("a", 1, 8, 2)], (), [2, 3]),
    Case("two values at one revision", [write("a", 0, None), write("b", 0, 5, 1), read("b", 1, 2, 2), read("a", 3, 4, 2)], (), [3, 4]),
    Case("an unanswered write that began after the revision", [read("", 0, 1, 3, "j"), write("a", 2, None), read("a", 3, 4, 3)], (), [3]),
    Case(
        "two unanswered writes for one revision",
        [write("a", 0, None), write("x", 0, None, 0, "j"), read("a", 1, 2, 1), read("x", 1, 2, 1, "j")],
        (),
        [2, 4],
    ),
    Case(
        "an unanswered write whose revision others made",
        [write("a", 0, None), write("x", 0, 9, 1, "j"), write("y", 0, 9, 2, "j"), read("a", 1, 9, 2), read("", 1, 9, 0)],
        (),
        [1, 4, 5],
    ),
]


@st.composite
def of_a_register(draw: st.DrawFn) -> list[Operation]:
    """What a register that works answers. Operations happen between begin and end, values differ, and the last three are in order."""
    values: dict[str, str] = {}
    revision, history = 0, []
    kinds = draw(st.lists(st.sampled_from(["write", "read", "read", "unanswered", "never"]), max_size=25))
    for moment, kind in enumerate([*kinds, "write", "write", "read"]):
        last_three = moment >= len(kinds)
        key = "k" if last_three else draw(st.sampled_from("jk"))
        before, after = (0.25, 0.25) if last_three else (draw(st.sampled_from([0, 0.25, 1.5, 4])), draw(st.sampled_from([0, 0.25, 1.5, 4])))
        began, ended = moment - before, None if kind in ("unanswered", "never") else moment + after
        if kind == "read":
            history.append(Operation(moment, key, "read", values.get(key, ""), began, ended, revision))
            continue
        if kind != "never":
            revision += 1
            values[key] = f"v{moment}"
        history.append(Operation(moment, key, "write", f"v{moment}", began, ended, revision if ended is not None else 0))
    return history


def mutants(history: Sequence[Operation]) -> Iterator[list[Operation]]:
    """The history with one fault, for each fault that no order can explain as long as values differ."""
    reads = [operation for operation in history if operation.kind == "read"]
    writes = [operation for operation in history if operation.kind == "write"]
    for shown in reads:
        rest = [operation for operation in history if operation is not shown]
        for old in writes:
            if old.key != shown.key:
                continue
            wrong = msgspec.structs.replace(shown, value=old.value)
            if old.value == shown.value:
                yield [operation for operation in history if operation is not old]  # its write never was
            elif shown.returned is not None and shown.returned < old.invoked:
                yield [*rest, wrong]  # it knows what is to come
            elif any(_before(old, new) and _before(new, shown) for new in writes if new.key == old.key):
                yield [*rest, wrong]  # it does not know what was done


def _before(one: Operation, other: Operation) -> bool:
    return one.returned is not None and one.returned < other.invoked


def outage(writes: int, reads: int, keys: int, rounds: int = 1, values: int = 0) -> list[Operation]:
    """Per round and key so many writes and reads that begin while nobody is answered, and then return; they happen in any order.

    With a number of values every fourth write has no answer, and only so many values are written.
    """
    random, history = Random(1), list[Operation]()
    held: dict[str, str] = {}
    revision, now = 0, 0.0
    for _ in range(rounds):
        order = [(f"k{key}", kind) for key in range(keys) for kind in ["write"] * writes + ["read"] * reads]
        random.shuffle(order)
        for key, kind in order:
            client = len(history)
            if kind == "write":
                revision += 1
                held[key] = f"v{client % values if values else client}"
            began, ended = now + random.random(), now + 2 + random.random()
            answered = kind == "read" or not values or revision % 4 > 0
            history.append(Operation(client, key, kind, held.get(key, ""), began, ended if answered else None, revision if answered else 0))
        now += 4
    return history
