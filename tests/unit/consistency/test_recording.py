"""Which verdicts are kept with the members, and that none is kept which may no longer be true."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from consistency.agent_answers import AgentFault
from consistency.collect import Checker
from consistency.findings import Limits, Verdict
from consistency.recording import MAX_AT_ONCE, RECORD_WITHIN_S, record
from raftmeta.client import Reply
from raftmeta.core.errors import RaftmetaError
from tests.support.fake_fleet import DEPLOYMENT, FakeAgents, FakeFleet


def verdict_of(fleet: FakeFleet, quorum: str = "all") -> Verdict:
    return asyncio.run(Checker(fleet, FakeAgents(fleet), Limits(quorum=quorum)).check([]))[0]


def test_a_verdict_is_recorded_with_the_order_that_it_is_of() -> None:
    fleet = FakeFleet()
    assert asyncio.run(record(fleet, [verdict_of(fleet)])) == ()
    ((deployment, verdict, report),) = fleet.recorded
    assert (deployment, verdict) == (DEPLOYMENT, "consistent")
    named = ("generation", "order_revision", "version", "started_revision", "nodes_total", "nodes_seen")
    assert [report[name] for name in named] == [2, 700, "v1", 812, 2, 2]


def test_a_verdict_whose_deployment_moved_on_is_not_recorded() -> None:
    fleet = FakeFleet()

    def switch(question: str) -> None:
        fleet.deployments[DEPLOYMENT] |= {"order_revision": 900, "activated_revision": 901}

    fleet.nodes_by_name["a1"].before_answer = switch
    assert asyncio.run(record(fleet, [verdict_of(fleet)])) == ("search: it got another order while it was checked",)
    assert fleet.recorded == []


def test_a_verdict_that_comes_late_is_not_recorded_as_if_it_were_new() -> None:
    fleet = FakeFleet()
    made = [verdict_of(fleet)]
    late = asyncio.run(record(fleet, made, 100.0, lambda: 100.0 + RECORD_WITHIN_S + 1))
    assert late == ("search: the verdict is older than 60 s",) and fleet.recorded == []
    assert asyncio.run(record(fleet, made, 100.0, lambda: 100.0 + RECORD_WITHIN_S)) == ()


def test_a_quorum_is_recorded_as_incomplete() -> None:
    fleet = FakeFleet(("a1", "a2", "a3"), None)
    fleet.nodes_by_name["a1"].fault = AgentFault("unreachable", "because")
    made = verdict_of(fleet, "majority")
    assert (made.verdict, made.nodes_seen) == ("consistent", 2)
    asyncio.run(record(fleet, [made]))
    assert [(verdict, report["verdict"], report["nodes_seen"]) for _, verdict, report in fleet.recorded] == [
        ("incomplete", "incomplete", 2)
    ]


def test_each_verdict_that_is_refused_is_told_and_the_others_are_kept() -> None:
    fleet = FakeFleet()
    made = verdict_of(fleet)

    class Picky:
        async def record_verdict(self, deployment: str, verdict: str, report: Mapping[str, Any], /) -> Reply:
            if not fleet.recorded:
                fleet.recorded.append((deployment, verdict, report))
                raise RaftmetaError("forbidden", "because")
            return await fleet.record_verdict(deployment, verdict, report)

    assert asyncio.run(record(Picky(), [made, made, made])) == ("search: forbidden: because",)
    assert len(fleet.recorded) == 3


@pytest.mark.parametrize("count", [3 * MAX_AT_ONCE])
def test_many_are_recorded_beside_each_other_and_not_all_at_once(count: int) -> None:
    fleet = FakeFleet()
    made = verdict_of(fleet)
    running = most = 0

    class Slow:
        async def record_verdict(self, *_: Any) -> Reply:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await fleet.nodes()

    assert asyncio.run(record(Slow(), [made] * count)) == ()
    assert most == MAX_AT_ONCE
