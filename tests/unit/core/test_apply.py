"""Envelopes, idempotency keys, retention of outcomes, revisions: what apply does whatever the command is."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import msgspec
import pytest

from raftmeta.core import commands as c
from raftmeta.core.apply import DROPS_PER_COMMAND, HANDLERS, apply, apply_batch
from raftmeta.core.state import MAX_INT, State
from raftmeta.core.types import Limits, Outcome
from tests.support.commands import (
    HOUR_MS,
    NOW_MS,
    World,
    check_state,
    command_bytes,
    declaration,
    publication,
    serving_world,
    snapshot,
)


def applied(state: State, payload: bytes) -> tuple[State, Outcome]:
    after, (outcome,), _ = apply_batch(state, [payload])
    check_state(after)
    return after, outcome


def timed_key(at_ms: int, rest: str = "a") -> str:
    return f"{at_ms:013}-{rest}"


def test_every_kind_of_command_has_a_handler() -> None:
    assert set(HANDLERS) == set(c.Body.__args__)


def test_a_command_first_applied_raises_the_revision_even_when_refused() -> None:
    world = World()
    assert world.do(publication()).revision == 1
    assert world.do(publication("m", "1", "other")).revision == 2
    assert world.do(publication("/")).revision == 3
    assert world.state.revision == 3


def test_a_repeated_command_gets_the_first_outcome_and_the_state_stays_the_same_value() -> None:
    world = World()
    first = world.do(publication("m", "1"), key="k")
    world.ok(publication("m", "2"))
    before = world.state
    again = world.do(publication("m", "1"), key="k")
    assert again == msgspec.structs.replace(first, repeated=True)
    assert world.state is before
    assert world.events == ()


def test_a_repeated_refusal_gets_the_first_refusal_although_it_would_succeed_now() -> None:
    world = World()
    first = world.refused("unknown_model", declaration(), key="k")
    world.ok(publication("m", "1"))
    assert world.do(declaration(), key="k") == msgspec.structs.replace(first, repeated=True)
    assert "d" not in world.state.deployments


def test_a_key_with_another_body_is_refused_and_changes_nothing() -> None:
    world = World()
    world.ok(publication("m", "1"), key="k")
    before = world.state
    outcome = world.do(publication("m", "2"), key="k")
    assert (outcome.code, outcome.revision, outcome.repeated) == ("idempotency_reused", 1, False)
    assert world.state is before


def test_a_key_belongs_to_its_principal() -> None:
    world = World()
    world.ok(publication("m", "1"), key="k", principal="ann")
    before = world.state
    outcome = world.do(publication("m", "1"), key="k", principal="bob")
    assert outcome.code == "idempotency_reused"
    assert "ann" not in outcome.detail
    assert world.state is before


@pytest.mark.parametrize("starting", [c.Activate("d", "1", None, "r1"), c.RollBack("d", None, "r1")])
def test_a_retry_with_the_rollout_id_of_another_member_is_a_repeat(starting: c.Activate | c.RollBack) -> None:
    world = serving_world()
    first = world.do(starting, key="k")
    again = world.do(msgspec.structs.replace(starting, rollout_id="r2"), key="k")
    assert again == msgspec.structs.replace(first, repeated=True)
    other = msgspec.structs.replace(starting, expected_version="9", rollout_id="r1")
    assert world.do(other, key="k").code == "idempotency_reused"


def test_a_key_may_be_used_within_one_batch_once() -> None:
    payloads = [command_bytes(publication("m", label), "k") for label in ("1", "1", "2")]
    state, outcomes, events = apply_batch(State.empty(), payloads)
    assert [(each.code, each.repeated) for each in outcomes] == [("ok", False), ("ok", True), ("idempotency_reused", False)]
    assert state.revision == 1
    assert len(events) == 2


@pytest.mark.parametrize("payload", [b"", b"\xc0", b"\x90", b"\xff" * 9, command_bytes(publication(), "k")[:-1], b"\x91" * 100_000])
def test_bytes_that_are_no_command_are_refused_and_counted(payload: bytes) -> None:
    state, outcome = applied(State.empty(), payload)
    assert (outcome.code, outcome.revision) == ("bad_request", 1)
    assert len(outcome.detail) < 300
    assert (state.revision, state.cluster_ms, len(state.outcomes)) == (1, 0, 0)


def test_a_body_nested_too_deep_in_a_field_that_nobody_reads_is_refused() -> None:
    head = c.encode(c.Command(c.SCHEMA, "k", "p", "s", NOW_MS, c.RaiseFeatureLevel(1)))[:-3]
    deep = head + b"\x93\x0b\x01" + b"\x91" * 200_000 + b"\xc0"
    assert applied(State.empty(), deep)[1].code == "bad_request"


def test_fields_that_a_newer_member_appended_are_skipped() -> None:
    head = c.encode(c.Command(c.SCHEMA, "k", "p", "s", NOW_MS, c.RaiseFeatureLevel(1)))[:-3]
    assert applied(State.empty(), head + b"\x93\x0b\x01\xa3new")[1].code == "ok"


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": ""},
        {"request_id": "x" * 129},
        {"request_id": "a b"},
        {"request_id": "a\n"},
        {"request_id": "é"},
        {"principal": ""},
        {"principal": "x" * 257},
        {"source": "x" * 257},
        {"stamped_ms": -1},
        {"stamped_ms": MAX_INT + 1},
    ],
)
def test_an_envelope_outside_its_bounds_is_refused_and_leaves_no_outcome(changes: dict[str, object]) -> None:
    command = msgspec.structs.replace(c.Command(c.SCHEMA, "k", "p", "s", NOW_MS, publication()), **changes)
    state, outcome, events = apply(State.empty(), command)
    assert (outcome.code, outcome.revision, events) == ("bad_field", 1, ())
    assert (state.revision, state.cluster_ms, len(state.outcomes), len(state.models)) == (1, 0, 0, 0)


def test_an_envelope_may_fill_its_bounds() -> None:
    command = c.Command(c.SCHEMA, "x" * 128, "é" * 256, "x" * 256, MAX_INT, publication())
    assert apply(State.empty(), command).outcome.code == "ok"


@pytest.mark.parametrize("schema", [0, 2, -1, 1 << 63])
def test_another_schema_is_not_understood_and_leaves_no_trace(schema: int) -> None:
    command = c.Command(schema, "k", "p", "s", NOW_MS, publication())
    state, outcome, _ = apply(State.empty(), command)
    assert (outcome.code, state.revision, state.cluster_ms, len(state.outcomes)) == ("unsupported_command", 1, 0, 0)


def test_a_command_above_the_feature_level_is_not_understood() -> None:
    state = msgspec.structs.replace(State.empty(), feature_level=0)
    after, outcome = applied(state, command_bytes(publication(), "k"))
    assert (outcome.code, after.revision, len(after.outcomes), len(after.models)) == ("unsupported_command", 1, 0, 0)


def test_the_cluster_clock_never_goes_back() -> None:
    state = State.empty()
    for stamped_ms, expected_ms in ((5_000, 5_000), (2_000, 5_000), (6_000, 6_000)):
        state, _ = applied(state, command_bytes(publication("m", str(stamped_ms)), f"k{stamped_ms}", stamped_ms))
        assert state.cluster_ms == expected_ms
        assert state.versions[f"m/{stamped_ms}"].published_ms == expected_ms


def test_a_detail_that_is_stored_is_cut() -> None:
    world = World()
    nodes = [f"{number:02}" + "n" * 126 for number in range(6)]
    world.ok(publication("m", "1"))
    world.ok(declaration("d", "m", nodes))
    world.start("1", "r" + "x" * 127)
    outcome = world.refused("gate_not_met", c.AdvanceRollout("r" + "x" * 127, world.rollout("r" + "x" * 127).phase))
    assert len(outcome.detail) == 512


def test_details_are_ascii_so_that_every_interpreter_stores_the_same() -> None:
    odd = "m\u00f6\u0378\U0001fae8\u202e"
    world = serving_world()
    bodies: list[c.Body] = [
        publication(odd),
        publication("m", odd),
        c.DeleteVersion(odd, "1"),
        c.DeleteVersion("m", odd),
        declaration(odd),
        declaration("d", odd),
        c.Activate(odd, "1", None, "r1"),
        c.Activate("d", odd, None, "r1"),
        c.Activate("d", "1", odd, "r1"),
        c.Activate("d", "1", None, odd),
        c.AbortRollout(odd, "x", "", ""),
        c.AbortRollout("r1", odd, "", ""),
        c.RecordVerdict("d", odd, b""),
    ]
    for body in bodies:
        outcome = world.do(body)
        assert outcome.code != "ok"
        assert outcome.detail.isascii(), outcome


# Keys that carry their time.


@pytest.mark.parametrize("age_ms", [0, 24 * HOUR_MS, -2 * HOUR_MS])
def test_a_timed_key_is_taken_within_its_window(age_ms: int) -> None:
    _, outcome = applied(State.empty(), command_bytes(publication(), timed_key(NOW_MS - age_ms), NOW_MS))
    assert outcome.code == "ok"


@pytest.mark.parametrize(("age_ms", "code"), [(24 * HOUR_MS + 1, "idempotency_expired"), (-2 * HOUR_MS - 1, "bad_field")])
def test_a_timed_key_outside_its_window_is_refused_and_changes_nothing(age_ms: int, code: str) -> None:
    state, _ = applied(State.empty(), command_bytes(publication(), "k", NOW_MS))
    after, outcome = applied(state, command_bytes(publication("m", "2"), timed_key(NOW_MS - age_ms), NOW_MS))
    assert (outcome.code, outcome.revision) == (code, 1)
    assert after is state


def test_the_window_follows_the_later_of_leader_and_cluster_clock() -> None:
    state, _ = applied(State.empty(), command_bytes(publication(), "k", NOW_MS))
    key = timed_key(NOW_MS + 3 * HOUR_MS)
    _, behind = applied(state, command_bytes(publication("m", "2"), key, NOW_MS - 5 * HOUR_MS))
    assert behind.code == "bad_field"
    _, ahead = applied(state, command_bytes(publication("m", "2"), key, NOW_MS + HOUR_MS))
    assert ahead.code == "ok"
    _, old = applied(state, command_bytes(publication("m", "2"), timed_key(NOW_MS - 25 * HOUR_MS), NOW_MS - 23 * HOUR_MS))
    assert old.code == "idempotency_expired"


@pytest.mark.parametrize("key", ["123-a", "1700000000000", "170000000000-a", "170000000000a-a", "17000000000000-a", "-700000000000-a"])
def test_other_keys_carry_no_time(key: str) -> None:
    _, outcome = applied(State.empty(), command_bytes(publication(), key, 2 * NOW_MS))
    assert outcome.code == "ok"


def test_an_old_key_that_is_still_kept_is_a_repeat() -> None:
    state, first = applied(State.empty(), command_bytes(publication(), timed_key(NOW_MS), NOW_MS))
    state, _ = applied(state, command_bytes(publication("m", "2"), "k", NOW_MS + 25 * HOUR_MS))
    _, again = applied(state, command_bytes(publication(), timed_key(NOW_MS), NOW_MS + 25 * HOUR_MS))
    assert again == msgspec.structs.replace(first, repeated=True)


# Retention.


def test_outcomes_are_kept_for_26_hours_and_dropped_in_order() -> None:
    state = State.empty()
    for number in range(3):
        state, _ = applied(state, command_bytes(publication("m", str(number)), f"k{number}", NOW_MS + number * HOUR_MS))
    state, _ = applied(state, command_bytes(publication("m", "3"), "k3", NOW_MS + 26 * HOUR_MS))
    assert [key for key, _ in state.outcomes.items()] == ["k0", "k1", "k2", "k3"]
    state, _ = applied(state, command_bytes(publication("m", "4"), "k4", NOW_MS + 27 * HOUR_MS))
    assert [key for key, _ in state.outcomes.items()] == ["k1", "k2", "k3", "k4"]


def test_a_key_that_ran_ahead_is_refused_once_its_outcome_is_dropped() -> None:
    """The longest case: a key two hours ahead stays acceptable for 26 hours, as long as its outcome is kept."""
    key, body = timed_key(NOW_MS + 2 * HOUR_MS), publication()
    state, _ = applied(State.empty(), command_bytes(body, key, NOW_MS))
    for hours in range(1, 30):
        state, _ = applied(state, command_bytes(publication("m", f"x{hours}"), f"k{hours}", NOW_MS + hours * HOUR_MS))
        state, outcome = applied(state, command_bytes(body, key, NOW_MS + hours * HOUR_MS))
        assert outcome.repeated if hours <= 26 else outcome.code == "idempotency_expired", hours


def test_outcomes_are_bounded_by_number_and_dropped_in_order() -> None:
    state = State.empty(Limits(max_outcomes=3))
    for number in range(5):
        state, _ = applied(state, command_bytes(publication("m", str(number)), f"k{number}"))
    assert [key for key, _ in state.outcomes.items()] == ["k2", "k3", "k4"]


def test_a_timed_key_whose_outcome_was_dropped_for_number_is_refused() -> None:
    state = State.empty(Limits(max_outcomes=3))
    payloads = [command_bytes(publication("m", str(number)), timed_key(NOW_MS + number), NOW_MS + number) for number in range(5)]
    for payload in payloads:
        state, outcome = applied(state, payload)
        assert outcome.code == "ok"
    assert state.keys_after_ms == NOW_MS + 1
    for payload, code in zip(payloads, ["idempotency_expired"] * 2 + ["ok"] * 3, strict=True):
        after, outcome = applied(state, payload)
        assert (outcome.code, outcome.repeated) == (code, code == "ok")
        assert after is state


def test_a_client_whose_clock_is_ahead_does_not_lock_the_others_out() -> None:
    state = State.empty(Limits(max_outcomes=1))
    state, _ = applied(state, command_bytes(publication("m", "1"), timed_key(NOW_MS + HOUR_MS), NOW_MS))
    state, _ = applied(state, command_bytes(publication("m", "2"), timed_key(NOW_MS + 1), NOW_MS + 1))
    assert state.keys_after_ms == NOW_MS
    _, outcome = applied(state, command_bytes(publication("m", "3"), timed_key(NOW_MS + 2), NOW_MS + 2))
    assert outcome.code == "ok"


def test_a_leader_whose_clock_jumped_does_not_lock_clients_out() -> None:
    state = State.empty(Limits(max_outcomes=1))
    for number in range(4):
        payload = command_bytes(publication("m", str(number)), timed_key(NOW_MS + number), NOW_MS + HOUR_MS)
        state, outcome = applied(state, payload)
        assert outcome.code == "ok"


def test_a_cluster_clock_that_a_wrong_one_moved_days_ahead_does_not_lock_clients_out_and_nothing_is_applied_twice() -> None:
    state = State.empty()
    old = command_bytes(publication("m", "1"), timed_key(NOW_MS), NOW_MS)
    state, _ = applied(state, old)
    state, _ = applied(state, command_bytes(publication("m", "2"), "untimed-1", NOW_MS + 48 * HOUR_MS))
    assert state.cluster_ms == NOW_MS + 48 * HOUR_MS
    state, _ = applied(state, command_bytes(publication("m", "3"), "untimed-2", NOW_MS + 48 * HOUR_MS))
    assert len(state.outcomes) == 2 and state.keys_after_ms == NOW_MS, "the first outcome went with the wrong clock"
    minute = HOUR_MS // 60
    _, outcome = applied(state, command_bytes(publication("m", "1"), timed_key(NOW_MS), NOW_MS + minute))
    assert outcome.code == "idempotency_expired", "its outcome is gone"
    _, outcome = applied(state, command_bytes(publication("m", "4"), timed_key(NOW_MS + HOUR_MS), NOW_MS + minute))
    assert outcome.code == "idempotency_expired", "a key so little newer may be that of a client whose clock is ahead"
    late = NOW_MS + 3 * HOUR_MS
    state, outcome = applied(state, command_bytes(publication("m", "4"), timed_key(late), late))
    assert outcome.code == "ok", "client and leader agree"
    _, outcome = applied(state, command_bytes(publication("m", "4"), timed_key(late), late))
    assert outcome.repeated
    _, outcome = applied(state, command_bytes(publication("m", "5"), timed_key(late + 3 * HOUR_MS), late))
    assert outcome.code == "idempotency_expired", "they do not"


def test_a_leader_whose_clock_is_behind_by_days_accepts_no_old_key() -> None:
    state, _ = applied(State.empty(), command_bytes(publication("m", "1"), "k", NOW_MS))
    behind = NOW_MS - 20 * HOUR_MS
    _, outcome = applied(state, command_bytes(publication("m", "2"), timed_key(NOW_MS - 25 * HOUR_MS), behind))
    assert outcome.code == "idempotency_expired"


def test_dropping_is_bounded_per_command() -> None:
    state = State.empty()
    for number in range(12):
        state, _ = applied(state, command_bytes(publication("m", str(number)), f"k{number}"))
    sizes = []
    for number in range(12, 17):
        state, _ = applied(state, command_bytes(publication("m", str(number)), f"k{number}", NOW_MS + 48 * HOUR_MS))
        sizes.append(len(state.outcomes))
    assert [before - after for before, after in pairwise([12, *sizes])] == [DROPS_PER_COMMAND - 1] * 3 + [-1] * 2


def test_an_outcome_that_is_kept_counts_towards_the_size_and_a_dropped_one_no_more() -> None:
    state = State.empty(Limits(max_outcomes=1))
    for number in range(3):
        state, _ = applied(state, command_bytes(publication("m", "1"), f"k{number}"))
    expected, _ = applied(State.empty(Limits(max_outcomes=1)), command_bytes(publication("m", "1"), "k0"))
    assert abs(state.size_bytes - expected.size_bytes) <= 2


def test_a_batch_that_reaches_nothing_gives_back_the_same_state() -> None:
    state, _ = applied(State.empty(), command_bytes(publication(), "k"))
    for payloads in ([], [command_bytes(publication(), "k")] * 3):
        after, outcomes, events = apply_batch(state, payloads)
        assert after is state
        assert len(outcomes) == len(payloads)
        assert events == ()
    assert applied(state, command_bytes(publication(), "k"))[1].repeated


def test_two_histories_may_grow_from_one_state() -> None:
    root, _ = applied(State.empty(), command_bytes(publication(), "k"))
    left, _ = applied(root, command_bytes(publication("m", "2"), "left"))
    right, _ = applied(root, command_bytes(publication("m", "2"), "right"))
    assert applied(left, command_bytes(publication("m", "2"), "left"))[1].repeated
    assert not applied(right, command_bytes(publication("m", "2"), "left"))[1].repeated
    assert snapshot(root) != snapshot(left)
    assert hashlib.sha256(snapshot(left)).digest() != hashlib.sha256(snapshot(right)).digest()
