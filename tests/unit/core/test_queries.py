"""Pages, resources and the question what served when."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from raftmeta.core import commands as c
from raftmeta.core import queries as q
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.events import Event
from raftmeta.core.handlers.verdicts import MAX_PAST
from raftmeta.core.types import Limits, Phase, Stage
from tests.support.commands import World, check, declaration, publication, serving_world


def walk(page: Callable[[str | None], q.Page], field: str) -> list[list[object]]:
    """The pages, each as the values of one field."""
    pages, after = [], None
    while True:
        found = page(after)
        pages.append([item[field] for item in found.items])
        after = found.next
        if after is None:
            return pages


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RaftmetaError) as caught:
        call()
    return caught.value.code


def test_models_are_paged_by_name() -> None:
    world = World()
    for name in ("c", "a", "e", "b", "d"):
        world.ok(publication(name))
    assert walk(lambda after: q.models_page(world.state, 2, after), "name") == [["a", "b"], ["c", "d"], ["e"]]
    assert walk(lambda after: q.models_page(world.state, 5, after), "name") == [["a", "b", "c", "d", "e"]]
    assert [item["name"] for item in q.models_page(world.state, 9, "bb").items] == ["c", "d", "e"]


def test_versions_are_paged_by_number_over_gaps() -> None:
    world = World()
    for label in range(1, 8):
        world.ok(publication("m", str(label)))
    for label in ("2", "4"):
        world.ok(c.DeleteVersion("m", label))
    assert walk(lambda after: q.versions_page(world.state, "m", 2, after), "number") == [[1, 3], [5, 6], [7]]
    assert [item["number"] for item in q.versions_page(world.state, "m", 9, "4").items] == [5, 6, 7]
    assert q.versions_page(world.state, "m", 9, "7") == q.Page([], None)


def test_a_model_whose_versions_are_gone_has_an_empty_page() -> None:
    world = World()
    world.ok(publication("m", "1"))
    world.ok(c.DeleteVersion("m", "1"))
    assert q.versions_page(world.state, "m", 9) == q.Page([], None)


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1.5", "٣", "1" * 20])
def test_a_cursor_that_is_no_number_is_refused(cursor: str) -> None:
    world = serving_world()
    assert refusal(lambda: q.versions_page(world.state, "m", 1, cursor)) == "bad_field"


@pytest.mark.parametrize("limit", [0, -1, q.MAX_LIMIT + 1])
def test_a_limit_outside_its_bounds_is_refused(limit: int) -> None:
    state = serving_world().state
    pages = (
        lambda: q.models_page(state, limit),
        lambda: q.versions_page(state, "m", limit),
        lambda: q.deployments_page(state, limit),
        lambda: q.rollouts_page(state, "d", limit),
        lambda: q.verdicts_page(state, limit),
    )
    assert [refusal(page) for page in pages] == ["bad_field"] * 5


def test_a_version_resource_has_its_summary_flattened_in() -> None:
    world = serving_world()
    shown = q.resource(q.find_version(world.state, "m", "2"))
    assert "summary" not in shown
    assert (shown["model"], shown["label"], shown["number"], shown["tensor_count"]) == ("m", "2", 2, 7)
    assert json.loads(json.dumps(shown)) == shown


def test_what_does_not_exist_is_named_by_its_code() -> None:
    state = serving_world().state
    assert refusal(lambda: q.find_model(state, "x")) == "unknown_model"
    assert refusal(lambda: q.find_version(state, "x", "1")) == "unknown_model"
    assert refusal(lambda: q.find_version(state, "m", "9")) == "unknown_version"
    assert refusal(lambda: q.find_manifest(state, "m", "9")) == "unknown_version"
    assert refusal(lambda: q.versions_page(state, "x", 1)) == "unknown_model"
    assert refusal(lambda: q.find_deployment(state, "x")) == "unknown_deployment"
    assert refusal(lambda: q.rollouts_page(state, "x", 1)) == "unknown_deployment"
    assert refusal(lambda: q.find_rollout(state, "x")) == "unknown_rollout"
    assert refusal(lambda: q.rollouts_page(state, "d", 1, "x")) == "unknown_rollout"
    assert refusal(lambda: q.served_at(state, "x", 0)) == "unknown_deployment"


def test_what_exists_is_found() -> None:
    world = serving_world()
    world.start("1", "r1")
    assert q.find_model(world.state, "m").last_number == 2
    assert q.find_manifest(world.state, "m", "1") == b"manifest of m 1 "
    assert q.find_deployment(world.state, "d").rollout_id == "r1"
    assert q.find_rollout(world.state, "r1").to_version == "1"


def test_a_deployment_resource_tells_where_its_rollout_stands() -> None:
    world = serving_world()
    idle = q.deployment_resource(world.state, world.state.deployments["d"])
    assert (idle["phase"], idle["target"], idle["waiting_for"], idle["serving"]) == ("idle", "", [], None)
    world.start("1", "r1")
    world.attest("r1", Stage.PREPARED, only=["a2"])
    (shown,) = q.deployments_page(world.state, 5).items
    assert (shown["phase"], shown["target"], shown["waiting_for"], shown["serving"]) == ("preparing", "1", ["a1", "b1"], None)
    assert shown["standby"] == {"zone": "b", "nodes": ["b1"]}
    world.reach("r1", Phase.ACTIVE)
    done = q.deployment_resource(world.state, world.state.deployments["d"])
    assert (done["phase"], done["target"], done["version"]) == ("idle", "1", "1")
    assert done["serving"] == q.resource(q.find_version(world.state, "m", "1"))


def test_deployments_are_paged_by_name_and_found_by_node() -> None:
    world = serving_world()
    world.ok(declaration("c", "m", ("a1",), ()))
    world.ok(declaration("e", "m", ("a9",), ("a1",)))
    assert walk(lambda after: q.deployments_page(world.state, 1, after), "name") == [["c"], ["d"], ["e"]]
    assert [each.name for each in q.deployments_of_node(world.state, "a1")] == ["c", "d", "e"]
    assert [each.name for each in q.deployments_of_node(world.state, "b1")] == ["d"]
    assert q.deployments_of_node(world.state, "x") == []


def test_rollouts_are_paged_from_the_newest() -> None:
    world = serving_world()
    for number in range(5):
        world.start("1", f"r{number}")
        world.ok(c.AbortRollout(f"r{number}", "operator", "", ""))
    assert walk(lambda after: q.rollouts_page(world.state, "d", 2, after), "id") == [["r4", "r3"], ["r2", "r1"], ["r0"]]
    world.ok(declaration("e"))
    assert q.rollouts_page(world.state, "e", 2) == q.Page([], None)


def test_a_rollout_resource_is_plain_json() -> None:
    world = serving_world()
    world.start("1", "r1")
    world.attest("r1", Stage.PREPARED)
    (shown,) = q.rollouts_page(world.state, "d", 1).items
    assert (shown["phase"], shown["status"], shown["kind"], shown["failure"]) == ("preparing", "running", "activate", None)
    assert type(shown["phase"]) is type(shown["attestations"][0]["side"]) is str
    assert [(each["node"], each["side"], each["stage"]) for each in shown["attestations"]] == [
        ("a1", "primary", "prepared"),
        ("a2", "primary", "prepared"),
        ("b1", "standby", "prepared"),
    ]
    assert json.loads(json.dumps(shown)) == shown


def test_running_rollouts_are_listed_by_deployment() -> None:
    world = serving_world()
    world.ok(declaration("c"))
    world.start("1", "r1")
    world.start("1", "r2", "c")
    assert [rollout.id for rollout in q.running_rollouts(world.state)] == ["r2", "r1"]
    world.ok(c.AbortRollout("r2", "operator", "", ""))
    world.ok(declaration("e"))
    assert [rollout.id for rollout in q.running_rollouts(world.state)] == ["r1"]


@pytest.mark.parametrize(
    ("report", "shown"),
    [(b'{"findings": [1]}', {"findings": [1]}), (b"\xffno", "\ufffdno"), (b"[" * 60_000, "[" * 60_000)],
)
def test_a_verdict_shows_its_report_as_json_or_as_text(report: bytes, shown: object) -> None:
    world = serving_world()
    world.ok(c.RecordVerdict("d", "consistent", report))
    (item,) = q.verdicts_page(world.state, 5).items
    assert (item["deployment"], item["report"]) == ("d", shown)


def test_verdicts_are_paged_by_deployment() -> None:
    world = serving_world()
    for name in ("c", "e", "f"):
        world.ok(declaration(name))
        world.ok(c.RecordVerdict(name, "consistent", b"{}"))
    assert walk(lambda after: q.verdicts_page(world.state, 2, after), "deployment") == [["c", "e"], ["f"]]


def test_verdicts_since_a_revision_come_in_the_order_in_which_they_were_recorded() -> None:
    world = serving_world(level=2)
    for name in ("c", "e"):
        world.ok(declaration(name))
    revisions = []
    for number in range(9):
        world.ok(check(world.state, "diverged" if number % 2 else "incomplete", "cde"[number % 3], report=b'{"n": %d}' % number))
        revisions.append(world.state.revision)
    pages = walk(lambda after: q.verdicts_since(world.state, revisions[1], 3, after).page, "revision")
    assert pages == [revisions[2:5], revisions[5:8], revisions[8:]]
    mine = q.verdicts_since(world.state, 0, 10, None, "d").page.items
    assert [item["revision"] for item in mine] == revisions[1::3]
    assert [item["report"] for item in mine] == [None, None, {"n": 7}]
    assert {item["summary"] for item in mine} == {"diverged summary", "incomplete summary"}
    assert q.verdicts_since(world.state, revisions[8], 10) == q.VerdictsPage(q.Page([], None), 0)
    assert [item["deployment"] for item in q.verdicts_page(world.state, 5, None, "e").items] == ["e"]
    with pytest.raises(RaftmetaError):
        q.verdicts_since(world.state, 0, 10, None, "x")


def test_who_asks_for_verdicts_that_are_no_longer_kept_is_told() -> None:
    world = serving_world(level=2)
    for _ in range(MAX_PAST + 3):
        world.ok(check(world.state, "incomplete"))
    found = q.verdicts_since(world.state, 0, 1_000)
    assert len(found.page.items) == MAX_PAST + 1
    assert found.dropped_revision == found.page.items[0]["revision"] - 1
    assert q.verdicts_since(world.state, found.dropped_revision, 1_000).dropped_revision == 0


def test_what_served_at_a_time_follows_the_switch_orders() -> None:
    world = serving_world()
    before_ms = world.now_ms
    assert q.served_at(world.state, "d", before_ms) == q.Served("", "", None, None)
    world.serve("1", "r1")
    first_ms = world.rollout("r1").switched_ms
    world.start("2", "r2")
    world.ok(c.AbortRollout("r2", "operator", "", ""))
    world.serve("2", "r3")
    second_ms = world.rollout("r3").switched_ms
    assert q.served_at(world.state, "d", before_ms) == q.Served("", "", None, first_ms)
    assert q.served_at(world.state, "d", first_ms - 1) == q.Served("", "", None, first_ms)
    assert q.served_at(world.state, "d", first_ms) == q.Served("1", "r1", first_ms, second_ms)
    assert q.served_at(world.state, "d", second_ms - 1) == q.Served("1", "r1", first_ms, second_ms)
    assert q.served_at(world.state, "d", second_ms + 10**9) == q.Served("2", "r3", second_ms, None)


def test_what_served_before_the_kept_rollouts_is_not_guessed() -> None:
    world = serving_world(Limits(max_rollouts_per_deployment=2))
    world.serve("1", "r1")
    world.serve("2", "r2")
    world.start("1", "r3")
    world.ok(c.AbortRollout("r3", "operator", "", ""))
    oldest = world.rollout("r2")
    assert q.served_at(world.state, "d", oldest.started_ms) == q.Served("1", "", None, oldest.switched_ms)
    assert refusal(lambda: q.served_at(world.state, "d", oldest.started_ms - 1)) == "compacted"


def test_what_serves_without_a_kept_switch_is_known_from_the_failed_rollouts() -> None:
    world = serving_world(Limits(max_rollouts_per_deployment=1))
    world.serve("1", "r1")
    world.start("2", "r2")
    world.ok(c.AbortRollout("r2", "operator", "", ""))
    assert q.served_at(world.state, "d", world.now_ms) == q.Served("1", "", None, None)


def test_an_event_is_shown_with_its_record() -> None:
    world = World()
    world.ok(publication("m", "1"))
    shown = [q.event_resource(event) for event in world.events]
    assert [(each["kind"], each["key"], each["op"]) for each in shown] == [("version", "m/1", "put"), ("model", "m", "put")]
    assert shown[0]["value"] == q.resource(world.state.versions["m/1"])
    assert q.event_resource(Event(3, "version", "m/1", "delete", None)) == {"kind": "version", "key": "m/1", "op": "delete", "value": None}
