"""Which verdicts are kept with the members, and that none is kept which may no longer be true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from api.routes.verdicts import MAX_BATCH_BODY
from consistency.agent_answers import AgentFault
from consistency.clock import boottime
from consistency.collect import Checker
from consistency.findings import Finding, Limits, Verdict
from consistency.recording import BATCH, record
from consistency.report import MAX_RECORD_BYTES
from node_agent.vector_query import MAX_AGE_MS
from raftmeta import strict_json
from raftmeta.client import Page, Reply
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import MAX_ANSWER_AGE_MS
from tests.support.fake_fleet import DEPLOYMENT, FakeAgents, FakeFleet


def verdict_of(fleet: FakeFleet, quorum: str = "all") -> Verdict:
    return asyncio.run(Checker(fleet, FakeAgents(fleet), Limits(quorum=quorum), clock=lambda: 0.0).check([]))[0]


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


def ages(fleet: FakeFleet) -> list[int]:
    return [basis["age_ms"] for basis in fleet.bases]


def test_a_verdict_that_comes_late_is_recorded_with_the_age_of_its_oldest_reading() -> None:
    fleet = FakeFleet()
    made = msgspec.structs.replace(verdict_of(fleet), oldest_proof_ms=50_000)  # when the verdict was given
    assert asyncio.run(record(fleet, [made], 100.0, lambda: 410.0001)) == () and ages(fleet) == [360_001]
    limit_s = MAX_ANSWER_AGE_MS / 1000
    assert asyncio.run(record(fleet, [made], 100.0, lambda: 50.0 + limit_s)) == () and ages(fleet)[1:] == [MAX_ANSWER_AGE_MS]
    too_old = ("search: memory that the verdict rests on was read more than 744 h ago",)
    assert asyncio.run(record(fleet, [made], 100.0, lambda: 50.5 + limit_s)) == too_old and len(fleet.recorded) == 2


def test_a_check_that_stood_still_after_the_nodes_had_answered_makes_its_verdict_no_younger() -> None:
    fleet, now = FakeFleet(), [0.0]
    agents = FakeAgents(fleet)
    read = fleet.list_deployments

    async def stopped(page: Page, /) -> Reply:
        now[0] += 75 if agents.asked else 0
        return await read(page)

    fleet.list_deployments = stopped  # type: ignore[method-assign]
    checker = Checker(fleet, agents, clock=lambda: now[0])
    verdicts, given_s, _ = asyncio.run(checker.judged([]))
    assert (verdicts[0].oldest_answer_ms, verdicts[0].oldest_proof_ms, given_s) == (75_000, 75_007, 75.0)
    now[0] += 5
    asyncio.run(record(fleet, verdicts, given_s, lambda: now[0]))
    assert ages(fleet) == [80_007]


@pytest.mark.parametrize("age_ms", [3_500_000, MAX_AGE_MS])
def test_a_verdict_over_earlier_readings_is_as_old_as_these(age_ms: int) -> None:
    fleet = FakeFleet()
    fleet.nodes_by_name["b1"].age_ms = age_ms
    checker = Checker(fleet, FakeAgents(fleet), Limits(max_age_ms=age_ms), clock=lambda: 0.0)
    verdicts, given_s, _ = asyncio.run(checker.judged([]))
    assert verdicts[0].verdict == "consistent"
    assert asyncio.run(record(fleet, verdicts, given_s, lambda: 5.0)) == () and ages(fleet) == [age_ms + 5_000]


def test_time_that_the_machine_slept_counts() -> None:
    """Where the system tells: the monotonic clock leaves it out."""
    assert boottime() >= time.monotonic() - 0.01


def test_one_verdict_that_members_refuse_takes_no_other_along() -> None:
    fleet = FakeFleet()
    made = verdict_of(fleet)
    many = [msgspec.structs.replace(made, deployment=f"d{number}") for number in range(100)]
    requests: list[int] = []

    class Strict:
        async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
            requests.append(len(items))
            if any(item["deployment"] == "d57" for item in items):
                raise RaftmetaError("bad_json", "because")
            return await fleet.record_verdicts(items)

    assert asyncio.run(record(Strict(), many)) == ("d57: bad_json: because",)
    assert [name for name, _, _ in fleet.recorded] == [item.deployment for item in many if item.deployment != "d57"]
    assert len(requests) < 20

    class Refusing:
        async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
            requests.append(len(items))
            raise RaftmetaError("forbidden", "because")

    requests.clear()
    assert len(asyncio.run(record(Refusing(), many))) == 100 and requests == [100]


def test_what_is_sent_once_more_without_the_others_has_grown_older_meanwhile() -> None:
    fleet, now = FakeFleet(), [100.0]
    made = msgspec.structs.replace(verdict_of(fleet), oldest_proof_ms=MAX_ANSWER_AGE_MS - 100_000)
    sent: dict[str, list[float]] = {}

    class Slow:
        async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
            for item in items:
                sent.setdefault(item["deployment"], []).append(item["basis"]["age_ms"] - made.oldest_proof_ms - 1000 * (now[0] - 100))
            now[0] += 30
            if len(items) > 1:
                raise RaftmetaError("bad_json", "because")
            return await fleet.record_verdicts(items)

    many = [msgspec.structs.replace(made, deployment=name) for name in ("d1", "d2", "d3", "d4")]
    why = asyncio.run(record(Slow(), many, 100.0, lambda: now[0]))
    assert {gap for gaps in sent.values() for gap in gaps} == {0.0}
    assert [name for name, _, _ in fleet.recorded] == ["d1", "d2"]
    assert why == tuple(f"{name}: memory that the verdict rests on was read more than 744 h ago" for name in ("d3", "d4"))


@pytest.mark.parametrize("body", [{}, {"items": ["x"]}, {"items": None}, {"items": [{"code": 5}]}])
def test_an_answer_of_another_form_counts_as_not_recorded(body: dict[str, Any]) -> None:
    made = verdict_of(FakeFleet())

    class Odd:
        async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
            return Reply(body, status=200, revision=1, generation=1)

    (why,) = asyncio.run(record(Odd(), [made]))
    assert why.startswith("search: a member's answer is not what became of verdicts: ")


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
        async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
            reply = await fleet.record_verdicts(items)
            reply["items"][1] = {"revision": 9, "code": "verdict_outdated", "detail": "because"}
            return reply

    assert asyncio.run(record(Picky(), [made, made, made])) == ("search: verdict_outdated: because",)
    assert len(fleet.recorded) == 3


def test_of_a_batch_that_failed_and_of_one_that_was_answered_in_part_no_verdict_counts_as_recorded() -> None:
    fleet = FakeFleet()
    made = verdict_of(fleet)

    class Silent:
        async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
            return await fleet.record_verdicts(items[1:])

    told = "search: a member told of 1 verdicts, it was given 2"
    assert asyncio.run(record(Silent(), [made, made])) == (told, told)
    fleet.fault = RaftmetaError("no_quorum", "because")
    assert asyncio.run(record(fleet, [made, made])) == ("search: no_quorum: because",) * 2


def test_many_are_recorded_in_few_requests_which_members_take() -> None:
    fleet = FakeFleet()
    made = msgspec.structs.replace(verdict_of(fleet), deployment="d" * 128)
    finding = Finding("block", "tiny", "search", "a1", "0", "1", tensor="t" * 1_000)
    long = msgspec.structs.replace(made, findings=(finding,) * 40, findings_total=40)
    sizes: list[int] = []

    class Measuring:
        async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
            sizes.append(len(strict_json.dumps({"items": list(items)})))
            return await fleet.record_verdicts(items)

    assert asyncio.run(record(Measuring(), [long] * (2 * BATCH + 1))) == ()
    assert (len(sizes), len(fleet.recorded)) == (3, 2 * BATCH + 1)
    assert BATCH * MAX_RECORD_BYTES / 2 < max(sizes) < MAX_BATCH_BODY
