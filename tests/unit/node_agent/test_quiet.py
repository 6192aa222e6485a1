from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent import metric_table, quiet
from node_agent.config import AgentConfig
from node_agent.device.port import SlotState
from node_agent.metrics import Meter, totals
from node_agent.plan import Attest, AwaitQuiet, Change, Order, Seen, SlotSeen, Target, plan
from node_agent.plan import Goal as PlanGoal
from node_agent.quiet import Gate, Quiet
from node_agent.refusal import Refusal
from raftmeta.core.types import Phase, SideName, Stage
from tests.support.tending import TendScene, run

RULE = Quiet(requests_per_s=100.0, window_requests=200, wait_s=10.0)  # 200 within two seconds


class Node:
    """Requests that come when the test says so, and a clock that moves with them."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.requests: dict[str, float] = {}
        self.gate = Gate(RULE, lambda: self.requests, lambda: self.now_s)

    def run(self, seconds: float, per_s: float, every_s: float = 0.05) -> None:
        for _ in range(round(seconds / every_s)):
            self.gate.look()
            self.requests["search"] = self.requests.get("search", 0.0) + per_s * every_s
            self.now_s += every_s
        self.gate.look()


@pytest.mark.parametrize(("per_s", "opens"), [(0.0, True), (90.0, True), (95.0, True), (105.0, False), (5000.0, False)])
def test_it_opens_below_the_rate_and_not_above(per_s: float, opens: bool) -> None:
    node = Node()
    node.run(5.0, per_s)
    assert node.gate.is_open("search") is opens
    assert node.gate.is_open("other"), "another deployment's requests count"


def test_it_opens_once_the_crowd_has_left_and_closes_when_one_comes() -> None:
    node = Node()
    node.run(5.0, 300.0)
    assert not node.gate.is_open("search")
    node.run(1.0, 0.0)
    assert not node.gate.is_open("search"), "the last span still holds 300"
    node.run(1.5, 0.0)
    assert node.gate.is_open("search")
    node.run(1.0, 300.0)
    assert not node.gate.is_open("search")


def test_nothing_is_known_before_a_whole_span_was_watched() -> None:
    node = Node()
    assert node.gate.came("search") is None and not node.gate.is_open("search")
    node.run(1.9, 0.0)
    assert not node.gate.is_open("search")
    node.run(0.2, 0.0)
    assert node.gate.is_open("search")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 0.5), st.integers(0, 60)), min_size=1, max_size=80))
def test_what_it_counts_lies_between_the_last_span_and_one_look_more(steps: list[tuple[float, int]]) -> None:
    node = Node()
    came: list[tuple[float, int]] = []
    node.gate.look()
    begun_s = node.now_s
    for gap_s, requests in steps:
        node.now_s += gap_s
        node.requests["search"] = node.requests.get("search", 0.0) + requests
        came.append((node.now_s, requests))
        node.gate.look()
    found = node.gate.came("search")
    if node.now_s - begun_s < RULE.span_s:
        assert found is None
        return
    least = sum(requests for at, requests in came if at > node.now_s - RULE.span_s)
    most = sum(requests for at, requests in came if at > node.now_s - RULE.span_s - 0.5)
    assert found is not None and least <= found <= most
    assert len(node.gate._seen) <= len(steps) + 1


def _waits(work: Callable[[Gate], Coroutine[None, None, None]], requests: dict[str, float]) -> None:
    async def whole() -> None:
        gate = Gate(Quiet(1000.0, 200, 0.5), lambda: requests)
        watching = asyncio.create_task(gate.watch())
        try:
            await asyncio.wait_for(work(gate), 30)
        finally:
            watching.cancel()

    asyncio.run(whole())


def test_whoever_waits_is_let_through_or_refused_in_time() -> None:
    requests = {"search": 0.0}

    async def work(gate: Gate) -> None:
        await gate.passed("search")
        busy = asyncio.create_task(crowd())
        await asyncio.sleep(0.05)
        with pytest.raises(Refusal) as refused:
            await gate.passed("search")
        busy.cancel()
        assert refused.value.kind == "not_quiet" and "fewer than 200 requests within 0.2 s" in refused.value.detail

    async def crowd() -> None:
        while True:
            requests["search"] += 1000
            await asyncio.sleep(0.005)

    _waits(work, requests)


V1, V2 = Target("m", "1", "a" * 64, "c" * 64), Target("m", "2", "b" * 64, "d" * 64)


def _seen(passed: str | None) -> Seen:
    first, second = (SlotSeen(target.label, target.checksum, SlotState.VERIFIED, True, True) for target in (V1, V2))
    at_rest = Seen((first, second), 0, V1, frozenset([V1.checksum, V2.checksum]), Order(1, 9), V1, "", None)
    return at_rest._replace(passed=passed)


@pytest.mark.parametrize(
    ("passed", "is_undo", "waits"), [(None, False, False), ("", False, True), ("r0", False, True), ("r", False, False), ("", True, False)]
)
def test_a_version_waits_before_it_is_said_to_be_ready_and_a_roll_back_does_not(passed: str | None, is_undo: bool, waits: bool) -> None:
    change = Change("r", Phase.SYNCING, V2, Stage.PREPARED, is_undo)
    steps = plan(PlanGoal("search", SideName.PRIMARY, V1, Order(1, 9), change), _seen(passed)).steps
    assert steps == ((AwaitQuiet(V2, "r"),) if waits else ()) + (Attest("r", Stage.READY, V2),)


def test_it_is_off_unless_a_rate_is_set_and_one_that_can_never_open_is_refused(tmp_path: Path) -> None:
    basis = {"node": "n1", "zone": "a", "member_urls": ("http://127.0.0.1:1",), "store_dir": tmp_path}
    assert AgentConfig(**basis).quiet is None  # type: ignore[arg-type]
    assert AgentConfig(**basis, quiet_requests_per_s=50).quiet == Quiet(50.0, quiet.MIN_WINDOW, 60.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no version would ever become ready"):
        AgentConfig(**basis, quiet_requests_per_s=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quiet_window_requests"):
        AgentConfig(**basis, quiet_window_requests=199)  # type: ignore[arg-type]


def test_requests_are_counted_whatever_they_were_answered() -> None:
    meter = Meter()
    for status in ("200", "200", "503"):
        meter.count(metric_table.REQUESTS, "search", status)
    meter.count(metric_table.REQUESTS, "other", "200")
    meter.count(metric_table.REPLAYS)
    assert totals(meter.tally, metric_table.REQUESTS) == {"search": 3.0, "other": 1.0}


def test_a_rollout_that_meets_no_quiet_moment_fails_with_nothing_changed(tmp_path: Path, shm: Path) -> None:
    scene = TendScene(tmp_path, shm)
    requests = {"search": 0.0}

    async def work() -> None:
        gate = Gate(Quiet(1000.0, 200, 0.3), lambda: requests)
        scene.close()
        scene.gate = gate
        scene.take_over()
        watching = asyncio.create_task(gate.watch())
        await scene.roll(None, 1)  # nobody asks for anything
        busy = asyncio.create_task(crowd())
        await scene.rest(scene.goal(1, Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)))
        assert (scene.last()["stage"], scene.last()["code"]) == ("failed", "timeout")
        assert "not_quiet in gate" in scene.last()["detail"]
        assert scene.station.active == 0
        busy.cancel()
        watching.cancel()

    async def crowd() -> None:
        while True:
            requests["search"] += 1000
            await asyncio.sleep(0.005)

    try:
        run(work)
    finally:
        scene.close()
