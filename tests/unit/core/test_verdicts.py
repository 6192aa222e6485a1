"""Verdicts: none is recorded of what the deployment has moved on from, and those before the last are a bounded history."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from raftmeta.core import commands as c
from raftmeta.core.handlers.verdicts import MAX_PAST, MAX_PAST_BYTES, MAX_REPORT_BYTES, MAX_SUMMARY, VERDICTS
from raftmeta.core.state import encode_record
from raftmeta.core.types import Phase, Policy, Verdict
from tests.support.commands import World, check, declaration, serving_world, snapshot


def world() -> World:
    made = serving_world(level=2)
    made.serve("1", "r1")
    return made


def test_a_verdict_is_kept_with_what_it_was_computed_for() -> None:
    made = world()
    body = check(made.state, "diverged", report=b'{"findings": [1]}')
    made.ok(body, principal="checker")
    kept = made.state.verdicts["d"]
    assert kept == Verdict("d", "diverged", body.report, "checker", made.state.revision, made.now_ms, body.basis, "diverged summary")
    assert [(event.kind, event.key, event.value) for event in made.events] == [("verdict", "d", kept)]
    assert not made.state.past_verdicts


@pytest.mark.parametrize(
    "move",
    [
        lambda made: made.serve("2", "r2"),
        lambda made: (made.start("2", "r2"), made.reach("r2", Phase.COMMITTING)),
        lambda made: made.ok(declaration("d", "m", ("a1",))),
        lambda made: made.ok(declaration("d", "m", ("a1", "a3"))),
        lambda made: made.ok(msgspec.structs.replace(declaration(), policy=Policy(prepare_timeout_ms=5))),
        lambda made: made.ok(check(made.state, "diverged")),
    ],
    ids=["switched", "deciding", "fewer nodes", "other nodes", "another policy", "a later check"],
)
def test_a_verdict_of_what_the_deployment_has_moved_on_from_is_refused(move: Any) -> None:
    made = world()
    before = [check(made.state, verdict) for verdict in ("consistent", "diverged", "incomplete")]
    made.do(c.RaiseFeatureLevel(2))  # a revision passes
    move(made)
    for body in before:
        made.refused("verdict_outdated", body)
    made.ok(check(made.state))


def test_a_rollout_that_is_not_decided_outdates_no_verdict() -> None:
    made = world()
    body = check(made.state)
    made.start("2", "r2")
    made.reach("r2", Phase.SYNCING)
    made.ok(body)


def test_checks_that_overlap_are_recorded_in_the_order_in_which_they_began() -> None:
    made = world()
    early = check(made.state, "consistent")
    made.do(c.RaiseFeatureLevel(2))
    later = check(made.state, "diverged")
    made.ok(later)
    made.refused("verdict_outdated", early)
    assert made.state.verdicts["d"].verdict == "diverged"
    made.ok(check(made.state, "consistent"))
    assert [past.verdict for past in made.state.past_verdicts["d"].items] == ["diverged"]


@pytest.mark.parametrize("found", ["diverged", "incomplete"])
@pytest.mark.parametrize("passes", [0, 1])
def test_what_was_found_wrong_is_found_right_only_by_a_check_that_began_after_it_was_recorded(found: str, passes: int) -> None:
    """Both began at one revision, or one of them later but before the other one's verdict."""
    made = world()
    other = check(made.state, found)
    for _ in range(passes):
        made.do(c.RaiseFeatureLevel(2))
    consistent = check(made.state)
    made.do(c.RaiseFeatureLevel(2))
    made.ok(other)
    outcome = made.refused("verdict_outdated", consistent)
    assert f"found {found}, recorded at revision {made.state.verdicts['d'].revision}" in outcome.detail
    made.ok(check(made.state))


def test_a_check_that_begins_at_the_revision_of_the_verdict_before_it_counts() -> None:
    """What an operator does: a difference is found and recorded, mended, and checked again while nothing else is written."""
    made = world()
    for verdict in ("diverged", "incomplete", "consistent", "diverged", "consistent", "consistent"):
        body = check(made.state, verdict)
        assert body.basis.started_revision == made.state.revision
        made.ok(body)
    assert [past.verdict for past in made.state.past_verdicts["d"].items][-1] == "consistent"


def test_a_later_incomplete_does_not_hide_what_was_found_before_it_from_an_earlier_check() -> None:
    made = world()
    begun = [check(made.state, verdict) for verdict in ("diverged", "incomplete", "consistent")]
    made.ok(begun[0])
    made.ok(begun[1])
    made.refused("verdict_outdated", begun[2])


def test_a_difference_found_by_an_earlier_check_still_counts_after_a_consistent_one_of_the_same_revision() -> None:
    made = world()
    begun = [check(made.state, verdict) for verdict in ("consistent", "consistent", "diverged")]
    for body in begun:
        made.ok(body)
    assert made.state.verdicts["d"].verdict == "diverged"


@pytest.mark.parametrize(("changes", "count"), [({"node_count": 2}, 2), ({"node_count": 0}, 0), ({"node_count": 4}, 4)])
def test_consistent_speaks_of_every_node(changes: dict[str, Any], count: int) -> None:
    made = world()
    made.refused("nodes_not_covered", check(made.state, **changes))
    made.ok(check(made.state, "diverged", **changes))
    made.ok(check(made.state, "incomplete", **changes))


def test_nothing_that_serves_is_not_consistent() -> None:
    made = serving_world(level=2)
    made.refused("nodes_not_covered", check(made.state))
    made.ok(check(made.state, "incomplete"))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"generation": 1}, "bad_field"),
        ({"generation": -1}, "bad_field"),
        ({"order_revision": 1 << 40}, "bad_field"),
        ({"order_revision": 1}, "verdict_outdated"),
        ({"version": "2"}, "verdict_outdated"),
        ({"started_revision": 1 << 40}, "bad_field"),
        ({"started_revision": 0}, "verdict_outdated"),
        ({"node_count": -1}, "bad_field"),
    ],
)
def test_a_basis_that_cannot_be_is_refused(changes: dict[str, Any], code: str) -> None:
    made = world()
    made.refused(code, check(made.state, **changes))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"deployment": "x"}, "unknown_deployment"),
        ({"verdict": "fine"}, "bad_field"),
        ({"report": b"x" * (MAX_REPORT_BYTES + 1)}, "bad_field"),
        ({"summary": "x" * (MAX_SUMMARY + 1)}, "bad_field"),
    ],
)
def test_a_verdict_that_cannot_be_is_refused(changes: dict[str, Any], code: str) -> None:
    made = world()
    made.refused(code, msgspec.structs.replace(check(made.state), **changes))


def test_a_verdict_that_does_not_say_what_it_is_of_is_taken_below_level_two_only() -> None:
    made = serving_world(level=1)
    made.serve("1", "r1")
    legacy = c.RecordVerdict("d", "consistent", b"{}")
    made.ok(legacy)
    made.ok(c.RaiseFeatureLevel(2))
    made.refused("bad_field", legacy)
    made.ok(check(made.state, "diverged"))
    assert [(past.verdict, past.basis) for past in made.state.past_verdicts["d"].items] == [("consistent", None)]


def test_the_same_command_again_is_one_verdict() -> None:
    made = world()
    body = check(made.state)
    made.ok(body, key="k")
    kept = made.state
    assert made.do(body, key="k").repeated
    assert made.state is kept


def test_a_history_keeps_the_newest_up_to_its_number_without_reports() -> None:
    made = world()
    for number in range(MAX_PAST + 6):
        made.ok(check(made.state, "diverged" if number % 7 == 3 else "consistent", report=b"x" * 1_000))
    past = made.state.past_verdicts["d"]
    assert len(past.items) == MAX_PAST
    assert past.dropped_revision == past.items[0].revision - 1 > 0
    assert past.items[-1].revision == made.state.verdicts["d"].revision - 1
    assert b"xxx" not in encode_record(past)


def test_a_history_of_long_summaries_keeps_what_fits_and_the_newest_first() -> None:
    made = world()
    for _ in range(MAX_PAST):
        made.ok(msgspec.structs.replace(check(made.state), summary="ü" * MAX_SUMMARY))
    past = made.state.past_verdicts["d"]
    size = sum(len(encode_record(item)) for item in past.items)
    assert MAX_PAST_BYTES - 1_300 < size <= MAX_PAST_BYTES
    assert past.items[-1].revision == made.state.verdicts["d"].revision - 1
    assert past.dropped_revision == past.items[0].revision - 1
    snapshot(made.state)


@settings(max_examples=60, deadline=None)
@given(hs.lists(hs.tuples(hs.sampled_from(["begin", "record", "switch", "declare", "pass"]), hs.integers(0, 5)), max_size=24))
def test_whenever_a_verdict_is_taken_its_deployment_is_as_it_was_when_the_check_began(steps: list[tuple[str, int]]) -> None:
    """Checks begin, stall for any time and end in any order, while orders and nodes change."""
    made = world()
    begun: list[tuple[c.RecordCheck, object]] = []

    def judged() -> object:
        seen = made.state.deployments["d"]
        return seen.version, seen.order_revision, seen.primary, seen.standby

    newest = 0
    for place, (step, number) in enumerate(steps):
        if step == "begin":
            begun.append((check(made.state, VERDICTS[number % 3]), judged()))
        elif step == "record" and begun:
            body, then = begun[number % len(begun)]
            last = made.state.verdicts.get("d")
            doubted = body.verdict == "consistent" and last is not None and last.verdict != "consistent"
            outcome = made.do(body)
            if outcome.code == "ok":
                assert not doubted or (last is not None and body.basis.started_revision >= last.revision)
                assert then == judged()
                assert body.basis.started_revision >= newest
                newest = body.basis.started_revision
            elif not doubted:
                assert then != judged() or body.basis.started_revision < max(newest, made.state.deployments["d"].declared_revision)
        elif step == "switch":
            made.serve("2" if made.state.deployments["d"].version == "1" else "1", f"s{place}")
        elif step == "declare":
            made.ok(declaration("d", "m", ("a1", "a2") if number % 2 else ("a1",)))
        else:
            made.do(c.RaiseFeatureLevel(2))
