"""What has to be known before two sides are asked, and what is said where it cannot be had."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from consistency.agent_answers import AgentFault
from consistency.live import Question
from consistency.live_agents import Capacity, Described, Spec
from consistency.live_questions import of_lines
from consistency.two_sides import WARM_REQUESTS, QuestionOptions, Sides, capacity_of, example_line, questions_for, seen_by_members, unasked
from raftmeta.cli.exits import Exit, Unusable, exit_code, hint
from raftmeta.client import Client, Reply
from raftmeta.core.errors import RaftmetaError

SIDES = Sides("search", {"p": "p"}, {"s": "s"})
TEXTS = (Spec("ids", "INT64", (-1, -1)), Spec("text", "BYTES", (-1,)), Spec("x", "FP32", (-1, 3)))


class Nodes:
    def __init__(self, compute_s: dict[str, float], fault: AgentFault | None = None) -> None:
        self.compute_s, self.fault, self.warmed = compute_s, fault, 0

    async def described(self, url: str, deployment: str) -> Described:
        if self.fault is not None:
            raise self.fault
        return Described(TEXTS)

    async def capacity(self, url: str, deployment: str) -> Capacity:
        if self.fault is not None:
            raise self.fault
        return Capacity(2, self.compute_s[url])

    async def infer(self, url: str, deployment: str, body: bytes) -> None:
        self.warmed += 1
        self.compute_s[url] = 0.5


class Members:
    def __init__(self, version: str, *heard: str) -> None:
        self.version, self.heard = version, heard

    async def get_deployment(self, name: str) -> Reply:
        side = {"zone": "a", "nodes": ["p"]}
        body = {"name": name, "model": "tiny", "primary": side, "standby": {"zone": "b", "nodes": ["s"]}, "version": self.version}
        body |= {"previous": "", "rollout_id": "", "order_revision": 1, "activated_revision": 1}
        return Reply(body, status=200, revision=1, generation=1)

    async def nodes(self) -> dict[str, Any]:
        return {"items": [{"node": node, "url": node} for node in self.heard]}


@pytest.mark.parametrize(
    ("status", "code", "exit_status", "says"),
    [
        (0, "unreachable", Exit.UNAVAILABLE, "raftmeta agent --config"),
        (401, "refused", Exit.USAGE, "role checker"),
        (403, "refused", Exit.USAGE, "role checker"),
        (400, "refused", Exit.USAGE, "do not fit the model"),
        (503, "overloaded", Exit.UNAVAILABLE, "raftmeta status search"),
        (0, "untrusted", Exit.USAGE, "ca_file"),
    ],
)
def test_each_reason_why_a_node_cannot_be_asked_has_what_helps(status: int, code: str, exit_status: Exit, says: str) -> None:
    error = unasked("p says nothing", AgentFault(code, "as the test says", status), "search")
    assert exit_code(error) == exit_status and says in hint(error)
    assert ("try again in a moment" not in hint(error)) and error.detail == "p says nothing"


@pytest.mark.parametrize(("members", "says"), [(Members("", "p", "s"), "raftmeta activate search"), (Members("v1", "p"), "raftmeta agent")])
def test_what_has_to_be_there_first_is_said_as_the_next_step(members: Members, says: str) -> None:
    with pytest.raises(RaftmetaError) as refused:
        asyncio.run(seen_by_members(cast(Client, members), "search"))
    assert says in hint(refused.value) and exit_code(refused.value) == Exit.UNAVAILABLE


def test_a_version_without_probes_is_refused_with_a_line_that_the_model_takes() -> None:
    class Manifest:
        probes = ()

    with pytest.raises(Unusable) as refused:
        asyncio.run(questions_for(QuestionOptions(deployment="search"), SIDES, cast(Any, Nodes({})), cast(Any, Manifest)))
    advice = hint(refused.value)
    assert "raftmeta probe" in advice and "--probes" in advice and "--inputs" in advice
    line = advice[advice.index("{") :]
    (question,) = of_lines(line)
    inputs = json.loads(question.body)["inputs"]
    assert [(item["name"], item["shape"], item["data"]) for item in inputs] == [
        ("ids", [1, 4], [1] * 4), ("text", [1], ["a text"]), ("x", [1, 3], [0.5] * 3),
    ]  # fmt: skip
    assert len(example_line((Spec("x", "FP32", (-1, 10_000)),))) < 1000


def test_the_capacity_is_that_of_the_smaller_side_and_one_that_computed_nothing_is_asked_a_little_first() -> None:
    nodes = Nodes({"p": 0.1, "s": 0.0})
    question = Question("q", b"{}", 1, "close")
    assert asyncio.run(capacity_of(SIDES, cast(Any, nodes), question)) == 4.0 and nodes.warmed == WARM_REQUESTS
    with pytest.raises(RaftmetaError, match="--rate goes without"):
        asyncio.run(capacity_of(SIDES, cast(Any, Nodes({}, AgentFault("timed_out", "late"))), question))
