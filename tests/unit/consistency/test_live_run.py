"""Live probes against two sides in the test's hands: answers, switches, silence and drift at chosen moments."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from consistency import live_questions, live_run
from consistency.agent_answers import AgentFault
from consistency.inference import Output
from consistency.live import Heard, Judgement, Kind, Ledger, Moment, Question, judge
from consistency.live_agents import Spec, Standing
from consistency.live_run import Probing
from consistency.two_sides import Sides
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.probes import Probe, ProbeTensor

QUESTION = Question("q", b"{}", 2, "close")


@dataclass
class Node:
    version: str = "1.0.0"
    order: int = 5
    answers: float = 1.0
    silent: str = ""
    status: int = 0  # of the refusal, where it is silent
    is_moving: bool = False
    says_nothing: bool = False  # of what it has applied
    delay_s: float = 0.0
    asked: int = 0

    def standing(self) -> Standing:
        return Standing("boot", self.version, self.version * 3, {} if self.is_moving else {"c": (1, self.order)})


@dataclass
class Fleet:
    nodes: dict[str, Node] = field(default_factory=lambda: {"p": Node(), "s": Node()})
    during: Callable[[Node], None] | None = None  # between an answer and whatever is asked after it

    async def infer(self, url: str, deployment: str, body: bytes) -> tuple[str, tuple[Output, ...]]:
        node = self.nodes[url]
        node.asked += 1
        await asyncio.sleep(node.delay_s)
        if node.silent:
            raise AgentFault(node.silent, "as the test says", node.status)
        answer = node.version, (Output("y", "FP32", (2,), np.full(2, node.answers, "<f4")),)
        if self.during is not None:
            self.during(node)
        return answer

    async def standing(self, url: str, deployment: str) -> Standing:
        if self.nodes[url].silent or self.nodes[url].says_nothing:
            raise AgentFault(self.nodes[url].silent or "timed_out", "as the test says")
        return self.nodes[url].standing()


@dataclass
class Scene:
    fleet: Fleet
    acted: list[Judgement] = field(default_factory=list)
    ledger: Ledger = field(default_factory=lambda: Ledger({"primary": ["p"], "standby": ["s"]}, 0.2))
    rate: float = 2000.0
    skipped: int = 0
    refused: str = ""
    fault: Exception | None = None  # of whoever knows the versions

    def run(self, seconds: float = 0.3) -> Ledger:
        async def dtypes(version: str) -> Sequence[str]:
            if self.fault is not None:
                raise self.fault
            return ("F32",)

        async def act(question: Question, primary: Heard, standby: Heard, judged: Judgement) -> None:
            self.acted.append(judged)

        async def work() -> None:
            sides = Sides("search", {"p": "p"}, {"s": "s"})
            probing = Probing(sides, self.fleet, self.ledger, itertools.repeat(QUESTION), dtypes, act, self.rate)
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(seconds, stop.set)
            await probing.run(stop)
            self.skipped, self.refused = probing.skipped, probing.refused

        asyncio.run(asyncio.wait_for(work(), 30))
        return self.ledger


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(live_run, "POLL_S", 0.02)
    yield


def test_equal_sides_are_compared_and_nothing_follows() -> None:
    scene = Scene(Fleet())
    ledger = scene.run()
    assert ledger.asked > 10 and ledger.coverage == ledger.within == 1.0 and not scene.acted


def test_drift_of_one_side_is_acted_on_with_the_rows_named() -> None:
    scene = Scene(Fleet({"p": Node(), "s": Node(answers=1.1)}))
    ledger = scene.run()
    assert ledger.within == 0.0 and scene.acted and scene.acted[0].beyond == (0, 1)


def test_a_switch_that_one_side_makes_first_is_no_difference_whenever_it_is_seen() -> None:
    """The standby switches between answering and being looked at, in the middle of it, and later."""
    for moment in range(4):
        fleet = Fleet()
        steps = itertools.count()

        def step(node: Node, fleet: Fleet = fleet, steps: Iterator[int] = steps, moment: int = moment) -> None:
            at = next(steps) // 2
            if at == moment and node is fleet.nodes["s"]:
                node.is_moving = True
            if at == moment + 1 and node is fleet.nodes["s"]:
                node.version, node.order, node.is_moving, node.answers = "2.0.0", 6, False, 2.0
            if at == moment + 3 and node is fleet.nodes["p"]:
                node.version, node.order, node.answers = "2.0.0", 6, 2.0

        fleet.during = step
        scene = Scene(fleet, rate=200.0)
        ledger = scene.run()
        assert not scene.acted, (moment, scene.acted)
        assert ledger.within == 1.0


def test_a_standby_that_never_follows_is_a_difference_after_the_time_it_has() -> None:
    scene = Scene(Fleet({"p": Node("2.0.0", 6), "s": Node()}))
    ledger = scene.run(0.5)
    assert ledger.samples[Kind.SWITCHING] and scene.acted and "s is behind for" in scene.acted[0].detail


def test_a_node_of_another_version_that_does_not_say_what_it_has_applied_is_a_difference_after_the_time_it_has() -> None:
    scene = Scene(Fleet({"p": Node("2.0.0", 6), "s": Node(says_nothing=True)}))
    ledger = scene.run(0.5)
    assert not ledger.faults and scene.acted and "s does not say what it has applied: timed_out" in scene.acted[0].detail
    assert not Scene(Fleet({"p": Node("2.0.0", 6), "s": Node(says_nothing=True)})).run(0.1).kept


class Mute(Fleet):
    async def infer(self, url: str, deployment: str, body: bytes) -> tuple[str, tuple[Output, ...]]:
        raise AgentFault("timed_out", "as the test says")


def test_a_node_that_says_that_it_has_followed_is_late_no_longer_though_nothing_could_be_compared() -> None:
    scene = Scene(Mute())
    primary, standby = Heard("p", "2.0.0", {"c": (1, 6)}, ()), Heard("s", "1.0.0", {}, (), settled=False)
    scene.ledger.add(QUESTION, primary, standby, judge(QUESTION, primary, standby, ()), Moment(0.0))
    assert scene.ledger.late and not scene.run(0.1).late


def test_two_that_applied_the_same_and_serve_different_versions_contradict_each_other() -> None:
    scene = Scene(Fleet({"p": Node("2.0.0"), "s": Node()}))
    ledger = scene.run()
    assert ledger.samples[Kind.CONTRADICTION] and scene.acted[0].kind is Kind.CONTRADICTION


def test_a_pinned_node_is_behind_and_not_a_contradiction() -> None:
    scene = Scene(Fleet({"p": Node("2.0.0"), "s": Node(is_moving=True)}))
    ledger = scene.run(0.1)
    assert ledger.samples[Kind.SWITCHING] == ledger.asked and not ledger.samples[Kind.CONTRADICTION]


@pytest.mark.parametrize("code", ["unreachable", "timed_out", "refused"])
def test_a_node_that_does_not_answer_costs_coverage_and_is_named(code: str) -> None:
    scene = Scene(Fleet({"p": Node(), "s": Node(silent=code)}))
    ledger = scene.run()
    assert ledger.coverage == 0.0 and ledger.within is None and set(ledger.faults) == {"s"} and not scene.acted


def test_a_version_that_no_member_tells_of_is_not_compared() -> None:
    scene = Scene(Fleet(), fault=RaftmetaError("no_quorum", "as the test says"))
    ledger = scene.run()
    assert ledger.coverage == 0.0 and set(ledger.faults) == {"members"} and not scene.acted


def test_a_fault_that_nobody_expected_ends_the_run_instead_of_a_sample() -> None:
    with pytest.raises(ZeroDivisionError):
        Scene(Fleet(), fault=ZeroDivisionError()).run()


def test_what_cannot_be_asked_in_time_is_counted_and_never_piles_up() -> None:
    scene = Scene(Fleet({"p": Node(delay_s=0.2), "s": Node()}), rate=20_000.0)
    ledger = scene.run()
    assert scene.skipped > 0 and scene.fleet.nodes["p"].asked <= 4 * live_run.MAX_IN_FLIGHT
    assert ledger.coverage == 1.0


def test_questions_of_a_file_say_which_line_is_wrong() -> None:
    good = '{"inputs": [{"name": "x", "shape": [3, 2], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}], "measure": "cosine"}'
    (question,) = live_questions.of_lines(f"\n{good}\n")
    assert (question.name, question.rows, question.measure) == ("line-2", 3, "cosine")
    for bad in ("{", '{"inputs": []}', '{"inputs": [{}], "measure": "x"}', '{"inputs": [{}], "limit": -1}', '{"inputs": [{}], "extra": 1}'):
        with pytest.raises(RaftmetaError, match="line 2"):
            live_questions.of_lines(f"{good}\n{bad}\n")
    with pytest.raises(RaftmetaError, match="no line"):
        live_questions.of_lines("\n\n")


def test_drawn_numbers_follow_the_seed_and_fit_what_the_model_takes() -> None:
    specs = (Spec("x", "FP32", (-1, 4)),)
    first, again, other = (next(live_questions.drawn(specs, 5, seed)) for seed in (1, 1, 2))
    assert first == again != other and first.rows == 5
    for odd in (Spec("x", "INT64", (-1, 4)), Spec("x", "FP32", (-1, -1)), Spec("x", "BYTES", (-1,)), Spec("x", "FP32", ())):
        with pytest.raises(RaftmetaError, match="give --inputs"):
            live_questions.drawn((odd,), 5, 1)


def test_probes_of_a_version_are_asked_as_they_were_published() -> None:
    text = ProbeTensor("text", "BYTES", (2,), ("a", "b"))
    out = ProbeTensor("y", "FP32", (2, 1), np.zeros(2, "<f4").tobytes())
    (question,) = live_questions.of_probes([Probe("texts", "cosine", (text,), (out,), limit=0.99)])
    assert (question.name, question.rows, question.measure, question.limit) == ("texts", 2, "cosine", 0.99)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_run_that_nobody_would_answer_ends_by_itself_and_says_why(status: int) -> None:
    scene = Scene(Fleet({"p": Node(silent="refused", status=status), "s": Node(silent="refused", status=status)}))
    began_s = time.monotonic()
    ledger = scene.run(30.0)
    assert time.monotonic() - began_s < 20 and "as the test says" in scene.refused
    assert scene.fleet.nodes["p"].asked <= 2 * live_run.UNFIT + live_run.MAX_IN_FLIGHT
    assert ledger.silence["p"] == "refused: as the test says"


def test_a_question_that_one_model_does_not_take_ends_no_run_that_was_answered() -> None:
    scene = Scene(Fleet({"p": Node(), "s": Node(silent="refused", status=400)}))
    ledger = scene.run()
    assert not scene.refused and ledger.samples[Kind.UNANSWERED] > 2 * live_run.UNFIT
