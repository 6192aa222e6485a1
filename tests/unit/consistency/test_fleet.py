"""A check of many nodes: how often who is asked, what is kept, who may be missing, and digests of all tensors."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from consistency import vector, weights
from consistency.agent_answers import AgentFault
from consistency.asking import CLOSER_QUESTIONS, Patience
from consistency.collect import Checker
from consistency.findings import Answer, Difference, DigestPage, Limits, NodePlace, Target, TensorSpec, Verdict
from raftmeta.core.errors import RaftmetaError
from tests.support.fake_fleet import MODEL, FakeAgents, FakeFleet, codes, in_memory


def check(fleet: FakeFleet, limits: Limits) -> Verdict:
    (made,) = asyncio.run(Checker(fleet, FakeAgents(fleet), limits).check([]))
    return made


def _without_times(made: Verdict) -> Verdict:
    nodes = tuple(msgspec.structs.replace(node, age_ms=0) for node in made.nodes)
    return msgspec.structs.replace(made, nodes=nodes, oldest_proof_ms=0, oldest_answer_ms=0)


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


def test_a_node_is_asked_once_for_all_its_deployments_and_members_once_for_each_version(fleet: FakeFleet) -> None:
    for number in range(5):
        fleet.declare(f"d{number}", ("a1",), ("b1",), version="v1", order_revision=5, activated_revision=6)
    agents, called = FakeAgents(fleet), fleet.count_calls()
    for node in fleet.nodes_by_name.values():
        node.active_models = 6
    made = asyncio.run(Checker(fleet, agents).check([]))
    assert {verdict.verdict for verdict in made} == {"consistent"}
    assert sorted(agents.asked) == [("a1", "roots"), ("b1", "roots")]
    assert called == {"list_deployments": 12, "nodes": 1, "get_version": 1}  # pages of one, read twice


def test_no_version_is_looked_up_that_came_with_its_deployment(fleet: FakeFleet) -> None:
    plain = _without_times(check(fleet, Limits()))
    fleet.deployments["search"]["serving"] = fleet.versions[f"{MODEL}/v1"] | {"label": "v1"}
    called = fleet.count_calls()
    assert _without_times(check(fleet, Limits())) == plain
    assert called == {"list_deployments": 2, "nodes": 1}
    fleet.deployments["search"]["serving"] |= {"config_digest": "0" * 64}
    assert check(fleet, Limits()).verdict == "diverged"
    del fleet.deployments["search"]["serving"]["vector_root"]
    with pytest.raises(RaftmetaError, match="not a deployment"):
        check(fleet, Limits())


def test_nodes_with_the_same_wrong_root_are_asked_for_their_tensors_once() -> None:
    fleet = FakeFleet(("a1",), tuple(f"b{number}" for number in range(40)))
    for name, node in fleet.nodes_by_name.items():
        if name != "a1":
            node.damage("norm", 0)
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents).check([]))
    assert [question for _, question in agents.asked].count("entries") == 1
    named = {(finding.node, finding.tensor) for finding in in_memory(made)}
    assert named == {(f"b{number}", "norm") for number in range(40)}


def test_a_node_whose_entries_do_not_add_up_speaks_for_no_other() -> None:
    fleet = FakeFleet(("a1",), ("b1", "b2"))
    for name in ("b1", "b2"):
        fleet.nodes_by_name[name].damage("norm", 0)
    liar = fleet.nodes_by_name["b1"]
    liar.before_answer = lambda question: liar.damage("layer.0.bias", 0) if question == "entries" else None
    made = check(fleet, Limits())
    assert {(finding.code, finding.node, finding.tensor) for finding in in_memory(made)} == {
        ("self_contradiction", "b1", ""),
        ("block", "b1", "norm"),
        ("block", "b1", "layer.0.bias"),
        ("block", "b2", "norm"),
    }


def test_what_a_check_keeps_of_a_fleet_that_differs_everywhere_is_bounded_and_the_counts_are_whole() -> None:
    tensors = {f"t{number:04d}": ("U8", (8,), bytearray(8)) for number in range(3_000)}
    specs = {
        name: TensorSpec(vector.tensor_entry(data, dtype, shape).entry, dtype, shape, 8) for name, (dtype, shape, data) in tensors.items()
    }
    other = {name: "0" * 64 for name in tensors if name != "t0000"} | {f"x{number}": "1" * 64 for number in range(2_000)}
    seen = weights.difference(specs, other)
    assert (seen.total, seen.extra_total, seen.bits) == (5_000, 2_000, (1 << 3_000) - 1)
    assert (len(seen.changed), seen.missing, len(seen.extra)) == (weights.MAX_LISTED, ("t0000",), weights.MAX_LISTED)
    assert weights.difference(specs, {name: spec.entry for name, spec in specs.items()}).total == 0


@pytest.mark.parametrize(
    ("quorum", "missing", "verdict"),
    [
        ("all", ("a1",), "incomplete"),
        ("majority", ("a1",), "consistent"),
        ("majority", ("a1", "b2"), "consistent"),
        ("majority", ("a1", "a2"), "incomplete"),
        ("1", ("a1", "a2", "b1", "b3"), "consistent"),
        ("2", ("b1", "b3"), "incomplete"),
        ("3", ("b1",), "incomplete"),
        ("9", ("b1",), "incomplete"),
        ("9", (), "consistent"),
        ("1", ("a1", "a2", "a3"), "incomplete"),
    ],
)
def test_with_a_quorum_each_side_may_miss_nodes_which_are_listed(quorum: str, missing: tuple[str, ...], verdict: str) -> None:
    fleet = FakeFleet(("a1", "a2", "a3"), ("b1", "b2", "b3"))
    for name in missing:
        fleet.nodes_by_name[name].fault = AgentFault("unreachable", "because")
    made = check(fleet, Limits(quorum=quorum))
    assert made.verdict == verdict
    told = [(reason.node, reason.code) for reason in (*made.unseen, *made.reasons)]
    assert sorted(told) == [(name, "unreachable") for name in missing]
    assert (made.nodes_total, made.nodes_seen, made.limits.quorum) == (6, 6 - len(missing), quorum)


def test_a_quorum_excuses_no_difference_and_no_node_that_changed_its_story() -> None:
    fleet = FakeFleet(("a1", "a2", "a3"), None)
    fleet.nodes_by_name["a1"].damage("norm", 0)
    fleet.nodes_by_name["a2"].fault = AgentFault("unreachable", "because")
    made = check(fleet, Limits(quorum="majority"))
    assert (made.verdict, [reason.node for reason in made.unseen]) == ("diverged", ["a2"])
    fleet.nodes_by_name["a3"].switching = True
    made = check(fleet, Limits(quorum="1"))
    assert made.verdict == "incomplete"


@pytest.mark.parametrize("code", ["integrity", "unreadable", "too_old", "bad_answer", "attested", "refused", "untrusted"])
def test_a_quorum_excuses_no_node_that_could_be_asked(code: str) -> None:
    fleet = FakeFleet(("a1", "a2", "a3"), None)
    fleet.nodes_by_name["a1"].fault = AgentFault(code, "because")
    made = check(fleet, Limits(quorum="majority"))
    assert (made.verdict, codes(made), made.unseen) == ("incomplete", [code], ())


def test_a_quorum_excuses_no_node_whose_root_differed_before_it_restarted() -> None:
    fleet = FakeFleet(("a1", "a2", "a3"), None)
    node = fleet.nodes_by_name["a1"]
    node.damage("norm", 0)
    node.before_answer = lambda question: setattr(node, "boot_id", f"boot-{question}")
    made = check(fleet, Limits(quorum="majority"))
    assert (made.verdict, codes(made), made.unseen) == ("incomplete", ["changed_meanwhile"], ())


def test_nodes_early_in_the_order_do_not_use_up_the_blocks_that_can_be_asked_for() -> None:
    names = tuple((f"t{number:02d}", "0" * 64) for number in range(16))
    given = FakeFleet().nodes_by_name["a1"].vector(entries=False)
    target = Target("search", MODEL, "v1", (), checksum=given.checksum)
    answers = [
        Answer(
            NodePlace(f"n{number:02d}", "primary", "a", 1, 1),
            msgspec.structs.replace(given, node=f"n{number:02d}"),
            difference=Difference("", names, (), (), 0, 0),
        )
        for number in range(40)
    ]
    wanted = weights.needing_blocks(target, answers)
    assert len(wanted) == len(set(wanted)) == weights.MAX_LOCATIONS
    assert {node for node, _ in wanted} == {f"n{number:02d}" for number in range(40)}


def test_the_oldest_reading_of_a_node_is_that_of_the_verdict() -> None:
    fleet = FakeFleet(("a1",), ("b1",))
    fleet.nodes_by_name["b1"].age_ms = 59_000
    times = iter(range(100))
    (made,) = asyncio.run(Checker(fleet, FakeAgents(fleet), Limits(max_age_ms=60_000), clock=lambda: float(next(times))).check([]))
    assert [node.age_ms for node in made.nodes] == [2_007, 60_000]  # 1 or 2 s passed since they answered
    assert (made.verdict, made.oldest_proof_ms) == ("consistent", 60_000)


# Digests.


def test_a_deep_check_compares_the_digest_of_every_tensor_of_every_node(fleet: FakeFleet) -> None:
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents, Limits(deep=True)).check([]))
    assert (made.verdict, [node.sha256_equal for node in made.nodes]) == ("consistent", [True, True])
    pages = [("a1", "digests after ''"), ("a1", "digests after 'layer.0.bias'")]
    assert [asked for asked in agents.asked if asked[0] == "a1"] == [("a1", "roots"), *pages]


def test_bytes_that_the_vector_would_let_pass_are_named_by_their_digest(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["b1"]
    node.before_answer = lambda question: node.damage("norm", 0) if question == "digests" and node.tensors["norm"][2][0] == norm else None
    norm = node.tensors["norm"][2][0]
    made = check(fleet, Limits(deep=True))
    (finding,) = made.findings
    spec = {tensor.name: tensor for tensor in fleet.manifests[f"{MODEL}/v1"].tensors}["norm"]
    assert (finding.code, finding.node, finding.tensor, finding.expected) == ("sha256", "b1", "norm", spec.sha256)
    assert (made.verdict, made.nodes[1].sha256_equal, made.mismatch_ratio) == ("diverged", False, 0.0)


@pytest.mark.parametrize("code", ["bad_request", "timed_out", "attested"])
def test_a_node_that_gives_no_digests_leaves_a_deep_check_incomplete(fleet: FakeFleet, code: str) -> None:
    node = fleet.nodes_by_name["b1"]

    def refuse(question: str) -> None:
        node.fault = AgentFault(code, "because") if question == "digests" else None

    node.before_answer = refuse
    for quorum in ("all", "1"):
        made = check(fleet, Limits(deep=True, quorum=quorum))
        assert (made.verdict, codes(made)) == ("incomplete", [code])
    assert check(fleet, Limits()).verdict == "consistent"


def test_a_node_that_leaves_digests_out_or_goes_in_circles_is_not_believed(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["b1"]
    full = node.digests
    node.digests = lambda after: msgspec.structs.replace(full(after), following="")  # type: ignore[method-assign]
    made = check(fleet, Limits(deep=True))
    assert (made.verdict, codes(made)) == ("incomplete", ["bad_answer"])
    assert "left out the digests of 2 tensors, 'layer.0.weight' for one" in made.reasons[0].detail
    node.digests = lambda after: full("")  # type: ignore[method-assign]
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents, Limits(deep=True)).check([]))
    assert (made.verdict, codes(made)) == ("incomplete", ["bad_answer"])
    assert len([asked for asked in agents.asked if asked[0] == "b1"]) == 3, "it is not asked until the end of days"


@pytest.mark.parametrize("sha256", [{}, {"of another model": "0" * 64}])
def test_a_page_without_a_digest_that_is_missing_is_the_last_that_is_asked_for(fleet: FakeFleet, sha256: dict[str, str]) -> None:
    node = fleet.nodes_by_name["b1"]
    page = msgspec.structs.replace(node.digests("layer.0.weight"), sha256=sha256)
    node.digests = lambda after: msgspec.structs.replace(page, following=f"{after}~")  # type: ignore[method-assign]
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents, Limits(deep=True)).check([]))
    assert (made.verdict, codes(made)) == ("incomplete", ["bad_answer"])
    assert len([asked for asked in agents.asked if asked[0] == "b1"]) == 2


@pytest.mark.parametrize(("taken_s", "code"), [(9.0, []), (59.0, ["timed_out"])])
def test_a_node_has_so_long_for_its_digests_as_it_has_to_read(fleet: FakeFleet, taken_s: float, code: list[str]) -> None:
    """The whole model fits into one page: many pages make it no longer."""
    node = fleet.nodes_by_name["b1"]
    full = node.digests

    def one_by_one(after: str) -> DigestPage:
        page = full(after)
        name = min(page.sha256)
        last = not page.following and len(page.sha256) == 1
        return msgspec.structs.replace(page, sha256={name: page.sha256[name]}, following="" if last else name, taken_s=taken_s)

    node.digests = one_by_one  # type: ignore[method-assign]
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents, Limits(deep=True), question_s=60.0).check([]))
    assert codes(made) == code
    assert len([asked for asked in agents.asked if asked[0] == "b1"]) == (3 if code else 5)


def test_the_time_for_digests_grows_with_what_there_is_to_read() -> None:
    patience = Patience.from_now(60.0, lambda: 0.0)
    large = {f"t{number}": TensorSpec("", "BF16", (1,), 1 << 30) for number in range(100)}
    small = {f"t{number}": TensorSpec("", "BF16", (1,), 0) for number in range(100 * 4096)}
    assert 101 * 60 <= patience.digests_s(large) < 102 * 60 and patience.digests_s(small) == 101 * 60


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("question", ["entries", "blocks"])
def test_a_close_look_ends_however_many_nodes_keep_it_waiting(question: str, alike: bool) -> None:
    """Each takes the time of a whole question, and is of no use; the difference is told all the same."""
    names = tuple(f"a{number:03d}" for number in range(200))
    fleet, now = FakeFleet(names, None), [0.0]

    def late(asked: str) -> None:
        if asked == question:
            now[0] += 60.0
            raise AgentFault("timed_out", "because")

    for number, name in enumerate(names):
        node = fleet.nodes_by_name[name]
        for at in range(0, 4000, 50):
            node.damage("layer.0.weight", at, 1 if alike else 1 + number)
        node.before_answer = late
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents, clock=lambda: now[0], question_s=60.0).check([]))
    assert made.verdict == "diverged" and {finding.node for finding in made.findings} >= set(names[:199])
    assert CLOSER_QUESTIONS * 60 <= now[0] <= (CLOSER_QUESTIONS + 8) * 60


def test_a_node_that_restarts_while_its_digests_are_read_is_not_judged(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["b1"]

    def restart(question: str) -> None:
        node.boot_id = f"boot-{question}"

    node.before_answer = restart
    made = check(fleet, Limits(deep=True))
    assert (made.verdict, codes(made)) == ("incomplete", ["changed_meanwhile"])
