"""The phase table, its diagram, and what the controller should propose."""

from __future__ import annotations

import runpy

import msgspec
import pytest

from raftmeta.core import commands as c
from raftmeta.core.rollout import RANK, ROWS, TABLE, decide, diagram, sides, with_attestation
from raftmeta.core.types import Phase, Policy, SideName, Stage
from tests.support.commands import World, attestation, declaration, publication, serving_world

DIAGRAM = """\
stateDiagram-v2
    [*] --> idle
    idle --> preparing: activate or roll back
    preparing --> syncing: every node attested prepared
    syncing --> committing: every node attested ready / the switch order changes the deployment's version
    committing --> active: every node attested active / the rollout is done
    preparing --> idle: abort (a node failed or is missing, or the time is up)
    syncing --> idle: abort (a node failed or is missing, or the time is up)
    active --> [*]
"""


def started() -> World:
    world = serving_world()
    world.start("1", "r1")
    return world


def test_the_table_has_one_row_for_each_phase_and_leads_from_idle_to_active() -> None:
    assert [row.phase for row in TABLE] == list(Phase)
    path, phase = [Phase.IDLE], ROWS[Phase.IDLE].forward
    while phase is not None:
        path.append(phase)
        phase = ROWS[phase].forward
    assert path == list(Phase)


def test_every_stage_has_a_rank_and_every_gate_can_be_met_in_its_phase() -> None:
    assert set(RANK) == set(Stage)
    assert all(row.gate in row.accepts for row in TABLE if row.gate is not None)


def test_the_diagram_is_made_from_the_table() -> None:
    assert diagram() == DIAGRAM


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_module_prints_its_diagram(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("raftmeta.core.rollout", run_name="__main__")
    assert capsys.readouterr().out == DIAGRAM


def test_sides_lists_every_node_once() -> None:
    world = serving_world()
    world.ok(declaration("e", standby=()))
    assert sides(world.state.deployments["d"]) == {"a1": SideName.PRIMARY, "a2": SideName.PRIMARY, "b1": SideName.STANDBY}
    assert sides(world.state.deployments["e"]) == {"a1": SideName.PRIMARY, "a2": SideName.PRIMARY}


def test_an_attestation_replaces_that_of_its_node_in_order() -> None:
    world = started()
    world.attest("r1", Stage.PREPARED)
    kept = world.rollout("r1").attestations
    newer = msgspec.structs.replace(kept[1], stage=Stage.READY)
    assert with_attestation(kept, newer) == (kept[0], newer, kept[2])
    assert with_attestation((), newer) == (newer,)


def test_nothing_is_due_without_a_running_rollout() -> None:
    world = serving_world()
    assert decide(world.state, world.now_ms, ()) == []
    world.serve("1", "r1")
    assert decide(world.state, world.now_ms, ("a1",)) == []


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING, Phase.COMMITTING])
def test_a_gate_that_holds_is_taken_and_one_that_does_not_is_waited_for(phase: Phase) -> None:
    world = started()
    world.reach("r1", phase)
    gate = ROWS[phase].gate
    assert gate is not None
    world.attest("r1", gate, only=["a1", "b1"])
    assert decide(world.state, world.now_ms, ()) == []
    world.attest("r1", gate, only=["a2"])
    assert decide(world.state, world.now_ms, ()) == [c.AdvanceRollout("r1", phase)]


def test_what_is_due_is_taken_by_apply_until_nothing_is_left() -> None:
    world = started()
    for stage in (Stage.PREPARED, Stage.READY, Stage.ACTIVE):
        world.attest("r1", stage)
        for body in decide(world.state, world.now_ms, ()):
            world.ok(body)
    assert world.rollout("r1").phase is Phase.ACTIVE
    assert decide(world.state, world.now_ms, ()) == []


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING])
def test_a_failure_before_the_decision_aborts_with_its_reason(phase: Phase) -> None:
    world = started()
    world.reach("r1", phase)
    world.ok(attestation(world.rollout("r1"), "a2", SideName.PRIMARY, Stage.FAILED, detail="no room for 5 bytes"))
    (body,) = decide(world.state, world.now_ms, ())
    assert body == c.AbortRollout("r1", "out_of_memory", "a2", "no room for 5 bytes")
    world.ok(body)


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING])
def test_a_missing_node_before_the_decision_aborts_even_when_the_gate_holds(phase: Phase) -> None:
    world = started()
    world.reach("r1", phase)
    gate = ROWS[phase].gate
    assert gate is not None
    world.attest("r1", gate)
    (body,) = decide(world.state, world.now_ms, {"b1", "other"})
    assert isinstance(body, c.AbortRollout)
    assert (body.code, body.node) == ("node_missing", "b1")
    world.ok(body)


def test_neither_failure_nor_absence_nor_time_touches_a_decided_switch() -> None:
    world = started()
    world.reach("r1", Phase.COMMITTING)
    world.attest("r1", Stage.FAILED, only=["a1"])
    assert decide(world.state, world.now_ms + 10**12, ("a2",)) == []


@pytest.mark.parametrize(("phase", "limit_ms"), [(Phase.PREPARING, 7_000), (Phase.SYNCING, 3_000)])
def test_a_phase_that_takes_longer_than_its_limit_is_aborted(phase: Phase, limit_ms: int) -> None:
    world = serving_world()
    world.ok(msgspec.structs.replace(declaration(), policy=Policy(prepare_timeout_ms=7_000, sync_timeout_ms=3_000)))
    world.start("1", "r1")
    world.reach("r1", phase)
    begin_ms = world.rollout("r1").phase_ms
    assert decide(world.state, begin_ms + limit_ms, ()) == []
    (body,) = decide(world.state, begin_ms + limit_ms + 1, ())
    assert isinstance(body, c.AbortRollout)
    assert (body.code, body.node) == (f"{phase}_timeout", "")
    assert body.detail.endswith("waiting for a1, a2, b1")
    world.ok(body)


def test_a_gate_that_holds_is_taken_although_the_time_is_up() -> None:
    world = started()
    world.attest("r1", Stage.PREPARED)
    assert decide(world.state, world.now_ms + 10**12, ()) == [c.AdvanceRollout("r1", Phase.PREPARING)]


def test_a_clock_behind_the_phase_aborts_nothing() -> None:
    world = started()
    assert decide(world.state, 0, ()) == []


def test_a_long_list_of_nodes_is_cut_in_the_reason() -> None:
    world = World()
    world.ok(publication("m", "1"))
    world.ok(declaration("d", "m", [f"n{number}" for number in range(9)]))
    world.start("1", "r1")
    (body,) = decide(world.state, world.now_ms + 10**12, ())
    assert isinstance(body, c.AbortRollout)
    assert body.detail.endswith("waiting for b1, n0, n1 and others") or body.detail.endswith("waiting for n0, n1, n2 and others")


def test_each_deployment_is_decided_on_its_own_in_order() -> None:
    world = started()
    world.ok(declaration("c"))
    world.start("2", "r2", "c")
    world.attest("r1", Stage.PREPARED)
    world.ok(attestation(world.rollout("r2"), "a1", SideName.PRIMARY, Stage.FAILED))
    bodies = decide(world.state, world.now_ms, ())
    assert [type(body) for body in bodies] == [c.AbortRollout, c.AdvanceRollout]
