"""Properties of apply over any sequence of commands, absurd ones included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as hs

from raftmeta import codec
from raftmeta.core import commands as c
from raftmeta.core.apply import apply, apply_batch
from raftmeta.core.state import State
from raftmeta.core.types import Limits, ModelRecord, RolloutStatus
from tests.support.commands import SMALL, check_state, facts, payload_lists, snapshot
from tests.support.replica import Replica, digests

bounded = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
either_limits = hs.sampled_from([None, SMALL])


def one_by_one(state: State, payloads: list[bytes]) -> State:
    for payload in payloads:
        state = apply_batch(state, [payload]).state
    return state


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[Replica, Replica]]:
    pair = (Replica(1), Replica(4_242))
    yield pair
    for replica in pair:
        replica.close()


@bounded
@given(hs.data(), hs.booleans())
def test_replicas_with_other_hash_seeds_reach_equal_bytes(replicas: tuple[Replica, Replica], data: hs.DataObject, small: bool) -> None:
    limits = SMALL if small else None
    payloads = data.draw(payload_lists(limits))
    state = one_by_one(State.empty(limits), payloads)
    expected = digests(state)
    assert [replica.apply(small, payloads) for replica in replicas] == [expected, expected]


@bounded
@given(hs.data(), either_limits)
def test_any_sequence_gives_outcomes_and_a_sound_state(data: hs.DataObject, limits: Limits | None) -> None:
    state = State.empty(limits)
    for payload in data.draw(payload_lists(limits)):
        before = state
        state, (outcome,), events = apply_batch(before, [payload])
        check_state(state)
        if state.revision == before.revision:
            assert state is before  # equal revisions of one history are equal states
            assert events == ()
        assert outcome.detail.isascii() or outcome.code == "bad_request"
        if outcome.code != "ok" or outcome.repeated:
            assert facts(state) == facts(before)
            assert events == ()
            assert state.revision - before.revision in (0, 1)
        assert state.cluster_ms >= before.cluster_ms
        assert len(state.outcomes) <= state.limits.max_outcomes
        assert all(before.revision < event.revision <= state.revision for event in events)


@bounded
@given(hs.data(), either_limits)
def test_where_batches_are_cut_does_not_matter(data: hs.DataObject, limits: Limits | None) -> None:
    payloads = data.draw(payload_lists(limits))
    outcomes, events = [], []
    state = State.empty(limits)
    for payload in payloads:
        done = apply_batch(state, [payload])
        state = done.state
        outcomes += done.outcomes
        events += done.events
    cut = data.draw(hs.integers(0, len(payloads)))
    first = apply_batch(State.empty(limits), payloads[:cut])
    second = apply_batch(first.state, payloads[cut:])
    assert [*first.outcomes, *second.outcomes] == outcomes
    assert [*first.events, *second.events] == events
    assert snapshot(second.state) == snapshot(state)
    assert second.state.state_hash == state.state_hash


@bounded
@given(hs.data(), either_limits)
def test_going_on_from_a_restored_snapshot_is_going_on(data: hs.DataObject, limits: Limits | None) -> None:
    payloads = data.draw(payload_lists(limits))
    cut = data.draw(hs.integers(0, len(payloads)))
    middle = one_by_one(State.empty(limits), payloads[:cut])
    restored = codec.restore(codec.snapshot_chunks(middle))
    check_state(restored)
    assert snapshot(restored) == snapshot(middle)
    went_on, came_back = apply_batch(middle, payloads[cut:]), apply_batch(restored, payloads[cut:])
    assert came_back.outcomes == went_on.outcomes
    assert came_back.events == went_on.events
    assert snapshot(came_back.state) == snapshot(went_on.state)


@bounded
@given(hs.data(), either_limits)
def test_applying_leaves_the_state_it_began_from_alone(data: hs.DataObject, limits: Limits | None) -> None:
    payloads = data.draw(payload_lists(limits))
    cut = data.draw(hs.integers(0, len(payloads)))
    middle = one_by_one(State.empty(limits), payloads[:cut])
    image = snapshot(middle)
    once = apply_batch(middle, payloads[cut:])
    assert snapshot(middle) == image
    again = apply_batch(middle, payloads[cut:])
    assert snapshot(again.state) == snapshot(once.state)
    assert again.outcomes == once.outcomes
    assert [middle.outcomes.get(key) for key, _ in middle.outcomes.items()] == [record for _, record in middle.outcomes.items()]


@bounded
@given(hs.data(), either_limits)
def test_numbers_of_a_model_only_rise_and_are_not_used_again(data: hs.DataObject, limits: Limits | None) -> None:
    state = State.empty(limits)
    highest: dict[str, int] = {}
    for payload in data.draw(payload_lists(limits)):
        state, _, events = apply_batch(state, [payload])
        for event in events:
            if event.kind == "version" and event.op == "put":
                model, number = event.value.model, event.value.number  # type: ignore[union-attr]
                assert number > highest.get(model, 0)
                highest[model] = number
            if event.kind == "model":
                assert isinstance(event.value, ModelRecord)
                assert event.value.last_number == highest[event.key]


@bounded
@given(hs.data(), either_limits)
def test_a_deployment_has_one_running_rollout_and_its_versions_exist(data: hs.DataObject, limits: Limits | None) -> None:
    state = State.empty(limits)
    for payload in data.draw(payload_lists(limits)):
        state = apply_batch(state, [payload]).state
        for deployment in state.deployments.values():
            ids = state.history.get(deployment.name) or ()
            running = [each for each in ids if state.rollouts[each].status is RolloutStatus.RUNNING]
            assert running in ([], [deployment.rollout_id])
            needed = {deployment.version, deployment.previous} | {state.rollouts[each].to_version for each in running}
            assert all(f"{deployment.model}/{label}" in state.versions for label in needed - {""})


@bounded
@given(hs.data())
def test_apply_of_a_command_is_a_batch_of_its_bytes(data: hs.DataObject) -> None:
    state = State.empty()
    for payload in data.draw(payload_lists(max_size=10)):
        batch = apply_batch(state, [payload])
        try:
            command = c.decode(payload)
        except c.msgspec.MsgspecError:
            assert batch.outcomes[0].code == "bad_request"
        else:
            single = apply(state, command)
            assert (single.outcome, single.events) == (batch.outcomes[0], batch.events)
            assert snapshot(single.state) == snapshot(batch.state)
        state = batch.state
