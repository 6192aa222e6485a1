"""Declaring deployments: sides, nodes, policy, and what may change when."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta import codec
from raftmeta.core import commands as c
from raftmeta.core.handlers.deployments import MAX_TIMEOUT_MS
from raftmeta.core.state import encode_record
from raftmeta.core.types import Deployment, DrainOverdue, Limits, Phase, Policy, Side, Stage
from tests.support.commands import World, declaration, publication, serving_world


def declared() -> World:
    world = World()
    world.ok(publication("m", "1"))
    return world


def test_a_declaration_creates_an_idle_deployment_with_sorted_nodes() -> None:
    world = declared()
    world.ok(declaration("d", "m", ("a2", "a1"), ("b1",)))
    deployment = world.state.deployments["d"]
    assert deployment.primary == Side("a", ("a1", "a2"))
    assert deployment.standby == Side("b", ("b1",))
    assert (deployment.version, deployment.previous, deployment.rollout_id, deployment.order_revision) == ("", "", "", 0)
    assert deployment.declared_revision == 2
    assert [(event.kind, event.key, event.value) for event in world.events] == [("deployment", "d", deployment)]


def test_a_deployment_needs_no_standby_and_a_node_may_serve_several_deployments() -> None:
    world = declared()
    world.ok(declaration("d", "m", ("a1",), ()))
    world.ok(declaration("e", "m", ("a1",), ("b1",)))
    assert world.state.deployments["d"].standby is None


def test_the_same_declaration_again_changes_nothing() -> None:
    world = declared()
    world.ok(declaration())
    world.ok(declaration("d", "m", ("a2", "a1"), ("b1",)))
    assert world.events == ()
    assert world.state.deployments["d"].declared_revision == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"name": "D"}, "bad_name"),
        ({"primary": Side("Zone", ("a1",))}, "bad_name"),
        ({"standby": Side("", ("b1",))}, "bad_name"),
        ({"primary": Side("a", ())}, "bad_field"),
        ({"standby": Side("b", ())}, "bad_field"),
        ({"primary": Side("a", ("a1", "A2"))}, "bad_name"),
        ({"primary": Side("a", ("a1", "a1"))}, "bad_field"),
        ({"primary": Side("a", ("",))}, "bad_name"),
        ({"standby": Side("b", ("b1", "a1"))}, "bad_field"),
        ({"primary": Side("a", ("x1", "x2", "x3", "x4"))}, "bad_field"),
        ({"policy": Policy(prepare_timeout_ms=0)}, "bad_field"),
        ({"policy": Policy(prepare_timeout_ms=MAX_TIMEOUT_MS + 1)}, "bad_field"),
        ({"policy": Policy(sync_timeout_ms=0)}, "bad_field"),
        ({"policy": Policy(drain_timeout_ms=0)}, "bad_field"),
        ({"policy": Policy(drain_timeout_ms=MAX_TIMEOUT_MS + 1)}, "bad_field"),
        ({"policy": Policy(sync_timeout_ms=1 << 63)}, "bad_field"),
        ({"model": "n"}, "unknown_model"),
        ({"model": "Bad"}, "unknown_model"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(changes: dict[str, object], code: str) -> None:
    world = World(Limits(max_nodes_per_side=3))
    world.ok(publication("m", "1"))
    world.refused(code, msgspec.structs.replace(declaration(), **changes))


def test_deployments_are_bounded_and_declaring_one_again_is_not_another() -> None:
    world = World(Limits(max_deployments=1))
    world.ok(publication("m", "1"))
    world.ok(declaration("d"))
    world.refused("quota_exceeded", declaration("e"))
    world.ok(declaration("d", "m", ("a1",)))


def test_a_declaration_counts_towards_the_quota() -> None:
    world = World(Limits(quota_bytes=1_000))
    world.ok(publication("m", "1"))
    world.refused("quota_exceeded", declaration("d", "m", tuple(f"node-{number}" for number in range(90))))


def test_the_model_may_change_until_something_serves_or_is_on_its_way() -> None:
    world = serving_world()
    world.ok(publication("n", "1"))
    world.ok(declaration("d", "n"))
    world.ok(declaration("d", "m"))
    world.start("1", "r1")
    world.refused("deployment_model_fixed", declaration("d", "n"))
    world.reach("r1", Phase.ACTIVE)
    world.refused("deployment_model_fixed", declaration("d", "n"))


def test_the_model_may_change_after_a_first_rollout_failed() -> None:
    world = serving_world()
    world.ok(publication("n", "1"))
    world.start("1", "r1")
    world.ok(c.AbortRollout("r1", "operator", "", ""))
    world.ok(declaration("d", "n"))
    world.start("1", "r2")


def test_declaring_again_keeps_what_serves() -> None:
    world = serving_world()
    world.serve("1", "r1")
    before = world.state.deployments["d"]
    world.ok(declaration("d", "m", ("a1", "a3"), ("b1",)))
    after = world.state.deployments["d"]
    assert after.declared_revision == world.state.revision
    assert msgspec.structs.replace(after, primary=before.primary, declared_revision=before.declared_revision) == before


def test_taking_a_dead_node_out_lets_a_decided_switch_end() -> None:
    world = serving_world()
    world.start("1", "r1")
    world.reach("r1", Phase.COMMITTING)
    world.attest("r1", Stage.ACTIVE, only=["a1", "b1"])
    world.ok(declaration("d", "m", ("a1",), ("b1",)))
    assert [attestation.node for attestation in world.rollout("r1").attestations] == ["a1", "b1"]
    assert [event.kind for event in world.events] == ["deployment", "rollout"]
    assert world.advance("r1") is Phase.ACTIVE


def test_a_node_that_moves_to_the_other_side_attests_again() -> None:
    world = serving_world()
    world.start("1", "r1")
    world.attest("r1", Stage.PREPARED)
    world.ok(declaration("d", "m", ("a1", "b1"), ("a2",)))
    assert [attestation.node for attestation in world.rollout("r1").attestations] == ["a1"]


def test_a_change_of_policy_keeps_the_attestations() -> None:
    world = serving_world()
    world.start("1", "r1")
    world.attest("r1", Stage.PREPARED)
    world.ok(msgspec.structs.replace(declaration(), policy=Policy(sync_timeout_ms=5)))
    assert len(world.rollout("r1").attestations) == 3
    assert [event.kind for event in world.events] == ["deployment"]


def test_a_deployment_whose_drain_has_the_defaults_has_the_bytes_of_earlier_builds() -> None:
    world = declared()
    world.ok(declaration())
    record = world.state.deployments["d"]
    policy = bytes.fromhex("92ce0036ee80ce000927c0")  # an hour and ten minutes, as builds without a drain policy wrote them
    assert policy in encode_record(record) and msgspec.msgpack.decode(encode_record(record), type=Deployment) == record
    data = b"".join(codec.snapshot_chunks(world.state))
    assert policy in data and codec.restore([data]).state_hash == world.state.state_hash


@pytest.mark.parametrize("policy", [Policy(drain_timeout_ms=60_001), Policy(drain_overdue=DrainOverdue.CANCEL)])
def test_a_drain_policy_is_kept_over_a_snapshot_and_leaves_nothing_behind(policy: Policy) -> None:
    world = declared()
    world.ok(declaration())
    before = world.state.deployments["d"]
    world.ok(msgspec.structs.replace(declaration(), policy=policy))
    again = codec.restore([b"".join(codec.snapshot_chunks(world.state))])
    assert again.deployments["d"].policy == policy and again.state_hash == world.state.state_hash
    world.ok(declaration())
    after = world.state.deployments["d"]
    assert encode_record(msgspec.structs.replace(after, declared_revision=before.declared_revision)) == encode_record(before)
