"""Starting, advancing, aborting rollouts, and what agents attest on the way."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta.core import commands as c
from raftmeta.core.types import (
    Failure,
    Limits,
    Phase,
    RolloutKind,
    RolloutStatus,
    SideName,
    Stage,
    StageCounters,
)
from tests.support.commands import World, attestation, declaration, publication, serving_world


def started(version: str = "1") -> World:
    world = serving_world()
    world.start(version, "r1")
    return world


def test_an_activation_goes_through_all_phases_and_switches_when_committing_begins() -> None:
    world = serving_world()
    assert world.ok(c.Activate("d", "1", None, "r1"), principal="ann") == {"rollout_id": "r1"}
    rollout = world.rollout("r1")
    assert (rollout.phase, rollout.status, rollout.kind) == (Phase.PREPARING, RolloutStatus.RUNNING, RolloutKind.ACTIVATE)
    assert (rollout.principal, rollout.started_revision, rollout.started_ms) == ("ann", world.state.revision, world.now_ms)
    summary = world.state.versions["m/1"].summary
    assert (rollout.checksum, rollout.vector_root) == (summary.checksum, summary.vector_root)
    world.attest("r1", Stage.PREPARED)
    assert world.advance("r1") is Phase.SYNCING
    world.attest("r1", Stage.READY)
    assert world.state.deployments["d"].version == ""
    assert world.advance("r1") is Phase.COMMITTING
    deployment, rollout = world.state.deployments["d"], world.rollout("r1")
    assert (deployment.version, deployment.previous, deployment.order_revision) == ("1", "", world.state.revision)
    assert (rollout.switched_revision, rollout.switched_ms) == (world.state.revision, world.now_ms)
    assert (rollout.phase_revision, rollout.phase_ms) == (world.state.revision, world.now_ms)
    assert deployment.activated_revision == 0
    world.attest("r1", Stage.ACTIVE)
    assert world.advance("r1") is Phase.ACTIVE
    deployment, rollout = world.state.deployments["d"], world.rollout("r1")
    assert (rollout.status, rollout.ended_ms) == (RolloutStatus.DONE, world.now_ms)
    assert (deployment.activated_revision, deployment.activated_ms) == (world.state.revision, world.now_ms)
    assert [(event.kind, event.key) for event in world.events] == [("deployment", "d"), ("rollout", "r1")]


def test_a_roll_back_is_a_rollout_to_the_previous_version_and_can_be_rolled_back() -> None:
    world = serving_world()
    world.serve("1", "r1")
    world.serve("2", "r2")
    assert world.ok(c.RollBack("d", "2", "r3")) == {"rollout_id": "r3"}
    rollout = world.rollout("r3")
    assert (rollout.kind, rollout.from_version, rollout.to_version) == (RolloutKind.ROLL_BACK, "2", "1")
    world.reach("r3", Phase.ACTIVE)
    deployment = world.state.deployments["d"]
    assert (deployment.version, deployment.previous) == ("1", "2")
    world.ok(c.RollBack("d", None, "r4"))
    assert world.rollout("r4").to_version == "2"


def test_only_one_rollout_of_a_deployment_runs_and_the_refusal_names_it() -> None:
    world = started()
    for body in (c.Activate("d", "2", None, "r2"), c.Activate("d", "1", None, "r2"), c.RollBack("d", None, "r2")):
        outcome = world.refused("rollout_in_progress", body)
        assert msgspec.msgpack.decode(outcome.result) == {"rollout_id": "r1"}
    world.ok(declaration("e"))
    world.start("2", "r2", "e")


def test_activating_what_is_being_committed_is_a_rollout_in_progress() -> None:
    world = started()
    world.reach("r1", Phase.COMMITTING)
    world.refused("rollout_in_progress", c.Activate("d", "1", None, "r2"))


def test_activating_what_serves_is_refused() -> None:
    world = serving_world()
    world.serve("1", "r1")
    world.refused("already_active", c.Activate("d", "1", None, "r2"))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (c.Activate("x", "1", None, "r1"), "unknown_deployment"),
        (c.RollBack("x", None, "r1"), "unknown_deployment"),
        (c.Activate("d", "3", None, "r1"), "unknown_version"),
        (c.Activate("d", "", None, "r1"), "unknown_version"),
        (c.Activate("d", "1", "2", "r1"), "expected_version_mismatch"),
        (c.RollBack("d", "2", "r1"), "expected_version_mismatch"),
        (c.RollBack("d", None, "r1"), "nothing_to_roll_back"),
        (c.Activate("d", "1", None, "R1"), "bad_name"),
        (c.Activate("d", "1", None, ""), "bad_name"),
    ],
)
def test_a_rollout_that_cannot_start_is_refused(body: c.Body, code: str) -> None:
    serving_world().refused(code, body)


def test_the_expected_version_is_compared_with_what_serves() -> None:
    world = serving_world()
    world.ok(c.Activate("d", "1", "", "r1"))
    world.reach("r1", Phase.ACTIVE)
    outcome = world.refused("expected_version_mismatch", c.Activate("d", "2", "", "r2"))
    assert msgspec.msgpack.decode(outcome.result) == {"version": "1"}
    world.ok(c.Activate("d", "2", "1", "r2"))


def test_an_id_that_is_taken_is_refused() -> None:
    world = serving_world()
    world.serve("1", "r1")
    world.refused("bad_field", c.Activate("d", "2", None, "r1"))


def test_a_gate_stays_shut_until_every_node_attested() -> None:
    world = started()
    for phase, stage in ((Phase.PREPARING, Stage.PREPARED), (Phase.SYNCING, Stage.READY), (Phase.COMMITTING, Stage.ACTIVE)):
        outcome = world.refused("gate_not_met", c.AdvanceRollout("r1", phase))
        assert "a1, a2, b1" in outcome.detail
        world.attest("r1", stage, only=["a1", "b1"])
        assert "waits for a2" in world.refused("gate_not_met", c.AdvanceRollout("r1", phase)).detail
        world.attest("r1", stage, only=["a2"])
        world.advance("r1")


def test_a_long_list_of_waiting_nodes_is_cut() -> None:
    world = World()
    world.ok(publication("m", "1"))
    world.ok(declaration("d", "m", [f"n{number}" for number in range(9)]))
    world.start("1", "r1")
    assert "n0, n1, n2 and 7 others" in world.refused("gate_not_met", c.AdvanceRollout("r1", Phase.PREPARING)).detail


def test_advancing_names_the_phase_it_saw() -> None:
    world = started()
    world.attest("r1", Stage.PREPARED)
    world.refused("wrong_phase", c.AdvanceRollout("r1", Phase.SYNCING))
    world.advance("r1")
    world.refused("wrong_phase", c.AdvanceRollout("r1", Phase.PREPARING))


def test_an_ended_rollout_takes_nothing() -> None:
    world = serving_world()
    world.serve("1", "r1")
    rollout = world.rollout("r1")
    world.refused("rollout_not_running", c.AdvanceRollout("r1", Phase.ACTIVE))
    world.refused("rollout_not_running", c.AbortRollout("r1", "operator", "", ""))
    world.refused("rollout_not_running", attestation(rollout, "a1", SideName.PRIMARY, Stage.ACTIVE))


def test_an_unknown_rollout_takes_nothing() -> None:
    world = started()
    rollout = msgspec.structs.replace(world.rollout("r1"), id="r9")
    world.refused("unknown_rollout", c.AdvanceRollout("r9", Phase.PREPARING))
    world.refused("unknown_rollout", c.AbortRollout("r9", "operator", "", ""))
    world.refused("unknown_rollout", attestation(rollout, "a1", SideName.PRIMARY, Stage.PREPARED))


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING])
def test_an_abort_before_the_decision_leaves_what_serves(phase: Phase) -> None:
    world = serving_world()
    world.serve("1", "r1")
    world.start("2", "r2")
    world.reach("r2", phase)
    deployment = world.state.deployments["d"]
    world.ok(c.AbortRollout("r2", "out_of_memory", "a1", "x" * 5_000))
    rollout = world.rollout("r2")
    assert (rollout.status, rollout.phase, rollout.ended_ms) == (RolloutStatus.FAILED, phase, world.now_ms)
    assert rollout.failure == Failure("out_of_memory", "a1", "x" * 1_024)
    assert world.state.deployments["d"] == deployment
    world.start("2", "r3")


def test_nothing_aborts_a_decided_switch() -> None:
    world = started()
    world.reach("r1", Phase.COMMITTING)
    world.refused("wrong_phase", c.AbortRollout("r1", "operator", "", ""))


@pytest.mark.parametrize(("code", "node", "refusal"), [("", "", "bad_field"), ("Bad code", "", "bad_field"), ("x", "Node", "bad_name")])
def test_an_abort_names_a_failure_class_and_a_node(code: str, node: str, refusal: str) -> None:
    started().refused(refusal, c.AbortRollout("r1", code, node, ""))


def test_the_oldest_rollouts_of_a_deployment_are_dropped() -> None:
    world = serving_world(Limits(max_rollouts_per_deployment=3))
    for number in range(5):
        world.start("1", f"r{number}")
        world.ok(c.AbortRollout(f"r{number}", "operator", "", ""))
    assert world.state.history["d"] == ("r2", "r3", "r4")
    assert sorted(world.state.rollouts) == ["r2", "r3", "r4"]
    world.start("1", "r5")
    assert [(event.kind, event.key, event.op) for event in world.events] == [
        ("rollout", "r5", "put"),
        ("deployment", "d", "put"),
        ("rollout", "r2", "delete"),
    ]


def test_rollouts_and_roll_backs_need_no_quota() -> None:
    world = serving_world()
    world.use_up_quota()
    world.refused("quota_exceeded", publication("m", "3"))
    world.serve("1", "r1")
    world.serve("2", "r2")
    world.ok(c.RollBack("d", None, "r3"))


def test_an_attestation_is_kept_per_node_in_order() -> None:
    world = started()
    for node, side in (("b1", SideName.STANDBY), ("a1", SideName.PRIMARY)):
        world.ok(attestation(world.rollout("r1"), node, side, Stage.PREPARED, counters=StageCounters(bytes_total=5)))
    kept = world.rollout("r1").attestations
    assert [(each.node, each.side, each.stage, each.counters.bytes_total) for each in kept] == [
        ("a1", SideName.PRIMARY, Stage.PREPARED, 5),
        ("b1", SideName.STANDBY, Stage.PREPARED, 5),
    ]
    assert (kept[0].revision, kept[0].attested_ms) == (world.state.revision, world.now_ms)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"node": "b2"}, "unknown_node"),
        ({"side": SideName.STANDBY}, "unknown_node"),
        ({"boot_id": ""}, "bad_name"),
        ({"counters": StageCounters(bytes_fetched=-1)}, "bad_field"),
        ({"counters": StageCounters(switch_call_us=1 << 63)}, "bad_field"),
        ({"counters": StageCounters(lag_ms=-2)}, "bad_field"),
        ({"code": "oops"}, "bad_field"),
        ({"detail": "oops"}, "bad_field"),
        ({"checksum": "0" * 64}, "attestation_mismatch"),
        ({"checksum": ""}, "attestation_mismatch"),
        ({"vector_root": "0" * 64}, "attestation_mismatch"),
        ({"stage": Stage.READY, "vector_root": ""}, "attestation_mismatch"),
        ({"stage": Stage.ACTIVE}, "wrong_phase"),
        ({"stage": Stage.FAILED}, "bad_field"),
        ({"stage": Stage.FAILED, "code": "Bad code"}, "bad_field"),
        ({"stage": Stage.FAILED, "code": "x", "checksum": "y" * 65}, "bad_field"),
        ({"stage": Stage.FAILED, "code": "x", "vector_root": "y" * 65}, "bad_field"),
    ],
)
def test_an_attestation_that_cannot_be_is_refused(changes: dict[str, object], code: str) -> None:
    world = started()
    body = attestation(world.rollout("r1"), "a1", SideName.PRIMARY, Stage.PREPARED)
    world.refused(code, msgspec.structs.replace(body, **changes))


def test_active_can_be_attested_only_after_the_decision() -> None:
    world = started()
    world.reach("r1", Phase.SYNCING)
    body = attestation(world.rollout("r1"), "a1", SideName.PRIMARY, Stage.ACTIVE)
    world.refused("wrong_phase", body)
    world.reach("r1", Phase.COMMITTING)
    world.ok(body)


def test_a_node_that_is_ready_early_holds_both_gates() -> None:
    world = started()
    world.attest("r1", Stage.READY)
    assert world.advance("r1") is Phase.SYNCING
    assert world.advance("r1") is Phase.COMMITTING


def test_a_node_goes_only_forward_within_one_boot() -> None:
    world = started()
    rollout = world.rollout("r1")
    world.attest("r1", Stage.READY, only=["a1"])
    world.refused("stale_attestation", attestation(rollout, "a1", SideName.PRIMARY, Stage.PREPARED))
    world.ok(attestation(rollout, "a1", SideName.PRIMARY, Stage.READY))
    world.ok(attestation(rollout, "a1", SideName.PRIMARY, Stage.FAILED))
    world.refused("stale_attestation", attestation(rollout, "a1", SideName.PRIMARY, Stage.READY))
    world.ok(attestation(rollout, "a1", SideName.PRIMARY, Stage.FAILED))


def test_what_one_node_attested_binds_no_other_node() -> None:
    world = started()
    world.attest("r1", Stage.READY, only=["a1"])
    world.attest("r1", Stage.FAILED, only=["a2"])
    world.attest("r1", Stage.PREPARED, only=["b1"])


def test_a_refusal_says_where_the_node_belongs() -> None:
    world = started()
    rollout = world.rollout("r1")
    stranger = world.refused("unknown_node", attestation(rollout, "x", SideName.PRIMARY, Stage.PREPARED))
    assert "belongs to neither side" in stranger.detail
    other = world.refused("unknown_node", attestation(rollout, "b1", SideName.PRIMARY, Stage.PREPARED))
    assert "belongs to the standby side, not to the primary side" in other.detail


def test_a_node_that_failed_after_the_decision_may_recover() -> None:
    world = started()
    world.reach("r1", Phase.COMMITTING)
    world.attest("r1", Stage.FAILED, only=["a1"])
    world.attest("r1", Stage.ACTIVE)
    assert world.advance("r1") is Phase.ACTIVE


def test_a_node_that_booted_again_starts_over_and_shuts_the_gate() -> None:
    world = started()
    world.attest("r1", Stage.READY)
    world.advance("r1")
    world.ok(attestation(world.rollout("r1"), "a1", SideName.PRIMARY, Stage.PREPARED, boot_id="boot-2"))
    assert "waits for a1" in world.refused("gate_not_met", c.AdvanceRollout("r1", Phase.SYNCING)).detail


def test_a_failure_may_tell_what_was_found_and_shuts_the_gate() -> None:
    world = started()
    world.attest("r1", Stage.PREPARED)
    found = attestation(world.rollout("r1"), "a1", SideName.PRIMARY, Stage.FAILED, checksum="odd", vector_root="", detail="y" * 9_000)
    world.ok(found)
    kept = world.rollout("r1").attestations[0]
    assert (kept.stage, kept.checksum, kept.code, len(kept.detail)) == (Stage.FAILED, "odd", "out_of_memory", 1_024)
    world.refused("gate_not_met", c.AdvanceRollout("r1", Phase.PREPARING))


def test_a_failure_after_the_decision_is_recorded_and_aborts_nothing() -> None:
    world = started()
    world.reach("r1", Phase.COMMITTING)
    world.attest("r1", Stage.FAILED, only=["a1"])
    world.refused("wrong_phase", c.AbortRollout("r1", "out_of_memory", "a1", ""))
