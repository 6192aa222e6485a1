"""What a drill concludes from requests and decisions, and what its client does at a fail-over that it hears of from nodes alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from consistency.agent_answers import AgentFault
from consistency.drill import Asked, Drill, Move, Try, as_json, as_text
from consistency.drill_command import rate_of
from consistency.drill_run import Load
from consistency.inference import Output
from consistency.live import Question
from consistency.node_http import FENCED

NODES = {"primary": ("p",), "standby": ("s",)}


def answer(node: str, at_s: float, took_s: float = 0.01) -> Try:
    return Try(node, "primary" if node.startswith("p") else "standby", at_s - took_s, at_s, "1.0.0")


def fault(node: str, at_s: float, code: str = FENCED) -> Try:
    return answer(node, at_s)._replace(version="", fault=code)


def asked(*tries: Try) -> Asked:
    return Asked(tries[0].begun_s, tries)


def drilled(requests: Sequence[Asked], refused: dict[str, float] | None = None) -> Drill:
    move = Move("standby", "primary", 10.0, 10.02, 7, {"p": 10.05} if refused is None else refused)
    return Drill("search", "tiny", 20.0, 0.0, 20.0, requests, (move,), NODES)


BEFORE = [asked(answer("p", at / 10)) for at in range(50, 100)]
SWITCHING = asked(fault("p", 10.06), answer("s", 10.08))
AFTER = [asked(answer("s", at / 10)) for at in range(102, 150)]


def test_recovery_runs_from_the_question_to_the_first_answer_of_the_other_side() -> None:
    made = drilled([*BEFORE, SWITCHING, *AFTER])
    (found,) = made.found
    assert made.holds and (found.recovery_ms, found.decided_ms, found.fenced_ms) == (80.0, 20.0, {"p": 50.0})
    assert found.longest_gap_ms == pytest.approx(180.0, abs=1)  # from the last answer before to the retry's
    assert (made.retried, len(made.lost)) == (1, 0)
    assert "HOLDS" in as_text(made) and json.loads(json.dumps(as_json(made)))["requests"]["retried"] == 1


def test_an_answer_of_the_new_side_before_the_decision_is_no_recovery() -> None:
    early = [asked(answer("s", 9.0)), *BEFORE]
    assert drilled(early).found[0].recovery_ms is None and not drilled(early).holds
    assert "never" in as_text(drilled(early))


def test_a_request_without_an_answer_on_either_try_is_lost() -> None:
    made = drilled([*BEFORE, asked(fault("p", 10.06), fault("s", 10.07, "unreachable")), *AFTER])
    assert not made.holds and len(made.lost) == 1 and "s: unreachable" in as_text(made)


def test_an_old_side_that_answers_once_it_had_refused_breaks_the_fence_and_one_that_was_asked_before_does_not() -> None:
    slow = asked(answer("p", 10.5, took_s=0.47))
    assert drilled([*BEFORE, SWITCHING, slow, *AFTER]).holds
    broken = drilled([*BEFORE, SWITCHING, asked(answer("p", 10.5)), *AFTER])
    assert broken.found[0].breaches == 1 and not broken.holds


def test_a_node_that_never_refused_is_named() -> None:
    made = drilled([*BEFORE, SWITCHING, *AFTER], refused={})
    assert made.found[0].unfenced == ("p",) and not made.holds and "p never refused" in as_text(made)


def test_a_report_says_how_many_more_were_lost_what_the_load_was_and_who_serves() -> None:
    lost = [asked(fault("p", 10 + at / 100), fault("s", 10 + at / 100)) for at in range(8)]
    made = replace(drilled([*BEFORE, *lost, *AFTER]), capacity=4.0, serves="primary")
    lines = as_text(made).splitlines()
    assert "  load         asked for 20/s, a side answers about 4/s, which is more than it takes" in lines
    assert lines[-2:] == ["  lost         … 3 more", "  serves now   the primary side"]
    assert as_json(made)["serving_side"] == "primary"
    assert "serves now   unknown" in as_text(drilled([*BEFORE, *AFTER])) and "more" not in as_text(drilled([*BEFORE, *lost[:5]]))


def test_a_drill_asks_for_half_of_what_a_side_answers_unless_it_is_told_a_rate() -> None:
    assert (rate_of(None, 4.0), rate_of(None, 1e6), rate_of(None, 0.0), rate_of(50.0, 4.0)) == (2.0, 20.0, 0.1, 50.0)


def test_a_drill_without_requests_or_moves_proves_nothing() -> None:
    assert not drilled([]).holds
    assert not Drill("search", "tiny", 20.0, 0.0, 20.0, BEFORE, (), NODES).holds


@dataclass
class Fleet:
    fenced: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)

    async def infer(self, url: str, deployment: str, body: bytes) -> tuple[str, tuple[Output, ...]]:
        self.seen.append(url)
        await asyncio.sleep(0.001)
        if url in self.dead:
            raise AgentFault("unreachable", url)
        if url in self.fenced:
            raise AgentFault(FENCED, url)
        return "1.0.0", (Output("y", "FP32", (1,), np.zeros(1, "<f4")),)


@pytest.mark.parametrize("how", ["fenced", "dead"])
def test_the_client_follows_with_one_retry_and_then_asks_the_other_side_at_once(how: str) -> None:
    fleet = Fleet()

    async def work() -> Load:
        urls = {"primary": {"p1": "p1", "p2": "p2"}, "standby": {"s1": "s1"}}
        load = Load("search", urls, fleet, itertools.repeat(Question("q", b"{}", 1, "close")), 500.0, "primary")
        stop = asyncio.Event()
        running = asyncio.create_task(load.run(stop))
        await asyncio.sleep(0.1)
        getattr(fleet, how).update({"p1", "p2"})
        refused = await load.until_refused("primary", 5.0 if how == "fenced" else 0.1)
        assert set(refused) == ({"p1", "p2"} if how == "fenced" else set())
        await asyncio.sleep(0.1)
        stop.set()
        await running
        return load

    load = asyncio.run(asyncio.wait_for(work(), 30))
    assert load.believes == "standby" and not any(request.lost for request in load.asked)
    retried = sum(len(request.tries) > 1 for request in load.asked)
    assert 1 <= retried < 20 and fleet.seen[-1] == "s1"
    assert {"p1", "p2", "s1"} <= {request.tries[-1].node for request in load.asked}, "nodes of a side take turns"


def test_a_request_that_fails_twice_changes_nothing_of_what_the_client_believes() -> None:
    fleet = Fleet(dead={"p", "s"})

    async def work() -> Load:
        load = Load(
            "search",
            {"primary": {"p": "p"}, "standby": {"s": "s"}},
            fleet,
            itertools.repeat(Question("q", b"{}", 1, "close")),
            200.0,
            "primary",
        )
        stop = asyncio.Event()
        running = asyncio.create_task(load.run(stop))
        while not load.asked:
            await asyncio.sleep(0.01)
        stop.set()
        await running
        return load

    began_s = time.monotonic()
    load = asyncio.run(asyncio.wait_for(work(), 30))
    assert load.believes == "primary" and all(request.lost and len(request.tries) == 2 for request in load.asked)
    assert all(try_.begun_s >= began_s for request in load.asked for try_ in request.tries)
