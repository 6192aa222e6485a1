"""Which tensors and blocks a check names as different, and whose word it takes for what was published."""

from __future__ import annotations

import asyncio

import pytest

from consistency import compare, vector
from consistency.agent_answers import AgentFault
from consistency.collect import Checker
from consistency.findings import Finding, Verdict
from consistency.scene import Scene
from tests.support.fake_fleet import DEPLOYMENT, MODEL, FakeAgents, FakeFleet, codes, in_memory, verdict_of, weights


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


def test_one_flipped_sign_on_the_standby_is_named_with_node_tensor_and_block(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["b1"].damage("embed.weight", 3 * vector.BLOCK_BYTES + 7)
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents).check([DEPLOYMENT]))
    assert (made.verdict, made.exit_status) == ("diverged", 1)
    (finding,) = in_memory(made)
    assert (finding.code, finding.node, finding.tensor, finding.block) == ("block", "b1", "embed.weight", 3)
    assert (finding.model, finding.deployment) == (MODEL, DEPLOYMENT)
    assert finding.expected != finding.found
    assert made.findings[0].detail == "the primary holds what was published, the standby does not"
    assert finding.detail == "bytes 196608..262144 of the tensor; 1 of its 5 blocks differ"
    assert made.mismatch_ratio == 0.25
    assert [node.tensors_different for node in made.nodes] == [0, 1]
    assert sorted(agents.asked) == [
        ("a1", "embed.weight"),
        ("a1", "published embed.weight"),
        ("a1", "roots"),
        ("b1", "embed.weight"),
        ("b1", "entries"),
        ("b1", "published embed.weight"),
        ("b1", "roots"),
    ]


def with_block_file(fleet: FakeFleet, *names: str) -> None:
    """The file of block checks that was published with v1, on these nodes."""
    for name in names:
        fleet.nodes_by_name[name].block_file = {tensor: vector.block_checks(data) for tensor, (_, _, data) in weights().items()}


def test_a_block_is_named_by_what_was_published_even_where_no_node_holds_it_any_more(fleet: FakeFleet) -> None:
    with_block_file(fleet, "b1")
    for node in fleet.nodes_by_name.values():
        node.damage("embed.weight", 2 * vector.BLOCK_BYTES)
    made = verdict_of(fleet)
    named = [(finding.code, finding.node, finding.tensor, finding.block) for finding in in_memory(made)]
    assert named == [("block", "a1", "embed.weight", 2), ("block", "b1", "embed.weight", 2)]


def test_no_healthy_nodes_memory_is_read_for_blocks_that_were_published(fleet: FakeFleet) -> None:
    with_block_file(fleet, "a1", "b1")
    fleet.nodes_by_name["b1"].damage("norm", 0)
    agents = FakeAgents(fleet)
    (made,) = asyncio.run(Checker(fleet, agents).check([DEPLOYMENT]))
    assert [(finding.code, finding.node, finding.block) for finding in in_memory(made)] == [("block", "b1", 0)]
    assert ("a1", "norm") not in agents.asked and ("a1", "published norm") in agents.asked


def test_a_file_of_block_checks_that_lies_names_no_block(fleet: FakeFleet) -> None:
    with_block_file(fleet, "a1", "b1")
    for node in fleet.nodes_by_name.values():
        node.damage("layer.0.weight", 5)
        node.block_file["layer.0.weight"] = node.block_file["norm"]
    assert [(finding.code, finding.node) for finding in in_memory(verdict_of(fleet))] == [("tensor", "a1"), ("tensor", "b1")]
    fleet.nodes_by_name["a1"].damage("layer.0.weight", 5)  # healed: its memory says what the files should
    assert [(finding.code, finding.node, finding.block) for finding in in_memory(verdict_of(fleet))] == [("block", "b1", 0)]


def test_every_damaged_tensor_has_a_finding(fleet: FakeFleet) -> None:
    for name in ("layer.0.bias", "norm"):
        fleet.nodes_by_name["a1"].damage(name, 0)
    made = verdict_of(fleet)
    assert [(finding.node, finding.tensor, finding.block) for finding in in_memory(made)] == [("a1", "layer.0.bias", 0), ("a1", "norm", 0)]
    assert made.tensors_different == 2


def test_sides_that_agree_with_each_other_but_not_with_the_manifest_diverge(fleet: FakeFleet) -> None:
    for node in fleet.nodes_by_name.values():
        node.damage("layer.0.weight", 5)
    made = verdict_of(fleet)
    assert made.verdict == "diverged"
    assert [(finding.code, finding.node, finding.block) for finding in in_memory(made)] == [("tensor", "a1", -1), ("tensor", "b1", -1)]
    assert made.nodes[0].vector_root == made.nodes[1].vector_root
    sides = made.findings[0]
    assert (sides.code, sides.expected, sides.found) == ("sides", made.vector_root, made.nodes[0].vector_root)
    assert sides.detail == "both sides hold the same weights, and these are not what was published"


def test_blocks_are_compared_with_any_node_that_holds_the_tensor_as_published(fleet: FakeFleet) -> None:
    fleet.nodes_by_name["a1"].damage("layer.0.weight", 5)
    fleet.nodes_by_name["b1"].damage("layer.0.bias", 5)
    made = verdict_of(fleet)
    assert made.findings[0].detail == "neither side holds what was published"
    assert [(finding.code, finding.node, finding.tensor) for finding in in_memory(made)] == [
        ("block", "a1", "layer.0.weight"),
        ("block", "b1", "layer.0.bias"),
    ]


def test_a_missing_and_a_further_tensor_are_findings(fleet: FakeFleet) -> None:
    tensors = fleet.nodes_by_name["b1"].tensors
    tensors["stray"] = tensors.pop("norm")
    made = verdict_of(fleet)
    assert [(finding.code, finding.tensor) for finding in in_memory(made)] == [("tensor_missing", "norm"), ("tensor_extra", "stray")]
    assert made.tensors_different == 2


def test_blocks_that_cannot_be_had_leave_the_tensor_named(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["a1"]
    fleet.nodes_by_name["b1"].damage("norm", 0)

    def fall_silent(question: str) -> None:
        if question == "blocks":
            node.fault = AgentFault("timed_out", "because")

    node.before_answer = fall_silent
    made = verdict_of(fleet)
    assert [(finding.code, finding.tensor, finding.block) for finding in in_memory(made)] == [("tensor", "norm", -1)]


def test_memory_that_changes_between_two_questions_contradicts_itself(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["b1"]
    node.damage("norm", 0)
    node.before_answer = lambda question: node.damage("norm", 0) if question == "entries" else None
    made = verdict_of(fleet)
    assert (made.verdict, codes(made)) == ("diverged", ["sides", "self_contradiction"])


def test_blocks_that_do_not_hash_to_the_told_entry_locate_nothing(fleet: FakeFleet) -> None:
    node = fleet.nodes_by_name["b1"]
    node.damage("norm", 0)
    node.before_answer = lambda question: node.damage("norm", 1) if question == "blocks" else None
    assert codes(verdict_of(fleet)) == ["sides", "tensor"]


def test_nodes_that_lie_of_what_was_published_do_not_hide_the_block() -> None:
    fleet = FakeFleet(("a1", "a2", "a3", "a4", "a5"), ("b1",))
    for node in fleet.nodes_by_name.values():
        node.damage("norm", 0)
    with_block_file(fleet, *fleet.nodes_by_name)
    for name in ("a1", "a2", "a3", "a4", "a5"):
        fleet.nodes_by_name[name].block_file["norm"] = fleet.nodes_by_name[name].block_file["layer.0.bias"]
    made = verdict_of(fleet)
    assert {(finding.code, finding.node, finding.block) for finding in in_memory(made)} == {("block", name, 0) for name in fleet.urls}


def test_only_block_checks_that_hash_to_what_a_node_told_are_kept() -> None:
    fleet = FakeFleet()
    fleet.nodes_by_name["b1"].damage("norm", 0)
    liar, kept = FakeAgents(fleet), []
    honest = liar.blocks

    async def blocks(url: str, deployment: str, tensor: str, size_bytes: int, published: bool = False) -> vector.Words:
        found = await honest(url, deployment, tensor, size_bytes, published)
        return found ^ 1 if url == "http://b1" else found

    liar.blocks = blocks  # type: ignore[method-assign]
    original = compare.compare

    def looking(scene: Scene) -> Verdict:
        kept.extend(scene.blocks)
        return original(scene)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "compare", looking)
        asyncio.run(Checker(fleet, liar).check([DEPLOYMENT]))
    assert kept == [("", "norm")]


def test_findings_are_counted_beyond_what_is_kept(fleet: FakeFleet) -> None:
    many = {f"t{number:03d}": ("U8", (8,), bytearray(8)) for number in range(300)}
    fleet.publish("v1", {name: (dtype, shape, bytearray(data)) for name, (dtype, shape, data) in many.items()})
    version = fleet.versions[f"{MODEL}/v1"]
    for node in fleet.nodes_by_name.values():
        node.tensors = {name: (dtype, shape, bytearray(data)) for name, (dtype, shape, data) in many.items()}
        node.checksum, node.config_digest = version["checksum"], version["config_digest"]
    for name in many:
        fleet.nodes_by_name["b1"].damage(name, 0)
    made = verdict_of(fleet)
    assert (made.findings_total, len(made.findings), made.tensors_different) == (301, 200, 300)
    located = [finding for finding in made.findings if isinstance(finding, Finding) and finding.block >= 0]
    assert len(located) == 16
