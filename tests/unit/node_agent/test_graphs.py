"""Graphs answer only where their replay of the probes was compared with the module itself since the last switch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import structlog

from node_agent.engine.port import EngineFault
from node_agent.graphs import MAX_LAYOUTS, MAX_REASON, GraphFault, Graphs, GraphVerdict, Switched, reporter
from node_agent.messages import Tensor
from node_agent.metrics import Meter
from raftmeta.core.probes import Probe, ProbeTensor

LAYOUT, OTHER = "a" * 64, "b" * 64


def tensor(name: str, values: Sequence[float]) -> Tensor:
    return Tensor(name, "FP32", (1, len(values)), np.array(values, "<f4").tobytes())


def probe(name: str = "p", measure: str = "close", limit: float = 0.0) -> Probe:
    """The publisher's own outputs are far from what this machine computes: they are not what the replay is compared with."""
    made = ProbeTensor("x", "FP32", (1, 2), np.array([1, 2], "<f4").tobytes())
    return Probe(name, measure, (made,), (ProbeTensor("y", "FP32", (1, 2), np.array([9, 9], "<f4").tobytes()),), limit)


@dataclass
class FakeRunner:
    """y = 3 x; `off` is what the graph adds to it."""

    off: float = 0.0
    fault: str = ""
    broken: bool = False
    calls: list[str] = field(default_factory=list)

    def eager(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> Sequence[Tensor]:
        self.calls.append("eager")
        if self.broken:
            raise EngineFault("engine_failed", "the module raised")
        return self._answer(inputs, outputs, 0.0)

    def replay(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> Sequence[Tensor]:
        self.calls.append("replay")
        if self.fault:
            raise GraphFault(self.fault)
        return self._answer(inputs, outputs, self.off)

    def _answer(self, inputs: Sequence[Tensor], outputs: Sequence[str], off: float) -> Sequence[Tensor]:
        assert isinstance(inputs[0].data, bytes) and list(outputs) == ["y"]
        return [tensor("y", [3 * float(value) + off for value in np.frombuffer(inputs[0].data, "<f4")])]


@pytest.fixture
def told() -> list[GraphVerdict]:
    return []


@pytest.fixture
def graphs(told: list[GraphVerdict]) -> Graphs:
    return Graphs(told.append)


def switched(layout: str = LAYOUT, *probes: Probe) -> Switched:
    return Switched("search", layout, probes or (probe(),), ["F32"])


def test_nothing_is_replayed_before_the_first_comparison(graphs: Graphs) -> None:
    assert not graphs.may_replay("search", LAYOUT)


def test_a_graph_that_answers_as_the_module_does_may_answer_in_that_layout_and_deployment_alone(
    graphs: Graphs, told: list[GraphVerdict]
) -> None:
    assert graphs.switched(switched(), FakeRunner()) == GraphVerdict("search", LAYOUT, True) == told[0]
    assert graphs.may_replay("search", LAYOUT)
    assert not graphs.may_replay("search", OTHER) and not graphs.may_replay("other", LAYOUT)


def test_from_the_next_switch_on_it_is_off_until_it_was_compared_again(graphs: Graphs) -> None:
    graphs.switched(switched(), FakeRunner())
    graphs.switching("search")
    assert not graphs.may_replay("search", LAYOUT)
    runner = FakeRunner()
    assert graphs.switched(switched(), runner).on and runner.calls == ["eager", "replay"]
    assert graphs.may_replay("search", LAYOUT)


@pytest.mark.parametrize(("off", "on"), [(1e-6, True), (0.1, False), (float("nan"), False)])
def test_how_near_is_near_enough_is_the_probes_tolerance(graphs: Graphs, off: float, on: bool) -> None:
    assert graphs.switched(switched(), FakeRunner(off=off)).on is on
    assert graphs.may_replay("search", LAYOUT) is on


def test_a_probe_with_a_wider_limit_of_its_own_lets_more_through(graphs: Graphs) -> None:
    assert graphs.switched(switched(LAYOUT, probe(limit=0.5)), FakeRunner(off=0.1)).on


def test_a_graph_that_differs_is_off_for_that_layout_also_after_later_switches_and_is_not_asked_again(
    graphs: Graphs, told: list[GraphVerdict]
) -> None:
    assert not graphs.switched(switched(), FakeRunner(off=0.1)).on
    assert "probe 'p', output 'y': replay differs from eager by close" in told[0].reason
    runner = FakeRunner()
    assert not graphs.switched(switched(), runner).on and runner.calls == []
    assert "failed before" in told[1].reason
    assert graphs.switched(switched(OTHER), FakeRunner()).on, "another layout is another graph"


def test_one_probe_of_several_is_enough_to_turn_it_off(graphs: Graphs) -> None:
    class Second(FakeRunner):
        def replay(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> Sequence[Tensor]:
            self.off = 0.1 if "replay" in self.calls else 0.0
            return super().replay(inputs, outputs)

    assert "'q'" in graphs.switched(switched(LAYOUT, probe("p"), probe("q")), Second()).reason


def test_a_capture_that_fails_turns_it_off_and_says_why(graphs: Graphs) -> None:
    verdict = graphs.switched(switched(), FakeRunner(fault="operation not permitted when stream is capturing" * 20))
    assert not verdict.on and "not permitted" in verdict.reason and len(verdict.reason) == MAX_REASON


def test_a_version_without_a_probe_has_no_graph_and_its_layout_may_get_one_later(graphs: Graphs) -> None:
    runner = FakeRunner()
    verdict = graphs.switched(Switched("search", LAYOUT, (), ["F32"]), runner)
    assert not verdict.on and "no probe" in verdict.reason and runner.calls == []
    assert graphs.switched(switched(), runner).on


def test_a_module_that_fails_itself_is_the_callers_matter_and_leaves_the_graph_off(graphs: Graphs, told: list[GraphVerdict]) -> None:
    graphs.switched(switched(), FakeRunner())
    with pytest.raises(EngineFault):
        graphs.switched(switched(), FakeRunner(broken=True))
    assert not graphs.may_replay("search", LAYOUT) and len(told) == 1
    assert graphs.switched(switched(), FakeRunner()).on, "the layout's graph was not at fault"


def test_what_is_remembered_of_failed_layouts_is_bounded_and_a_forgotten_one_is_compared_anew(graphs: Graphs) -> None:
    for number in range(MAX_LAYOUTS + 1):
        graphs.switched(switched(f"{number:064d}"), FakeRunner(off=0.1))
    runner = FakeRunner(off=0.1)
    assert not graphs.switched(switched(f"{1:064d}"), runner).on and runner.calls == []
    assert not graphs.switched(switched(f"{0:064d}"), runner).on and runner.calls == ["eager", "replay"]


def test_a_graph_that_is_off_is_a_log_line_and_a_gauge_at_zero() -> None:
    meter = Meter()
    graphs = Graphs(reporter(meter))

    def gauge() -> list[float]:
        return [sample.value for sample in meter.gauges()]

    with structlog.testing.capture_logs() as lines:
        graphs.switched(switched(), FakeRunner())
        assert (gauge(), lines) == ([1.0], [])
        graphs.switched(switched(OTHER), FakeRunner(off=0.1))
    assert gauge() == [0.0]
    assert [(line["event"], line["deployment"], line["layout"]) for line in lines] == [("graphs_off", "search", OTHER)]
