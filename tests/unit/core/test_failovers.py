"""Fail-over: one decision, every precondition judged and told at once, and nothing but a verdict can be forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from raftmeta.core import commands as c
from raftmeta.core import failover
from raftmeta.core.failover import CODES, OF_THE_VERDICT, Wanted, heard_reasons, reasons, scene_of, standing_against
from raftmeta.core.proof import Heard, proofs
from raftmeta.core.state import encode_record
from raftmeta.core.types import MAX_ANSWER_AGE_MS, Deployment, Phase, Policy, SideName
from tests.support.commands import World, check, declaration, evidence, serving_world

PRIMARY, STANDBY = SideName.PRIMARY, SideName.STANDBY
MINUTE_MS = 60_000


def prove(made: World, *nodes: str, version: str = "1") -> None:
    """These nodes say that they serve it, in the order of now."""
    order = made.state.deployments["d"].order_revision
    for node in nodes or ("a1", "a2", "b1"):
        made.ok(evidence(node, version, order_revision=order, told_ms=made.state.revision))


def ready_world() -> World:
    """Nothing speaks against a fail-over to the standby side."""
    made = serving_world(level=2)
    made.serve("1", "r1")
    prove(made)
    made.ok(check(made.state))
    return made


def over(to: SideName = STANDBY, expected: SideName | None = None, *, force: bool = False, age_ms: int = MINUTE_MS) -> c.FailOver:
    return c.FailOver("d", to, expected, age_ms, force)


def refused(made: World, body: c.FailOver) -> list[str]:
    outcome = made.refused("failover_refused", body)
    told: dict[str, Any] = msgspec.msgpack.decode(outcome.result)
    assert len(told["reasons"]) == len(told["details"])
    assert all(code in outcome.detail for code in told["reasons"])
    return list(told["reasons"])


def seen(made: World) -> Deployment:
    return made.state.deployments["d"]


def test_a_failover_is_one_decision_with_an_order_of_its_own() -> None:
    made = ready_world()
    before = seen(made)
    done = made.ok(over(expected=PRIMARY), principal="on-call")
    after, decided = seen(made), seen(made).failover
    assert done == {"serving_side": "standby", "order_revision": made.state.revision, "overridden": []}
    assert (after.serving_side, after.order_revision, after.activated_revision) == (STANDBY, made.state.revision, made.state.revision)
    assert (after.version, after.previous, after.rollout_id) == (before.version, before.previous, before.rollout_id)
    assert decided is not None
    assert (decided.to, decided.principal, decided.forced, decided.overridden) == (STANDBY, "on-call", False, ())
    assert decided.verdict_revision == made.state.verdicts["d"].revision
    assert [(event.kind, event.key, event.value) for event in made.events] == [("deployment", "d", after)]


def test_a_way_back_takes_a_verdict_and_evidence_of_the_new_order() -> None:
    made = ready_world()
    made.ok(over())
    assert refused(made, over(PRIMARY)) == ["verdict_of_another_order"]
    prove(made)
    made.ok(check(made.state))
    made.ok(over(PRIMARY, STANDBY))
    assert (seen(made).serving_side, seen(made).failover.to) == (PRIMARY, PRIMARY)  # type: ignore[union-attr]


def test_a_verdict_is_as_old_as_its_oldest_reading() -> None:
    """A check that read large memory for minutes is recorded long after the first node had answered."""
    made = ready_world()
    made.ok(check(made.state, age_ms=MINUTE_MS + 1))
    assert refused(made, over()) == ["verdict_too_old"]
    made.ok(check(made.state, age_ms=MINUTE_MS // 2))
    made.ok(over())


@pytest.mark.parametrize("age_ms", [-1, MAX_ANSWER_AGE_MS + 1])
def test_an_age_that_no_check_has_is_refused(age_ms: int) -> None:
    made = ready_world()
    assert made.do(check(made.state, age_ms=age_ms)).code == "bad_field"


BROKEN: dict[str, Callable[[World], object]] = {
    "rollout_running": lambda made: made.start("2", "r2"),
    "verdict_not_consistent": lambda made: made.ok(check(made.state, "diverged")),
    "verdict_of_another_order": lambda made: (made.serve("2", "r2"), prove(made, version="2")),
    "verdict_of_other_nodes": lambda made: made.ok(msgspec.structs.replace(declaration(), policy=Policy(prepare_timeout_ms=5))),
    "verdict_too_old": lambda made: setattr(made, "now_ms", made.now_ms + MINUTE_MS),
    "node_unproven": lambda made: (made.ok(declaration("d", "m", ("a1", "a2"), ("b1", "b2"))), made.ok(check(made.state))),
    "node_serves_other_bytes": lambda made: made.ok(evidence("b1", "2", told_ms=9_000)),
}


@pytest.mark.parametrize("code", sorted(BROKEN))
@pytest.mark.parametrize("force", [False, True])
def test_each_precondition_refuses_by_itself_and_force_overrides_those_of_the_verdict_alone(code: str, force: bool) -> None:
    made = ready_world()
    BROKEN[code](made)
    if force and code in OF_THE_VERDICT:
        assert made.ok(over(force=True), principal="on-call")["overridden"] == [code]
        decided = seen(made).failover
        assert decided is not None
        assert (decided.forced, decided.overridden, decided.principal) == (True, (code,), "on-call")
    else:
        assert refused(made, over(force=force)) == [code]
        assert seen(made).serving_side is PRIMARY


@pytest.mark.parametrize("force", [False, True])
def test_all_that_speaks_against_it_is_told_at_once(force: bool) -> None:
    made = serving_world(level=2)
    made.serve("1", "r1")
    made.ok(declaration("d", "m", ("a1",), ()))
    made.start("2", "r2")
    expected = ["rollout_running", "side_absent", "serving_side_differs", *([] if force else ["verdict_missing"])]
    assert refused(made, over(STANDBY, STANDBY, force=force)) == expected
    made = serving_world(level=2)
    expected = ["side_serves_already", "nothing_decided", *([] if force else ["verdict_missing"]), "node_unproven"]
    assert refused(made, over(PRIMARY, force=force)) == expected


def test_a_verdict_from_before_the_level_was_raised_is_of_no_order() -> None:
    made = serving_world(level=1)
    made.serve("1", "r1")
    made.ok(c.RecordVerdict("d", "consistent", b"{}"))
    made.ok(c.RaiseFeatureLevel(2))
    prove(made)
    assert refused(made, over()) == ["verdict_of_another_order"]


def test_a_finding_of_the_side_that_is_to_serve_refuses_and_of_the_other_one_does_not() -> None:
    made = ready_world()
    made.ok(evidence("a1", "1", told_ms=9_000, finding="integrity_mismatch"))
    made.ok(over())
    made = ready_world()
    made.ok(evidence("b1", "1", told_ms=9_000, finding="integrity_mismatch"))
    assert refused(made, over(force=True)) == ["node_serves_other_bytes"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (msgspec.structs.replace(over(), deployment="x"), "unknown_deployment"),
        (over(age_ms=-1), "bad_field"),
        (over(age_ms=1 << 63), "bad_field"),
    ],
)
def test_what_cannot_be_is_refused(body: c.FailOver, code: str) -> None:
    ready_world().refused(code, body)


def test_activations_roll_backs_and_declarations_go_on_while_the_standby_serves() -> None:
    made = ready_world()
    made.ok(over())
    made.serve("2", "r2")
    assert (seen(made).version, seen(made).serving_side) == ("2", STANDBY)
    made.ok(c.RollBack("d", None, "r3"))
    made.reach("r3", Phase.ACTIVE)
    assert (seen(made).version, seen(made).serving_side) == ("1", STANDBY)
    made.ok(declaration("d", "m", ("a1",), ("b1", "b2")))
    assert (seen(made).serving_side, seen(made).standby.nodes) == (STANDBY, ("b1", "b2"))  # type: ignore[union-attr]
    made.refused("side_serves", declaration("d", "m", ("a1",), ()))


def test_the_standby_side_can_go_once_the_primary_serves_again() -> None:
    made = ready_world()
    made.ok(over())
    made.ok(over(PRIMARY, force=True))
    made.ok(declaration("d", "m", ("a1",), ()))
    assert seen(made).standby is None


MOVES = {
    "swapped": (("b1",), ("a1", "a2")),
    "swapped with strangers": (("b1",), ("x1",)),
    "one node over to the side that serves": (("a1",), ("a2", "b1")),
    "one node over to the side that does not serve": (("a1", "b2"), ("b1",)),
    "strangers alone serve": (("a1", "a2"), ("x1", "x2")),
}


@pytest.mark.parametrize(("primary", "standby"), MOVES.values(), ids=list(MOVES))
def test_no_declaration_decides_which_nodes_take_requests_after_a_failover(primary: tuple[str, ...], standby: tuple[str, ...]) -> None:
    made = ready_world()
    made.ok(declaration("d", "m", ("a1", "a2"), ("b1", "b2")))
    prove(made, "a1", "a2", "b1", "b2")
    made.ok(check(made.state))
    before = made.state
    made.ok(declaration("d", "m", primary, standby))
    made.state = before
    made.ok(over())
    outcome = made.refused("side_serves", declaration("d", "m", primary, standby))
    assert "the standby side" in outcome.detail and "fail over" in outcome.detail


def test_after_the_way_back_no_node_changes_sides_either() -> None:
    made = ready_world()
    made.ok(over())
    made.ok(over(PRIMARY, force=True))
    made.refused("side_serves", declaration("d", "m", ("b1",), ("a1", "a2")))
    made.refused("side_serves", declaration("d", "m", ("a1",), ("a2", "b1")))
    made.refused("side_serves", declaration("d", "m", ("x1",), ("b1",)))
    made.ok(declaration("d", "m", ("a1", "a2", "a3"), ("b1",)))


def test_nodes_come_and_go_on_both_sides_after_a_failover() -> None:
    """A lost zone is replaced and grown, one declaration after the other; a node that was taken out may come back on the other side."""
    made = ready_world()
    made.ok(over())
    for primary, standby in [
        (("a3",), ("b1",)),
        (("a3", "a4"), ("b1", "b2")),
        (("a3",), ("b2",)),
        (("a3", "b1"), ("a4", "b2")),
    ]:
        made.ok(declaration("d", "m", primary, standby))
        assert seen(made).serving_side is STANDBY
    made.refused("side_serves", declaration("d", "m", ("a3",), ()))


def test_a_deployment_without_a_failover_has_the_bytes_that_it_had() -> None:
    """Twelve fields, as builds of level 1 write them; all of them once there was one, also after the way back."""
    made = ready_world()
    assert len(msgspec.msgpack.decode(_bytes(made))) == 12
    made.ok(over())
    made.ok(over(PRIMARY, force=True))
    assert len(msgspec.msgpack.decode(_bytes(made))) == 14


def _bytes(made: World) -> bytes:
    return encode_record(seen(made))


@pytest.mark.parametrize(
    ("heard", "codes"),
    [
        ({"b1": Heard("boot-1", 9, False)}, []),
        ({"a1": Heard("boot-1", 9, True), "b1": Heard("boot-1", 9, False)}, []),
        ({}, ["node_silent"]),
        ({"b1": Heard("boot-1", 9_000, True)}, ["node_silent"]),
        ({"b1": Heard("boot-2", 9, False)}, ["node_restarted"]),
        ({"b1": Heard("boot-1", 9, False, ready=False)}, ["node_not_ready"]),
        ({"b1": Heard("boot-2", 9, False, ready=False)}, ["node_restarted", "node_not_ready"]),
        ({"b1": Heard("boot-1", 9_000, True, ready=False)}, ["node_silent"]),
        ({"a1": Heard("boot-1", 9, False, ready=False), "b1": Heard("boot-1", 9, False)}, []),
    ],
)
def test_a_member_adds_the_nodes_of_the_side_that_it_does_not_hear(heard: dict[str, Heard], codes: list[str]) -> None:
    made = ready_world()
    found = heard_reasons(proofs(made.state, seen(made), heard), STANDBY)
    assert [(reason.code, reason.nodes) for reason in found] == [(code, ("b1",)) for code in codes]
    assert standing_against(found, True) == found, "force overrides no node"


@settings(max_examples=80, deadline=None)
@given(hs.lists(hs.sampled_from([*BROKEN, "mend"]), max_size=5), hs.booleans(), hs.sampled_from(SideName))
def test_what_is_asked_and_what_is_decided_judge_alike(steps: list[str], force: bool, to: SideName) -> None:
    made = ready_world()
    for place, step in enumerate(steps):
        if step == "mend":
            made.do(check(made.state))
            prove(made, *_nodes(made), version=seen(made).version)
        elif step == "verdict_of_another_order":
            made.do(c.Activate("d", "2" if seen(made).version == "1" else "1", None, f"s{place}"))
            if seen(made).rollout_id == f"s{place}":
                made.reach(f"s{place}", Phase.ACTIVE)
        elif step == "rollout_running":
            made.do(c.Activate("d", "2" if seen(made).version == "1" else "1", None, f"s{place}"))
        else:
            made.now_ms += MINUTE_MS if step == "verdict_too_old" else 0
            _try(made, step)
    wanted = Wanted(to, None, MINUTE_MS)
    asked = standing_against(reasons(scene_of(made.state, seen(made), made.now_ms + 1), wanted), force)
    before = seen(made)
    outcome = made.do(over(to, force=force))
    assert (outcome.code == "ok") == (not asked), (outcome, asked)
    assert {reason.code for reason in asked} <= set(CODES)
    if outcome.code == "ok":
        assert seen(made).serving_side is to is not before.serving_side
        assert not failover.standing_against(asked, force)
        assert made.state.rollouts[before.rollout_id].phase is Phase.ACTIVE
    else:
        assert seen(made) == before


def _nodes(made: World) -> list[str]:
    deployment = seen(made)
    return [*deployment.primary.nodes, *(deployment.standby.nodes if deployment.standby else ())]


def _try(made: World, step: str) -> None:
    if step == "verdict_not_consistent":
        made.do(check(made.state, "diverged"))
    elif step == "verdict_of_other_nodes":
        made.do(msgspec.structs.replace(declaration(), policy=Policy(prepare_timeout_ms=5)))
    elif step == "node_unproven":
        made.do(declaration("d", "m", ("a1", "a2"), ("b1", "b2")))
    elif step == "node_serves_other_bytes":
        made.do(evidence("b1", "2", told_ms=made.state.revision))
