"""The fence of a fail-over on a node: the side that does not serve answers no request from when it heard so, over restarts too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from node_agent.desired import DeploymentView, read
from node_agent.journal import DeploymentRecord, Journal
from node_agent.plan import Order
from node_agent.remembered import Remembered
from raftmeta.core.types import SideName
from tests.support.front_scene import RECORD, Scene, run

PRIMARY, STANDBY = SideName.PRIMARY, SideName.STANDBY
SEEN = {"name": "search", "model": "encoder", "primary": {"zone": "a", "nodes": ["n1"]}, "standby": {"zone": "b", "nodes": ["n2"]}}
SEEN |= {"version": "1.0.0", "previous": "", "rollout_id": "", "order_revision": 9}


class Memory:
    """A journal that writes nothing."""

    def __init__(self, side: SideName = PRIMARY) -> None:
        self.record = DeploymentRecord("search", "encoder", side, "x.arena", "x.control")
        self.writes = 0

    def deployment(self, name: str) -> DeploymentRecord:
        return self.record

    def update(self, name: str, make: Any) -> None:
        self.record = make(self.record)
        self.writes += 1

    def note(self, name: str, make: Any) -> None:
        self.record = make(self.record)


def remembered(memory: Memory) -> Remembered:
    return Remembered(memory, "search")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "side"),
    [
        ({}, None),
        ({"serving_side": "primary", "failover": None}, None),
        ({"serving_side": "standby", "failover": {"to": "standby", "revision": 9}}, STANDBY),
        ({"serving_side": "primary", "failover": {"to": "primary", "revision": 9}}, PRIMARY),
    ],
)
def test_only_a_deployment_that_failed_over_says_which_side_serves(fields: dict[str, Any], side: SideName | None) -> None:
    seen: DeploymentView = read(SEEN | fields, DeploymentView)
    assert seen.decided_side is side


def test_a_decision_is_durable_and_one_of_an_older_order_changes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    memory = Remembered(journal, "search")
    assert memory.hear_serving_side(STANDBY, Order(1, 10))
    assert not memory.hear_serving_side(STANDBY, Order(1, 12))
    assert not memory.hear_serving_side(PRIMARY, Order(1, 9))
    assert not memory.hear_serving_side(None, Order(1, 12))
    again = Journal(tmp_path, "n1").deployment("search")
    assert again is not None
    assert (again.serving_side, again.serving_order, again.fenced_by) == (STANDBY, Order(1, 12), STANDBY)
    assert memory.hear_serving_side(PRIMARY, Order(1, 13))
    assert memory.record.fenced_by is None


def test_an_order_between_two_that_name_the_same_side_changes_nothing_after_a_kill_either(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    heard = Remembered(journal, "search")
    assert heard.hear_serving_side(STANDBY, Order(1, 10))
    assert not heard.hear_serving_side(STANDBY, Order(1, 14))
    after_a_kill = Remembered(Journal(tmp_path, "n1"), "search")
    assert not after_a_kill.hear_serving_side(PRIMARY, Order(1, 12))
    assert after_a_kill.record.fenced_by is STANDBY


def test_an_order_below_the_one_that_was_obeyed_changes_nothing() -> None:
    memory = Memory()
    memory.record = msgspec.structs.replace(memory.record, fence=Order(2, 20))
    assert not remembered(memory).hear_serving_side(STANDBY, Order(2, 19))
    assert remembered(memory).hear_serving_side(STANDBY, Order(2, 20))


def test_a_later_generation_that_knows_of_no_failover_lifts_the_fence() -> None:
    memory = Memory()
    assert remembered(memory).hear_serving_side(STANDBY, Order(1, 10))
    assert remembered(memory).hear_serving_side(None, Order(2, 3))
    assert memory.record.fenced_by is None


def test_a_node_without_a_failover_writes_nothing_for_it() -> None:
    memory = Memory()
    assert not remembered(memory).hear_serving_side(None, Order(0, 7))
    assert memory.writes == 0


orders = hs.builds(Order, hs.just(1), hs.integers(1, 9))


@settings(max_examples=200, deadline=None)
@given(hs.dictionaries(orders, hs.sampled_from(SideName), min_size=1), hs.data())
def test_in_whatever_order_decisions_are_heard_the_newest_one_stands(said: dict[Order, SideName], data: hs.DataObject) -> None:
    """Of a node that heard the newest: it may have heard it late, twice, or between older ones."""
    memory = Memory()
    heard = [*said, *data.draw(hs.lists(hs.sampled_from(sorted(said)), max_size=5))]
    for order in data.draw(hs.permutations(heard)):
        remembered(memory).hear_serving_side(said[order], order)
        before = memory.record
        remembered(memory).hear_serving_side(said[order], order)
        assert memory.record == before
    newest = max(said)
    assert (memory.record.serving_side, memory.record.serving_order) == (said[newest], newest)


@pytest.mark.parametrize(("own", "serves", "fenced"), [(PRIMARY, STANDBY, True), (STANDBY, PRIMARY, True), (PRIMARY, PRIMARY, False)])
def test_the_side_that_does_not_serve_refuses_requests_and_says_who_takes_them(
    tmp_path: Path, own: SideName, serves: SideName, fenced: bool
) -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.infer()).status_code == 200
        decided = msgspec.structs.replace(RECORD, side=own, serving_side=serves, serving_order=Order(1, 10))
        scene.journal.put(decided)
        for path in ("/v2/models/search/infer", "/v2/models/search/versions/1.0.0/infer"):
            reply = await scene.infer(path)
            assert reply.status_code == (503 if fenced else 200)
            if fenced:
                assert reply.json()["error"].startswith(f"fenced: search: the {serves} side takes requests since order (1, 10)")
                assert (reply.headers["x-raftmeta-serving-side"], reply.headers["retry-after"]) == (serves.value, "1")
        probed = await scene.infer(**{"x-raftmeta-probe": "1"})
        assert probed.status_code == 200, "what it would answer is for whoever compares the sides"
        for path in ("/v2/models/search/ready", "/v2/models/search/versions/1.0.0/ready", "/v2/health/ready", "/readyz"):
            ready = await scene.http.get(path)
            assert (ready.status_code, ready.json()["ready"]) == ((503, False) if fenced else (200, True))
            assert ("fenced: " in ready.json().get("reason", "")) == fenced
        assert (await scene.http.get("/v2/models/search")).status_code == 200, "what it takes is no secret"
        assert len(scene.worker.calls) == (2 if fenced else 4)
        scene.journal.put(RECORD)
        assert (await scene.infer()).status_code == 200

    run(tmp_path, work)


def test_a_request_that_was_taken_before_the_decision_is_answered(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        scene.worker.hold = asyncio.Event()
        under_way = asyncio.create_task(scene.infer())
        await scene.until(lambda: len(scene.worker.calls) == 1)
        scene.journal.put(msgspec.structs.replace(RECORD, serving_side=STANDBY, serving_order=Order(1, 10)))
        assert (await scene.infer()).status_code == 503
        scene.worker.hold.set()
        assert (await under_way).status_code == 200

    run(tmp_path, work)
