"""What a node may answer to live probes: whatever it is, it is a fault of that node and of nothing else."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from consistency import live_agents
from consistency.agent_answers import AgentFault
from consistency.drill_run import Load
from consistency.live import Ledger, Question
from consistency.live_agents import LiveAgents
from consistency.live_run import Probing
from consistency.node_http import HttpOptions, NodeHttp
from consistency.two_sides import Sides
from tests.support.stub_http import Answer, always, stub_server

DEEP = Answer(b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}")
PAGE = """# TYPE raftmeta_agent_process_up gauge
raftmeta_agent_process_up{role="worker",pid="1"} 1
raftmeta_agent_process_up{role="worker",pid="2"} 1
# TYPE raftmeta_agent_compute_seconds histogram
raftmeta_agent_compute_seconds_sum{deployment="d"} 2.0
raftmeta_agent_compute_seconds_count{deployment="d"} 100
"""


def at(node: dict[tuple[str, str], Any], work: Callable[[LiveAgents, str], Awaitable[Any]]) -> Any:
    async def inside(url: str) -> Any:
        async with NodeHttp(HttpOptions()) as http:
            return await work(LiveAgents(http, 5.0, probes=True), url)

    with stub_server(node) as stub:
        return asyncio.run(inside(stub.url))


ROUTES = {
    ("POST", "/v2/models/d/infer"): always(DEEP),
    ("GET", "/raftmeta/v1/evidence/d"): always(DEEP),
    ("GET", "/v2/models/d"): always(DEEP),
}


@pytest.mark.parametrize(
    "ask",
    [
        lambda agents, url: agents.infer(url, "d", b"{}"),
        lambda agents, url: agents.standing(url, "d"),
        lambda agents, url: agents.described(url, "d"),
    ],
)
def test_an_answer_that_is_nested_deeply_is_a_fault_of_the_node(ask: Callable[[LiveAgents, str], Awaitable[Any]]) -> None:
    with pytest.raises(AgentFault, match="bad_answer"):
        at(ROUTES, ask)


def test_neither_live_probes_nor_the_load_of_a_drill_end_with_an_answer_that_is_nested_deeply() -> None:
    questions = itertools.repeat(Question("q", b"{}", 1, "close"))

    async def work(agents: LiveAgents, url: str) -> tuple[int, bool]:
        async def dtypes(version: str) -> tuple[str, ...]:
            return ("F32",)

        async def act(*_: object) -> None:
            raise AssertionError("nothing could be compared")

        ledger = Ledger({"primary": ["p"], "standby": ["s"]})
        stop = asyncio.Event()
        load = Load("d", {"primary": {"p": url}, "standby": {"s": url}}, agents, questions, 50.0, "primary")
        probing = Probing(Sides("d", {"p": url}, {"s": url}), agents, ledger, questions, dtypes, act, 50.0)
        asyncio.get_running_loop().call_later(0.3, stop.set)
        await asyncio.gather(load.run(stop), probing.run(stop))
        return sum(ledger.faults.values()), all(asked.lost for asked in load.asked)

    unanswered, all_lost = at(ROUTES, work)
    assert unanswered > 0 and all_lost


def capacity(page: str) -> live_agents.Capacity:
    found = at({("GET", "/metrics"): always(Answer(page.encode()))}, lambda agents, url: agents.capacity(url, "d"))
    assert isinstance(found, live_agents.Capacity)
    return found


def test_what_a_node_can_compute_follows_from_its_counts() -> None:
    assert capacity(PAGE) == (2, 0.02)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('role="worker",', 'role="worker",="1",'),
        ("} 2.0", "} NaN"),
        ("} 2.0", "} -1"),
        ("} 100", "} +Inf"),
        ("} 100", "} NaN"),
        ('{deployment="d"} 2.0', '{deployment="d" 2.0'),
    ],
)
def test_a_page_of_metrics_that_cannot_be_meant_is_a_fault_of_the_node(old: str, new: str) -> None:
    assert old in PAGE
    with pytest.raises(AgentFault, match="page of metrics"):
        capacity(PAGE.replace(old, new))


def test_no_damage_of_a_page_of_metrics_escapes_as_anything_else() -> None:
    dice = random.Random(1)
    for _ in range(500):
        page = list(PAGE)
        for _ in range(dice.randint(1, 3)):
            place = dice.randrange(len(page))
            page[place : place + dice.randint(0, 3)] = dice.choice(
                ['"', "{", "}", "=", ",", " ", "\\", "\n", "#", "x", "1e400", "NaN", "\0"]
            )
        with suppress(AgentFault):
            told = live_agents._capacity("".join(page), "d")
            assert math.isfinite(told.requests_per_s) and told.requests_per_s >= 0, page
