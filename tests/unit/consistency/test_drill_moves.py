"""A drill that ends early, at every moment and for every reason: the first side serves again, or it is said who serves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from consistency.agent_answers import AgentFault
from consistency.drill_moves import MAX_BACK, Rehearsal
from consistency.drill_run import OTHER, Load
from consistency.inference import Output
from consistency.live import Question
from consistency.node_http import FENCED
from raftmeta.core.errors import RaftmetaError

REFUSED = RaftmetaError("failover_refused", "as the test says")
UNKNOWN = RaftmetaError("unknown_outcome", "no answer came")


@dataclass
class Cluster:
    """Members and a node of each side, which obeys at once."""

    serving: str = "primary"
    order: int = 5
    decisions: list[str] = field(default_factory=list)
    on_decision: Callable[[Cluster, str], None] = lambda cluster, to: None  # before it is taken
    after: Callable[[Cluster, str], None] = lambda cluster, to: None  # once it was taken, before it is told
    decide_s: float = 0.0
    refusals: int = 0  # of the check, from the first move on
    unreachable: bool = False
    odd: Mapping[str, Any] | None = None  # said instead of the deployment, once a decision was taken
    odd_decisions: int = 0  # that are told in another form
    fault: BaseException | None = None  # of any answer, once a decision was taken

    def move(self, to: str) -> None:
        self.serving, self.order = to, self.order + 1
        self.decisions.append(to)

    async def get_deployment(self, name: str) -> Mapping[str, Any]:
        if self.unreachable:
            raise RaftmetaError("no_quorum", "as the test says")
        if self.odd is not None and self.decisions:
            return self.odd
        return {"serving_side": self.serving, "order_revision": self.order}

    async def fail_over(self, deployment: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.on_decision(self, body["to"])
        await asyncio.sleep(self.decide_s)
        if body["expected_serving_side"] != self.serving:
            raise REFUSED
        self.move(body["to"])
        self.after(self, body["to"])
        if len(self.decisions) <= self.odd_decisions:
            return {"order_revision": "7"} if self.odd is None else self.odd
        return {"order_revision": self.order}

    async def allowed(self, to: str) -> None:
        if self.decisions and self.refusals:
            self.refusals -= 1
            raise REFUSED

    async def infer(self, url: str, deployment: str, body: bytes) -> tuple[str, tuple[Output, ...]]:
        await asyncio.sleep(0.001)
        if self.fault is not None and self.decisions:
            raise self.fault
        if url != self.serving:
            raise AgentFault(FENCED, url)
        return "1.0.0", (Output("y", "FP32", (1,), np.zeros(1, "<f4")),)


@dataclass
class Scene:
    cluster: Cluster
    stay: bool = False
    steady_s: float = 0.05
    said: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    made: Rehearsal | None = None

    def run(self, stop_when: Callable[[], bool] = lambda: False, times: int = 1) -> str:
        async def work() -> str:
            urls = {side: {side[0]: side} for side in OTHER}
            load = Load("search", urls, self.cluster, itertools.repeat(Question("q", b"{}", 1, "close")), 100.0, "primary")
            self.made = Rehearsal(
                self.cluster, load, "primary", self.cluster.allowed, self.said.append, self.steady_s, "raftmeta failover", self.stay, 0.02
            )
            running = asyncio.create_task(self.made.run(self.stop))
            for _ in range(times):
                while not running.done() and not (stop_when() and not self.stop.is_set()):
                    await asyncio.sleep(0.001)
                self.stop.set()
            return await running

        return asyncio.run(asyncio.wait_for(work(), 30))


def test_a_drill_goes_there_and_back_and_has_nothing_to_say() -> None:
    scene = Scene(Cluster())
    assert scene.run() == "" and scene.cluster.decisions == ["standby", "primary"]
    assert scene.made is not None and [set(move.refused_s) for move in scene.made.moves] == [{"p"}, {"s"}]


def test_one_that_stays_stays() -> None:
    scene = Scene(Cluster(), stay=True)
    assert scene.run() == "" and scene.cluster.serving == "standby"


def test_told_to_stop_before_a_decision_it_decides_nothing() -> None:
    scene = Scene(Cluster(), steady_s=5.0)
    assert "told to stop; nothing was decided" in scene.run(lambda: bool(scene.said)) and not scene.cluster.decisions


def slowly(scene: Scene) -> Callable[[Cluster, str], None]:
    """From the first decision on nothing happens by itself for a while."""

    def after(cluster: Cluster, to: str) -> None:
        assert scene.made is not None
        scene.made.steady_s = scene.made.pause_s = 10.0

    return after


def test_told_to_stop_while_the_other_side_serves_it_goes_back() -> None:
    scene = Scene(Cluster())
    scene.cluster.after = slowly(scene)
    assert scene.run(lambda: bool(scene.cluster.decisions)) == "it was told to stop; the primary side serves"
    assert scene.cluster.decisions == ["standby", "primary"]


def test_told_to_stop_while_a_decision_is_on_its_way_it_waits_for_what_becomes_of_it() -> None:
    asked: list[str] = []
    scene = Scene(Cluster(decide_s=0.1, on_decision=lambda cluster, to: asked.append(to)))
    assert scene.run(lambda: bool(asked)) == "it was told to stop; the primary side serves"
    assert scene.cluster.decisions == ["standby", "primary"] and scene.made is not None and len(scene.made.moves) == 2


def test_told_to_stop_twice_it_says_who_serves_and_how_to_go_back() -> None:
    scene = Scene(Cluster(refusals=10**6))
    scene.cluster.after = slowly(scene)
    told = scene.run(lambda: bool(scene.cluster.decisions), times=2)
    assert told == "it was told to stop; it was told to stop again; THE STANDBY SIDE SERVES NOW; to go back: raftmeta failover"


def test_a_way_back_that_is_refused_for_a_while_is_tried_again() -> None:
    scene = Scene(Cluster(refusals=MAX_BACK))
    assert scene.run() == "failover_refused: as the test says; the primary side serves"
    assert scene.cluster.decisions == ["standby", "primary"]


def test_a_way_back_that_stays_refused_is_given_up_loudly() -> None:
    scene = Scene(Cluster(refusals=10**6))
    told = scene.run()
    assert "THE STANDBY SIDE SERVES NOW; to go back: raftmeta failover" in told and "failover_refused" in told
    assert 10**6 - scene.cluster.refusals == 1 + MAX_BACK


def lost_answer(of: str) -> Callable[[Cluster, str], None]:
    def after(cluster: Cluster, to: str) -> None:
        if to == of and cluster.decisions.count(to) == 1:
            raise UNKNOWN

    return after


@pytest.mark.parametrize("side", ["standby", "primary"])
def test_after_an_answer_that_was_lost_it_looks_who_serves(side: str) -> None:
    scene = Scene(Cluster(after=lost_answer(side)))
    assert scene.run() == "unknown_outcome: no answer came; the primary side serves"
    assert scene.cluster.decisions == ["standby", "primary"]


def test_a_decision_that_comes_after_its_answer_was_lost_is_taken_back_too() -> None:
    def lost(cluster: Cluster, to: str) -> None:
        if to == "standby" and not cluster.decisions:
            asyncio.get_running_loop().call_later(0.03, cluster.move, "standby")
            raise UNKNOWN

    scene = Scene(Cluster(on_decision=lost))
    assert scene.run() == "unknown_outcome: no answer came; the primary side serves"
    assert scene.cluster.decisions == ["standby", "primary"]


def test_a_decision_of_which_nothing_is_heard_any_more_is_said_to_be_unknown() -> None:
    def lost(cluster: Cluster, to: str) -> None:
        raise UNKNOWN

    told = Scene(Cluster(on_decision=lost)).run()
    assert told.startswith("unknown_outcome: no answer came; the primary side serves; whether the last decision still comes is not known")


@pytest.mark.parametrize("how_many", [1, 2])
def test_a_decision_that_is_told_in_another_form_is_taken_back_too(how_many: int) -> None:
    scene = Scene(Cluster(odd_decisions=how_many))
    told = scene.run()
    assert told == "internal: a member's reply has '7' as its order_revision, expected a whole number; the primary side serves"
    assert scene.cluster.decisions == ["standby", "primary"]


@pytest.mark.parametrize("odd", [{}, {"serving_side": None}, {"serving_side": "both", "order_revision": 6}])
def test_members_that_say_something_else_at_the_end_are_named(odd: Mapping[str, Any]) -> None:
    told = Scene(Cluster(odd=odd)).run()
    assert "the members do not say which side serves: internal: a member's reply has " in told
    assert told.endswith("to go back: raftmeta failover")


@pytest.mark.parametrize("odd", [{"serving_side": "standby"}, {"serving_side": "standby", "order_revision": True}])
def test_a_side_that_serves_under_an_order_that_is_not_told_is_not_left_unsaid(odd: Mapping[str, Any]) -> None:
    told = Scene(Cluster(odd=odd, refusals=1)).run()
    assert "as its order_revision, expected a whole number; THE STANDBY SIDE SERVES NOW" in told


def test_an_order_that_somebody_else_gave_is_not_taken_back() -> None:
    def meddle(cluster: Cluster, to: str) -> None:
        asyncio.get_running_loop().call_later(0.02, setattr, cluster, "order", 99)

    scene = Scene(Cluster(after=meddle, refusals=1))
    told = scene.run()
    assert scene.cluster.decisions == ["standby"] and "somebody else gave an order since; THE STANDBY SIDE SERVES NOW" in told


def test_members_that_cannot_be_asked_at_the_end_are_named() -> None:
    def vanish(cluster: Cluster, to: str) -> None:
        cluster.unreachable, cluster.refusals = True, 10**6

    told = Scene(Cluster(after=vanish)).run()
    assert "the members do not say which side serves: no_quorum" in told and "to go back: raftmeta failover" in told


@pytest.mark.parametrize("fault", [RecursionError("as the test says"), ZeroDivisionError()])
def test_a_fault_that_nobody_expected_leads_back_and_is_raised_with_who_serves(fault: Exception) -> None:
    scene = Scene(Cluster(fault=fault), steady_s=0.1)
    with pytest.raises(type(fault)) as caught:
        scene.run()
    assert scene.cluster.serving == "primary" and "the primary side serves" in caught.value.__notes__[0]
