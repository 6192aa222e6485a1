"""What the checker records is what the members take: a report as the one writes it has all that the other asks of a verdict."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from api.routes.verdicts import basis_of, summary_of
from api.schemas.bodies import VerdictBody
from consistency import report
from consistency.agent_answers import AgentFault
from consistency.collect import Checker
from consistency.findings import Limits, Verdict
from raftmeta.core.handlers.verdicts import VERDICTS
from raftmeta.core.types import Basis
from tests.support.fake_fleet import DEPLOYMENT, FakeAgents, FakeFleet


def verdict_of(fleet: FakeFleet) -> Verdict:
    return asyncio.run(Checker(fleet, FakeAgents(fleet), Limits(), clock=lambda: 0.0).check([]))[0]


def body_of(made: Verdict) -> VerdictBody:
    sent = {"deployment": DEPLOYMENT, "verdict": report.recorded_as(made), "report": report.for_record(made)}
    return msgspec.json.decode(msgspec.json.encode(sent), type=VerdictBody)


@pytest.mark.parametrize("silent", [False, True])
def test_a_report_says_what_it_is_of(silent: bool) -> None:
    fleet = FakeFleet()
    if silent:
        fleet.nodes_by_name["b1"].fault = AgentFault("unreachable", "because")
    body = body_of(verdict_of(fleet))
    assert body.verdict in VERDICTS and body.basis is None
    assert basis_of(body) == Basis(2, 700, "v1", 812, 1 if silent else 2, fleet.nodes_by_name["a1"].age_ms)
    assert summary_of(body.report).startswith(f"0 findings; {1 if silent else 2} nodes seen")
    assert ("unreachable b1" in summary_of(body.report)) == silent
