"""A state whose records are not those its hash was made of gives no snapshot, and the member begins again from its disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from raftmeta import codec
from raftmeta.core import commands as c
from raftmeta.core.outcomes import Outcomes
from raftmeta.core.state import NO_VERSIONS, State
from raftmeta.log.exchange import ExchangeSettings
from tests.support.commands import serving_world
from tests.support.trio import Trio


def a_state() -> State:
    world = serving_world()
    world.serve("1", "r1")
    world.ok(c.RecordVerdict("d", "consistent", b"{}"))
    return world.state


def another_version(state: State) -> State:
    key, version = next(iter(state.versions.items()))
    return replace(state, versions=state.versions.insert(key, replace(version, published_ms=version.published_ms + 1)))


def another_manifest(state: State) -> State:
    name, entry = next(iter(state.catalog.items()))
    *others, (number, label, manifest) = entry.versions
    versions = NO_VERSIONS.extended([*others, (number, label, manifest + b"x")])
    return replace(state, catalog=state.catalog.insert(name, replace(entry, versions=versions)))


def another_model(state: State) -> State:
    name, entry = next(iter(state.catalog.items()))
    record = replace(entry.record, last_number=entry.record.last_number + 1)
    return replace(state, catalog=state.catalog.insert(name, replace(entry, record=record)))


def another_deployment(state: State) -> State:
    name, deployment = next(iter(state.deployments.items()))
    return replace(state, deployments=state.deployments.insert(name, replace(deployment, order_revision=deployment.order_revision + 1)))


def another_rollout(state: State) -> State:
    key, rollout = next(iter(state.rollouts.items()))
    return replace(state, rollouts=state.rollouts.insert(key, replace(rollout, ended_ms=rollout.ended_ms + 1)))


def another_verdict(state: State) -> State:
    key, verdict = next(iter(state.verdicts.items()))
    return replace(state, verdicts=state.verdicts.insert(key, replace(verdict, report=b"{} ")))


def another_outcome(state: State) -> State:
    (key, outcome), *others = state.outcomes.items()
    return replace(state, outcomes=Outcomes.of([(key, outcome + b"x"), *others]))


def another_hash(state: State) -> State:
    return replace(state, hash_sum=state.hash_sum ^ 1)


@pytest.mark.parametrize(
    "damage",
    [
        another_version,
        another_manifest,
        another_model,
        another_deployment,
        another_rollout,
        another_verdict,
        another_outcome,
        another_hash,
    ],
)
def test_it_gives_no_snapshot(damage: Callable[[State], State]) -> None:
    state = a_state()
    assert list(codec.snapshot_chunks(state))
    with pytest.raises(codec.StateDamaged) as caught:
        list(codec.snapshot_chunks(damage(state)))
    assert caught.value.code == "integrity"
    assert f"revision {state.revision} " in caught.value.detail


def test_the_member_begins_again_from_its_disk_and_keeps_its_vote() -> None:
    trio = Trio(exchange=ExchangeSettings(entries=10, keep_entries=2))
    leader, follower = trio.leader(), trio.follower()
    for number in range(3):
        trio.write(leader, f"v{number}")
    follower.replica.state = another_hash(follower.replica.state)
    for number in range(3, 20):
        assert trio.write(leader, f"v{number}").code == "ok"
    trio.run(1.0)
    again = trio.boxes[follower.name]
    assert again is not follower and not again.replica.engine.joining
    assert "set aside" not in again.told
    assert {box.replica.state.state_hash for box in trio.boxes.values()} == {leader.replica.state.state_hash}
    assert not again.disk.exists(Path("/data/quarantine"))
