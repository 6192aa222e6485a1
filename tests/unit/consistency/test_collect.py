"""A check of a whole fleet: what is asked, of whom, in which order, and which verdict comes out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from consistency.agent_answers import AgentFault
from consistency.collect import Checker
from raftmeta.client import Reply
from raftmeta.core.errors import RaftmetaError
from tests.support.fake_fleet import DEPLOYMENT, MODEL, FakeAgents, FakeFleet, FakeNode, check, codes, verdict_of, weights


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


def test_equal_sides_are_consistent_after_one_question_to_each(fleet: FakeFleet) -> None:
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents).check([DEPLOYMENT]))
    assert (made.verdict, made.exit_status, codes(made)) == ("consistent", 0, [])
    assert sorted(agents.asked) == [("a1", "roots"), ("b1", "roots")]
    assert (made.mismatch_ratio, made.tensors_total, made.tensors_different) == (0.0, 4, 0)
    assert (made.models_primary, made.models_standby, made.lag_ms_primary, made.lag_ms_standby) == (1, 1, 40.0, 40.0)
    assert (made.version, made.number, made.revision, made.generation) == ("v1", 1, 812, 2)
    assert all(node.answered and node.equal_to_manifest for node in made.nodes)


# Nodes that cannot be looked at.


@pytest.mark.parametrize("code", ["unreachable", "timed_out", "starting", "bad_answer"])
def test_a_node_that_does_not_answer_makes_it_incomplete(fleet: FakeFleet, code: str) -> None:
    fleet.nodes_by_name["b1"].fault = AgentFault(code, "because")
    made = verdict_of(fleet)
    assert (made.verdict, made.exit_status) == ("incomplete", 2)
    assert [(reason.code, reason.node, reason.detail) for reason in made.reasons] == [(code, "b1", "because")]
    assert made.nodes[1].answered is False
    assert (made.models_standby, made.lag_ms_standby) == (None, None)


def test_a_node_that_no_member_knows_makes_it_incomplete(fleet: FakeFleet) -> None:
    del fleet.urls["b1"]
    (made,) = asyncio.run(Checker(fleet, FakeAgents(fleet), hear_s=0.0).check([DEPLOYMENT]))
    assert (made.verdict, codes(made)) == ("incomplete", ["unknown_node"])


def test_a_member_that_has_just_started_is_given_the_time_to_hear_of_every_node(fleet: FakeFleet) -> None:
    said: list[str] = []
    url = fleet.urls.pop("b1")

    def say(what: str) -> None:
        said.append(what)
        if len(said) == 2:
            fleet.urls["b1"] = url  # its heartbeat arrives

    (made,) = asyncio.run(Checker(fleet, FakeAgents(fleet), say=say, hear_s=60.0).check([DEPLOYMENT]))
    assert (made.verdict, codes(made)) == ("consistent", [])
    assert said[:2] == ["waiting for a member to hear of b1"] * 2


def test_an_answer_of_another_node_makes_it_incomplete(fleet: FakeFleet) -> None:
    fleet.urls["b1"] = "http://a1"
    made = verdict_of(fleet)
    assert made.verdict == "incomplete"
    assert "asked 'b1' for 'search', the answer is of 'a1'" in made.reasons[0].detail


def test_a_difference_weighs_more_than_a_silent_node(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["a1"].damage("norm", 0)
    fleet.nodes_by_name["b1"].fault = AgentFault("unreachable", "because")
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("diverged", ["tensor", "unreachable"])


def test_a_node_that_differs_and_then_falls_silent_still_diverges(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["b1"]
    node.damage("norm", 0)

    def fall_silent(question: str) -> None:
        if question == "entries":
            node.fault = AgentFault("timed_out", "because")

    node.before_answer = fall_silent
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("diverged", ["sides", "vector_root", "timed_out"])
    assert made.mismatch_ratio is None


# Memory and nodes that change while they are looked at.


def test_a_node_that_restarts_between_two_questions_is_not_judged(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["b1"]
    node.damage("norm", 0)

    def restart(question: str) -> None:
        node.boot_id = f"boot-{question}"

    node.before_answer = restart
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("incomplete", ["changed_meanwhile"])


def test_a_switch_in_progress_is_reported_as_such(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["b1"].damage("norm", 0)
    fleet.deployments[DEPLOYMENT] |= {"order_revision": 800, "rollout_id": "r9"}
    fleet.rollouts["r9"] = {"to_version": "v1", "attestations": []}
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("incomplete", ["switching"])
    assert "rollout r9" in made.reasons[0].detail
    assert made.mismatch_ratio is None


def test_a_node_that_says_it_is_switching_is_not_judged(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["b1"].switching = True
    fleet.nodes_by_name["b1"].version = "v2"
    made = verdict_of(fleet)
    assert [(reason.code, reason.node) for reason in made.reasons] == [("switching", "b1")]
    assert made.verdict == "incomplete"


def test_a_switch_that_begins_and_ends_during_the_check_is_noticed(fleet: FakeFleet) -> None:
    def switch(question: str) -> None:
        fleet.deployments[DEPLOYMENT] |= {"order_revision": 900, "activated_revision": 901}

    fleet.nodes_by_name["a1"].before_answer = switch
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("incomplete", ["switching"])
    assert "while it was checked" in made.reasons[0].detail


def test_nodes_that_are_added_during_the_check_are_noticed(fleet: FakeFleet) -> None:
    def add(question: str) -> None:
        fleet.deployments[DEPLOYMENT] |= {"standby": {"zone": "b", "nodes": ["b1", "b2"]}}

    fleet.nodes_by_name["a1"].before_answer = add
    assert codes(verdict_of(fleet)) == ["switching"]


def test_a_switch_of_the_generation_is_noticed(fleet: FakeFleet) -> None:
    def restore(question: str) -> None:
        fleet.generation += 1

    fleet.nodes_by_name["a1"].before_answer = restore
    made = verdict_of(fleet)
    assert (made.verdict, codes(made), made.moved) == ("incomplete", ["switching"], True)


def test_a_verdict_names_the_order_and_the_revisions_that_it_is_of(fleet: FakeFleet) -> None:
    def write(question: str) -> None:
        fleet.revision = 900

    fleet.nodes_by_name["b1"].before_answer = write
    made = verdict_of(fleet)
    assert (made.order_revision, made.started_revision, made.revision, made.generation) == (700, 812, 900, 2)
    assert (made.moved, made.nodes_total, made.nodes_seen) == (False, 2, 2)


def test_another_deployment_that_gets_its_first_version_meanwhile_is_no_finding(fleet: FakeFleet) -> None:
    fleet.declare("other", ("b1",), None)

    def activate(question: str) -> None:
        fleet.declare("other", ("b1",), None, version="v1", order_revision=820, activated_revision=830)

    fleet.nodes_by_name["a1"].before_answer = activate
    for count in (1, 2):
        fleet.declare("other", ("b1",), None)
        fleet.nodes_by_name["b1"].active_models = count
        assert verdict_of(fleet).verdict == "consistent"
    fleet.nodes_by_name["b1"].active_models = 3
    assert codes(verdict_of(fleet)) == ["active_models"]


# Versions, configuration, counts, lags.


def test_a_node_on_another_version_has_one_finding_and_counts_in_the_ratio(fleet: FakeFleet) -> None:
    fleet.publish("v2", weights(2))
    node, version = fleet.nodes_by_name["b1"], fleet.versions[f"{MODEL}/v2"]
    node.tensors, node.version, node.checksum, node.config_digest = weights(2), "v2", version["checksum"], version["config_digest"]
    made = verdict_of(fleet)
    (finding,) = made.findings
    assert (finding.code, finding.node) == ("version", "b1")
    assert finding.expected.startswith("tiny/v1 ") and finding.found.startswith("tiny/v2 ")
    assert made.mismatch_ratio == 1.0


def test_a_node_that_serves_nothing_diverges(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["b1"]
    node.version, node.checksum, node.tensors, node.active_models = "", "", {}, 0
    assert codes(verdict_of(fleet)) == ["version", "active_models"]


def test_another_configuration_or_tokenizer_is_a_finding(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["b1"].config_digest = "f" * 64
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("diverged", ["config"])
    assert "tokenizer" in made.findings[0].detail


def test_a_model_that_nobody_decided_for_a_node_is_a_finding(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["b1"].active_models = 2
    made = verdict_of(fleet)
    assert [(finding.code, finding.node, finding.expected, finding.found) for finding in made.findings] == [
        ("active_models", "b1", "1", "2")
    ]
    assert (made.models_primary, made.models_standby) == (1, 2)


def test_models_of_other_deployments_on_the_node_are_expected(fleet: FakeFleet) -> None:
    fleet.declare("other", ("b1",), None, version="v1", order_revision=5, activated_revision=6)
    fleet.declare("idle", ("b1",), None)
    fleet.nodes_by_name["b1"].active_models = 2
    assert verdict_of(fleet).verdict == "consistent"
    fleet.nodes_by_name["b1"].active_models = 1
    assert codes(verdict_of(fleet)) == ["active_models"]


def test_while_another_deployment_gets_its_first_version_both_counts_are_right(fleet: FakeFleet) -> None:
    fleet.declare("other", ("b1",), None, version="v1", order_revision=6, activated_revision=0)
    for count in (1, 2):
        fleet.nodes_by_name["b1"].active_models = count
        assert verdict_of(fleet).verdict == "consistent"
    fleet.deployments["other"]["previous"] = "v0"  # a later version: one model before and after
    assert codes(verdict_of(fleet)) == []
    fleet.nodes_by_name["b1"].active_models = 1
    assert codes(verdict_of(fleet)) == ["active_models"]


@pytest.mark.parametrize(("standby_ms", "verdict"), [(240.0, "consistent"), (240.5, "diverged"), (0.0, "consistent")])
def test_mean_lags_may_be_200_ms_apart(fleet: FakeFleet, standby_ms: float, verdict: str) -> None:
    fleet.nodes_by_name["b1"].lag_ms = standby_ms
    made = verdict_of(fleet)
    assert made.verdict == verdict
    assert [finding.code for finding in made.findings] == (["lag"] if verdict == "diverged" else [])


def test_the_lag_of_a_side_is_the_mean_of_its_nodes() -> None:
    fleet = FakeFleet(("a1", "a2"), ("b1",))
    fleet.nodes_by_name["a2"].lag_ms = 100.0
    made = verdict_of(fleet)
    assert (made.verdict, made.lag_ms_primary) == ("consistent", 70.0)


def test_after_a_restart_the_attested_lag_counts(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["b1"].lag_ms = -1
    attestation = {"node": "b1", "stage": "active", "counters": {"lag_ms": 55}}
    fleet.rollouts["r1"] = {"to_version": "v1", "attestations": [attestation]}
    fleet.deployments[DEPLOYMENT]["rollout_id"] = "r1"
    made = verdict_of(fleet)
    assert (made.verdict, made.lag_ms_standby) == ("consistent", 55.0)
    fleet.rollouts["r1"]["to_version"] = "v0"  # of another version: says nothing about this one
    assert codes(verdict_of(fleet)) == ["lag_unknown"]


def test_a_side_whose_lag_nobody_knows_is_incomplete(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["b1"].lag_ms = -1
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("incomplete", ["lag_unknown"])


# Deployments.


def test_without_a_standby_the_primary_is_compared_with_the_manifest() -> None:
    fleet = FakeFleet(("a1",), None)
    assert verdict_of(fleet).verdict == "consistent"
    fleet.nodes_by_name["a1"].damage("norm", 0)
    assert verdict_of(fleet).verdict == "diverged"


def test_a_deployment_without_a_version_is_incomplete(fleet: FakeFleet) -> None:
    fleet.declare(DEPLOYMENT, ("a1",), ("b1",))
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("incomplete", ["nothing_active"])


def test_a_deployment_without_nodes_is_incomplete(fleet: FakeFleet) -> None:
    fleet.deployments[DEPLOYMENT] |= {"primary": {"zone": "a", "nodes": []}, "standby": None}
    assert codes(verdict_of(fleet)) == ["no_nodes"]


def test_all_deployments_are_checked_in_order_when_none_is_named(fleet: FakeFleet) -> None:
    fleet.declare("another", ("a1",), None, version="v1", order_revision=5, activated_revision=6)
    fleet.declare("idle", ("a1",), None)
    assert [made.deployment for made in check(fleet)] == ["another", DEPLOYMENT], "of what serves nothing yet there is nothing to say"
    assert [made.deployment for made in check(fleet, DEPLOYMENT, "another")] == [DEPLOYMENT, "another"]


def test_an_unknown_deployment_is_refused_before_anything_is_asked(fleet: FakeFleet) -> None:
    agents = FakeAgents(fleet)
    with pytest.raises(RaftmetaError, match="no deployment is called 'seach'") as caught:
        asyncio.run(Checker(fleet, agents).check([DEPLOYMENT, "seach"]))
    assert caught.value.code == "unknown_deployment"
    assert agents.asked == []


def test_members_that_fall_silent_leave_that_deployment_incomplete(fleet: FakeFleet) -> None:
    def fall_silent(question: str) -> None:
        fleet.fault = RaftmetaError("no_quorum", "because")

    fleet.nodes_by_name["a1"].before_answer = fall_silent
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("incomplete", ["no_quorum"])
    assert (made.generation, made.order_revision, made.version, made.started_revision, made.nodes_seen) == (2, 700, "v1", 812, 0)


def test_what_members_refuse_about_one_deployment_leaves_that_one_incomplete_and_the_others_judged(fleet: FakeFleet) -> None:
    fleet.publish("v2", weights(2))
    fleet.declare("other", ("c1",), None, version="v2", order_revision=5, activated_revision=6)
    version = fleet.versions[f"{MODEL}/v2"]
    fleet.nodes_by_name["c1"] = FakeNode("c1", weights(2), "v2", version["checksum"], version["config_digest"])
    fleet.urls["c1"] = "http://c1"
    fleet.nodes_by_name["b1"].damage("norm", 0)
    root = fleet.versions[f"{MODEL}/v1"]["vector_root"]
    fleet.versions[f"{MODEL}/v1"]["vector_root"] = "e" * 64  # the manifest is another one's
    assert [(made.verdict, codes(made)) for made in check(fleet)] == [("consistent", []), ("incomplete", ["integrity"])]
    fleet.versions[f"{MODEL}/v1"]["vector_root"] = root
    whole = fleet.get_manifest

    async def deleted(model: str, label: str, /) -> Reply:
        if label == "v1":
            raise RaftmetaError("unknown_version", "no version v1")
        return await whole(model, label)

    fleet.get_manifest = deleted  # type: ignore[method-assign]
    assert [(made.verdict, codes(made)) for made in check(fleet)] == [("consistent", []), ("incomplete", ["unknown_version"])]


@pytest.mark.parametrize(
    "rollout",
    [None, {"to_version": 5}, {"to_version": "v1", "attestations": [{"node": "b1", "stage": "active", "counters": {"lag_ms": "x"}}]}],
)
def test_a_rollout_that_is_not_known_or_not_understood_leaves_the_lag_unknown(fleet: FakeFleet, rollout: dict[str, Any] | None) -> None:
    fleet.nodes_by_name["b1"].lag_ms = -1
    fleet.deployments[DEPLOYMENT]["rollout_id"] = "r1"

    async def told(rollout_id: str, /) -> Reply:
        if rollout is None:
            raise RaftmetaError("unknown_rollout", "no rollout r1")
        return Reply(rollout, status=200, revision=1, generation=2)

    fleet.get_rollout = told  # type: ignore[method-assign]
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("incomplete", ["lag_unknown"])
    fleet.nodes_by_name["b1"].damage("norm", 0)
    assert verdict_of(fleet).verdict == "diverged", "the weights are compared all the same"


@pytest.mark.parametrize("body", [{}, {"items": None}, {"items": ["x"]}, {"items": [{"url": "http://a1"}]}])
def test_members_that_answer_in_another_form_are_refused_by_name(fleet: FakeFleet, body: dict[str, Any]) -> None:
    async def told(*_: Any) -> Reply:
        return Reply(body, status=200, revision=1, generation=2)

    for call in ("nodes", "list_deployments"):
        other = FakeFleet()
        setattr(other, call, told)
        with pytest.raises(RaftmetaError, match="the member's answer is not") as caught:
            check(other)
        assert caught.value.code == "internal"


def test_a_node_without_an_address_is_one_that_no_member_knows(fleet: FakeFleet) -> None:
    async def told() -> Reply:
        return Reply({"items": [{"node": "a1", "url": "http://a1"}, {"node": "b1"}]}, status=200, revision=1, generation=2)

    fleet.nodes = told  # type: ignore[method-assign]
    (made,) = asyncio.run(Checker(fleet, FakeAgents(fleet), hear_s=0.0).check([DEPLOYMENT]))
    assert (made.verdict, codes(made)) == ("incomplete", ["unknown_node"])


def test_answers_of_a_member_that_are_no_deployment_are_refused(fleet: FakeFleet) -> None:
    bad: dict[str, Any] = {"name": "x", "version": 5}
    fleet.deployments["x"] = bad
    with pytest.raises(RaftmetaError, match="not a deployment"):
        check(fleet)
