"""Which bytes serve where: what a node said counts while it is heard under the boot under which it said it, and never else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from raftmeta.core import commands as c
from raftmeta.core.proof import Heard, evidence_report
from tests.support.commands import World, evidence, serving_world

ALL = ("a1", "a2", "b1")


def world() -> World:
    made = serving_world(level=2)
    made.serve("1", "r1")
    for node in ALL:
        made.ok(evidence(node, order_revision=made.state.deployments["d"].order_revision))
    return made


def report(made: World, heard: dict[str, Heard], now_ms: int = 0) -> dict[str, Any]:
    return evidence_report(made.state, made.state.deployments["d"], heard, now_ms or made.now_ms)


def beat(boot: str = "boot-1", age_ms: int = 400, *, missing: bool = False) -> Heard:
    return Heard(boot, age_ms, missing)


def test_every_node_that_is_heard_and_said_the_decided_bytes_serves_them() -> None:
    made = world()
    shown = report(made, {node: beat() for node in ALL}, made.now_ms + 5_000)
    assert (shown["all_serve_decided"], shown["version"], shown["order_revision"]) == (
        True,
        "1",
        made.state.deployments["d"].order_revision,
    )
    assert [(node["node"], node["side"], node["zone"]) for node in shown["nodes"]] == [
        ("a1", "primary", "a"),
        ("a2", "primary", "a"),
        ("b1", "standby", "b"),
    ]
    last = shown["nodes"][-1]
    assert (last["standing"], last["serves_decided"], last["knows_order"], last["heard_age_ms"]) == ("current", True, True, 400)
    assert (last["evidence"]["age_ms"], last["evidence"]["verified_at_ms"]) == (5_000, made.now_ms - 250)


@pytest.mark.parametrize(
    ("heard", "standing"),
    [
        (None, "silent"),
        (beat(missing=True, age_ms=8_000), "silent"),
        (beat(boot="boot-2"), "restarted"),
    ],
)
def test_a_node_that_is_not_heard_as_it_said_it_serves_nothing_for_certain(heard: Heard | None, standing: str) -> None:
    made = world()
    beats = {node: beat() for node in ALL} | {"b1": heard}
    shown = report(made, {node: each for node, each in beats.items() if each is not None}, made.now_ms + 90_000)
    last = shown["nodes"][-1]
    assert (last["standing"], last["serves_decided"], last["knows_order"]) == (standing, False, False)
    assert (last["evidence"]["version"], last["evidence"]["age_ms"]) == ("1", 90_000)
    assert not shown["all_serve_decided"]


def test_a_node_that_is_heard_and_said_nothing_is_unproven() -> None:
    made = serving_world(level=2)
    made.serve("1", "r1")
    shown = report(made, {"a1": beat()})
    assert [node["standing"] for node in shown["nodes"]] == ["unproven", "silent", "silent"]
    assert all(node["evidence"] is None for node in shown["nodes"])


@pytest.mark.parametrize(
    "changes", [{"version": "2"}, {"finding": "integrity_mismatch"}, {"vector_root": "0" * 64}, {"checksum": "0" * 64}]
)
def test_other_bytes_and_findings_are_not_what_was_decided(changes: dict[str, str]) -> None:
    made = world()
    made.ok(evidence("b1", **{"version": "1"} | changes, told_ms=2_000))
    shown = report(made, {node: beat() for node in ALL})
    assert [node["serves_decided"] for node in shown["nodes"]] == [True, True, False]


def test_after_a_switch_the_nodes_that_did_not_obey_it_yet_are_seen() -> None:
    made = world()
    made.serve("2", "r2")
    made.ok(evidence("a1", "2", told_ms=2_000, order_revision=made.state.deployments["d"].order_revision))
    shown = report(made, {node: beat() for node in ALL})
    assert [(node["serves_decided"], node["knows_order"]) for node in shown["nodes"]] == [(True, True), (False, False), (False, False)]


def test_before_the_first_activation_nothing_is_decided() -> None:
    made = serving_world(level=2)
    made.ok(evidence("a1"))
    shown = report(made, {node: beat() for node in ALL})
    assert (shown["version"], shown["checksum"], shown["all_serve_decided"]) == ("", "", False)


@settings(max_examples=60, deadline=None)
@given(hs.dictionaries(hs.sampled_from(ALL), hs.builds(Heard, hs.sampled_from(["boot-1", "boot-2"]), hs.integers(0, 9_000), hs.booleans())))
def test_no_node_serves_for_certain_that_is_not_heard_under_the_boot_of_its_word(heard: dict[str, Heard]) -> None:
    made = world()
    made.ok(c.RaiseFeatureLevel(2))
    shown = report(made, heard)
    for node in shown["nodes"]:
        found = heard.get(node["node"])
        is_heard = found is not None and not found.missing and found.boot_id == "boot-1"
        assert node["serves_decided"] == is_heard
    assert shown["all_serve_decided"] == all(node["serves_decided"] for node in shown["nodes"])
