"""The checkers of linearizability say yes and no where they should: known histories, brute force, and histories of a real register."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations, count, permutations, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.linearizability import Operation, SearchTooLarge, by_revision, search
from tests.unit.support.histories import BOTH_REFUSE, FINE, ONLY_REVISIONS_REFUSE, Case, mutants, of_a_register, outage, read, write


def named(text: str) -> set[int]:
    """The clients whose operations a contradiction names."""
    return {int(client) for client in re.findall(r"client (\d+)", text)}


def numbered(*operations: Operation) -> list[Operation]:
    return [msgspec.structs.replace(operation, client=number) for number, operation in enumerate(operations, 1)]


@pytest.mark.parametrize("case", FINE, ids=lambda case: case.name)
def test_both_checkers_accept(case: Case) -> None:
    history = numbered(*case.operations)
    assert search(history) == ""
    assert by_revision(history) == ""


@pytest.mark.parametrize("case", BOTH_REFUSE, ids=lambda case: case.name)
def test_both_checkers_refuse_and_name_what_contradicts(case: Case) -> None:
    history = numbered(*case.operations)
    assert named(search(history)) == set(case.searched), search(history)
    assert named(by_revision(history)) == set(case.revised), by_revision(history)


@pytest.mark.parametrize("case", ONLY_REVISIONS_REFUSE, ids=lambda case: case.name)
def test_revisions_refuse_and_name_what_times_and_values_allow(case: Case) -> None:
    history = numbered(*case.operations)
    assert search(history) == ""
    assert named(by_revision(history)) == set(case.revised), by_revision(history)


@pytest.mark.parametrize("checker", [search, by_revision])
def test_the_order_of_the_list_does_not_matter(checker: object) -> None:
    assert callable(checker)
    for case in FINE + BOTH_REFUSE:
        history = numbered(*case.operations)
        assert bool(checker(history)) == bool(checker(history[::-1])) == (case in BOTH_REFUSE), case.name


@pytest.mark.parametrize("checker", [search, by_revision])
def test_what_is_no_operation_is_refused(checker: object) -> None:
    assert callable(checker)
    with pytest.raises(ValueError, match="neither"):
        checker([msgspec.structs.replace(read("a", 0, 1), kind="peek")])
    with pytest.raises(ValueError, match="returns after it began"):
        checker([read("a", 1, 0)])


def test_the_texts_can_be_read() -> None:
    history = numbered(write("a", 0, 1, 1), write("", 2, 3, 2), read("a", 4, 5, 2))
    assert search(history) == (
        "no order of these explains every answer; when client 3 read, 'k' could only be absent:\n"
        "  client 1 wrote 'k' = 'a' from 0.000000 to 1.000000, revision 1\n"
        "  client 2 wrote 'k' = absent from 2.000000 to 3.000000, revision 2\n"
        "  client 3 read 'k' = 'a' from 4.000000 to 5.000000, revision 2"
    )
    assert by_revision(history) == (
        "a read shows another value than its revision has: client 3 read 'k' = 'a' from 4.000000 to 5.000000, revision 2; "
        "the newest up to there is: client 2 wrote 'k' = absent from 2.000000 to 3.000000, revision 2; no unanswered write fits in between"
    )


# Brute force: every order, and every place for every unanswered write.


def orders(history: Sequence[Operation]) -> Iterator[tuple[Operation, ...]]:
    """Every order of the answered operations and any of the unanswered writes that explains every answer; for one key."""
    answered = [operation for operation in history if operation.returned is not None]
    unanswered = [operation for operation in history if operation.returned is None and operation.kind == "write"]
    for size in range(len(unanswered) + 1):
        for happened in combinations(unanswered, size):
            for order in permutations([*answered, *happened]):
                if explains(order):
                    yield order


def explains(order: Sequence[Operation]) -> bool:
    value, newest_begin = "", float("-inf")
    for operation in order:
        newest_begin = max(newest_begin, operation.invoked)
        if operation.returned is not None and operation.returned < newest_begin:
            return False
        if operation.kind == "write":
            value = operation.value
        elif operation.value != value:
            return False
    return True


def placings(history: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Every history in which some unanswered writes have a revision that is free."""
    answered = [operation for operation in history if operation.returned is not None]
    unanswered = [operation for operation in history if operation.returned is None and operation.kind == "write"]
    highest = max((operation.revision for operation in answered), default=0)
    for revisions in product(range(highest + 1), repeat=len(unanswered)):
        placed = [msgspec.structs.replace(write, revision=at) for write, at in zip(unanswered, revisions, strict=True) if at]
        yield answered + placed


def revisions_explain(operations: Sequence[Operation]) -> bool:
    writes = {operation.revision: operation for operation in operations if operation.kind == "write"}
    if 0 in writes or len(writes) < sum(operation.kind == "write" for operation in operations):
        return False
    for before, after in permutations(operations, 2):
        in_order = before.revision < after.revision if after.kind == "write" else before.revision <= after.revision
        if before.returned is not None and before.returned < after.invoked and not in_order:
            return False
    for operation in operations:
        if operation.kind == "read":
            shown = [writes[at] for at in sorted(writes) if at <= operation.revision and writes[at].key == operation.key]
            if operation.value != (shown[-1].value if shown else ""):
                return False
    return True


def with_revisions(history: Sequence[Operation], order: Sequence[Operation]) -> list[Operation]:
    """The history with the replies that a store would give that takes the operations in this order."""
    revisions, revision = {}, 0
    for operation in order:
        revision += operation.kind == "write"
        revisions[operation.client] = revision
    return [
        operation if operation.returned is None else msgspec.structs.replace(operation, revision=revisions[operation.client])
        for operation in history
    ]


@st.composite
def small_histories(draw: st.DrawFn, keys: str = "k") -> list[Operation]:
    """At most 6 operations at few times and with few values, answered in the order in which they are listed but for a slip or two."""
    values: dict[str, str] = {}
    revision, history = 0, []
    slips = draw(st.integers(0, 2))
    for client in range(draw(st.integers(1, 6))):
        key, kind, value = draw(st.sampled_from(keys)), draw(st.sampled_from(["write", "read"])), draw(st.sampled_from(["a", "b", ""]))
        invoked, lasts = draw(st.integers(-2, 1)), draw(st.sampled_from([0, 1, 2, 3, 9, None]))
        if kind == "write":
            happens = lasts is not None or draw(st.booleans())
            revision += happens
            values[key] = value if happens else values.get(key, "")
        elif slips and draw(st.booleans()):
            slips -= 1
        else:
            value = values.get(key, "")
        served = revision if not slips or draw(st.integers(0, 3)) else draw(st.integers(0, 5))
        begin = float(client + invoked)
        history.append(Operation(client, key, kind, value, begin, None if lasts is None else begin + lasts, 0 if lasts is None else served))
    return history


@settings(max_examples=200)
@given(small_histories())
def test_search_agrees_with_every_order_tried(history: list[Operation]) -> None:
    assert (search(history) == "") == any(True for _ in orders(history))


@settings(max_examples=200)
@given(small_histories("jk"))
def test_revisions_agree_with_every_placing_tried(history: list[Operation]) -> None:
    assert (by_revision(history) == "") == any(revisions_explain(placed) for placed in placings(history))


@settings(max_examples=200)
@given(small_histories("jk"))
def test_what_revisions_explain_search_explains(history: list[Operation]) -> None:
    assert by_revision(history) != "" or search(history) == ""


@settings(max_examples=200)
@given(small_histories())
def test_with_the_revisions_of_an_order_that_explains_both_accept(history: list[Operation]) -> None:
    order = next(orders(history), None)
    if order is None:
        assert search(history) != ""
    else:
        assert search(history) == by_revision(with_revisions(history, order)) == ""


@given(of_a_register())
def test_a_real_register_is_accepted_and_its_faults_are_not(history: list[Operation]) -> None:
    assert search(history) == ""
    assert by_revision(history) == ""
    for mutant in mutants(history):
        assert search(mutant) != "", mutant
        assert by_revision(mutant) != "", mutant


def test_the_fault_is_named_without_the_noise_around_it() -> None:
    history = outage(writes=30, reads=30, keys=1)
    tail = [write("old", 10, 11, 101), write("new", 12, 13, 103), read("old", 14, 15, 103)]
    beside = [write("newer", 12, 13.5, 102), read("new", 13, 19, 103)]
    after = [write("newest", 20, 21, 104), read("newest", 22, 23, 104), read("old", 24, 25, 104)]
    clients = count(1000)
    faulty = history + [msgspec.structs.replace(operation, client=next(clients), key="k0") for operation in tail + beside + after]
    text = search(faulty)
    assert named(text) == {1000, 1001, 1002}
    assert "'k0' could only be 'new':" in text
    assert named(by_revision(faulty)) == {1001, 1002}


# The search ends. Bounds on states, not on time: they say the same on every machine.


def test_thousand_operations_on_twenty_keys_take_few_states() -> None:
    history = outage(writes=15, reads=10, keys=20, rounds=2)
    assert len(history) == 1000
    assert search(history, max_states=20_000) == ""


def test_writes_that_wait_together_take_few_states() -> None:
    assert search(outage(writes=60, reads=0, keys=1), max_states=2_000) == ""


def test_reads_that_wait_with_their_writes_take_few_states() -> None:
    assert search(outage(writes=20, reads=20, keys=1), max_states=2_000) == ""


def test_unanswered_writes_of_few_values_take_few_states() -> None:
    history = outage(writes=6, reads=6, keys=1, rounds=20, values=3)
    assert by_revision(history) == ""
    assert search(history, max_states=2_000) == ""


def test_no_state_is_gone_through_twice() -> None:
    together = [operation for at in range(10) for operation in (write(f"v{at}", 0, 2), read(f"v{at}", 0, 1))]
    again = [operation for at in range(10) for operation in (write(f"v{at}", 10 + at, 10.2 + at), read(f"v{at}", 10.4 + at, 10.6 + at))]
    assert search(together + again, max_states=10_000) == ""


def test_a_search_that_is_too_large_says_so() -> None:
    with pytest.raises(SearchTooLarge, match=r"more than 50 states at client \d+ .*; \d+ writes and \d+ reads of 'k0' were in progress"):
        search(outage(writes=20, reads=20, keys=1), max_states=50)
