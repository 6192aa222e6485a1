"""From deployments and rollouts as the control plane tells them to the goals of one node."""

from __future__ import annotations

from typing import Any

import pytest

from node_agent.desired import DeploymentView, Desired, Event, Identity, RolloutView, read
from node_agent.plan import Change, Drain, Order, Target
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import DrainOverdue, Phase, SideName, Stage

ME = Identity("n1", "boot-1")
V2 = Target("encoder", "2.0.0", "2" * 64, "b" * 64)


def deployment(**fields: Any) -> dict[str, Any]:
    return {
        "name": "search",
        "model": "encoder",
        "primary": {"zone": "a", "nodes": ["n1"]},
        "standby": {"zone": "b", "nodes": ["n2"]},
        "policy": {"prepare_timeout_ms": 1},
        "version": "1.0.0",
        "previous": "",
        "rollout_id": "r-1",
        "order_revision": 7,
        "a_later_field": True,
    } | fields


def rollout(**fields: Any) -> dict[str, Any]:
    return {
        "id": "r-1",
        "deployment": "search",
        "model": "encoder",
        "to_version": "2.0.0",
        "checksum": "2" * 64,
        "vector_root": "b" * 64,
        "phase": "preparing",
        "status": "running",
        "attestations": [],
    } | fields


def attestation(stage: str, node: str = "n1", boot_id: str = "boot-1") -> dict[str, Any]:
    return {"node": node, "stage": stage, "boot_id": boot_id, "side": "primary"}


def desired(*rollouts: dict[str, Any], **fields: Any) -> Desired:
    made = Desired(ME)
    made.replace(1, [deployment(**fields)])
    for item in rollouts:
        made.apply(1, [Event("rollout", item["id"], "put", item)])
    return made


def change_of(made: Desired) -> Change | None:
    return made.goal(made.mine()[0], None).change


def test_a_deployment_is_this_nodes_when_either_side_lists_it() -> None:
    assert [item.name for item in desired().mine()] == ["search"]
    other = Desired(Identity("n2", "boot"))
    other.replace(1, [deployment()])
    assert other.goal(other.mine()[0], None).side is SideName.STANDBY
    assert desired(primary={"zone": "a", "nodes": ["n9"]}, standby=None).mine() == []


def test_the_goal_carries_the_fence_and_the_running_rollout() -> None:
    made = desired(rollout(attestations=[attestation("ready", "n2"), attestation("prepared")]))
    goal = made.goal(made.mine()[0], None)
    assert goal.order == Order(1, 7)
    assert goal.change == Change("r-1", Phase.PREPARING, V2, Stage.PREPARED)


def test_the_goal_carries_how_long_a_slot_may_be_kept_and_what_happens_then() -> None:
    def drain_of(**policy: Any) -> Drain:
        made = desired(policy={"prepare_timeout_ms": 1} | policy)
        return made.goal(made.mine()[0], None).drain

    assert drain_of(drain_timeout_ms=1_500, drain_overdue="cancel") == Drain(1.5, DrainOverdue.CANCEL)
    assert drain_of() == Drain(60.0, DrainOverdue.WAIT), "members of an earlier build do not say"
    assert "kill" in desired(policy={"drain_overdue": "kill"}).faults()["search"]


@pytest.mark.parametrize("fields", [{"policy": {"drain_timeout_ms": 10**400}}, {"order_revision": 2**63}, {"order_revision": -1}])
def test_a_number_that_no_record_of_a_node_holds_is_none_of_a_deployment(fields: dict[str, Any]) -> None:
    with pytest.raises(RaftmetaError, match="no DeploymentView"):
        read(deployment(**fields), DeploymentView)


def test_what_an_earlier_start_of_the_agent_attested_does_not_count() -> None:
    made = desired(rollout(attestations=[attestation("ready", boot_id="boot-0")]))
    change = change_of(made)
    assert change is not None and change.attested is None


@pytest.mark.parametrize("fields", [{"status": "done"}, {"status": "failed"}, {"id": "r-0"}])
def test_a_rollout_that_ended_or_is_not_the_deployments_is_no_goal(fields: dict[str, Any]) -> None:
    assert change_of(desired(rollout(**fields))) is None


def test_the_committed_version_is_known_from_the_rollout_that_brought_it() -> None:
    made = desired(rollout(phase="committing"), version="2.0.0")
    assert made.known_target(made.mine()[0]) == V2
    assert desired(rollout()).known_target(desired(rollout()).mine()[0]) is None


def test_all_events_of_a_revision_count_together() -> None:
    made = desired()
    made.apply(
        2,
        [
            Event("deployment", "search", "put", deployment(version="2.0.0", order_revision=9)),
            Event("rollout", "r-1", "put", rollout(phase="committing")),
            Event("model", "encoder", "put", {}),
        ],
    )
    goal = made.goal(made.mine()[0], V2)
    assert goal.order == Order(2, 9)
    assert goal.change is not None and goal.change.phase is Phase.COMMITTING


def test_a_deleted_deployment_and_one_that_no_longer_lists_the_node_are_gone() -> None:
    made = desired()
    made.apply(1, [Event("deployment", "search", "put", deployment(primary={"zone": "a", "nodes": ["n3"]}))])
    assert made.mine() == []
    made = desired()
    made.apply(1, [Event("deployment", "search", "delete", None)])
    assert made.mine() == []


def test_a_record_that_cannot_be_read_is_an_error_that_names_its_kind() -> None:
    with pytest.raises(RaftmetaError, match="no RolloutView"):
        read(rollout(phase="elsewhere"), RolloutView)


ODD = {"policy": {"drain_overdue": "ask"}}  # of a later build
ELSEWHERE = {"primary": {"zone": "a", "nodes": ["n7"]}, "standby": None}


def test_a_record_that_cannot_be_read_is_the_trouble_of_its_own_deployment() -> None:
    made = Desired(ME)
    made.replace(1, [deployment(name="alpha", **ODD), deployment()])
    assert [item.name for item in made.mine()] == ["search"]
    assert set(made.faults()) == {"alpha"} and "ask" in made.faults()["alpha"]
    assert made.stays("alpha"), "it lists this node, whatever else it says"
    made.apply(2, [Event("deployment", "alpha", "put", deployment(name="alpha")), Event("deployment", "search", "put", None)])
    assert [item.name for item in made.mine()] == ["alpha"]
    assert set(made.faults()) == {"search"}
    assert made.stays("search"), "nobody knows whose it is"


def test_a_record_of_other_nodes_is_not_read_beyond_whose_it_is() -> None:
    made = Desired(ME)
    made.replace(1, [deployment(**ODD, **ELSEWHERE)])
    assert (made.mine(), made.sides(), made.faults(), made.stays("search")) == ([], [], {}, False)


def test_the_sides_of_a_record_are_heard_whatever_its_other_fields_say() -> None:
    made = desired(serving_side="standby", failover={"to": "standby"}, **ODD)
    assert made.mine() == []
    assert [(item.name, item.decided_side) for item in made.sides()] == [("search", SideName.STANDBY)]


def test_a_record_without_a_name_takes_no_deployment_away() -> None:
    made = Desired(ME)
    made.replace(1, [deployment(name="alpha"), {"name": 7}, "none"])
    assert [item.name for item in made.mine()] == ["alpha"]
    assert made.stays("search") and "" in made.faults()
    made.replace(1, [deployment(name="alpha")])
    assert not made.stays("search") and not made.faults()


def test_a_record_under_the_name_of_another_is_none_of_either() -> None:
    made = desired()
    made.apply(2, [Event("deployment", "alpha", "put", deployment())])
    assert [item.name for item in made.mine()] == ["search"]
    assert set(made.faults()) == {"alpha"}


def test_a_rollout_that_cannot_be_read_has_to_be_asked_for_and_only_the_right_one_counts() -> None:
    made = desired(rollout())
    item = made.mine()[0]
    assert not made.lacks_rollout(item)
    before = made.stamp("search")
    made.apply(2, [Event("rollout", "r-1", "put", rollout(phase="elsewhere")), Event("rollout", "r-8", "put", None)])
    assert made.lacks_rollout(item) and made.stamp("search") != before
    for wrong in ({"id": "r-0"}, {"deployment": "alpha"}):
        with pytest.raises(RaftmetaError, match="bad_json"):
            made.learn(item, read(rollout(**wrong), RolloutView))
    made.learn(item, read(rollout(), RolloutView))
    assert not made.lacks_rollout(item)
