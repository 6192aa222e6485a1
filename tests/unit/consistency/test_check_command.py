"""`raftmeta check` as cron runs it: real connections to scripted members and nodes on loopback, exit status, output, the record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from consistency.agent_answers import AgentFault
from raftmeta.cli.main import main
from tests.support.fake_fleet import DEPLOYMENT, FakeFleet, routes, vector_route
from tests.support.stub_http import StubServer, always, problem, stub_server


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def stub(fleet: FakeFleet) -> Iterator[StubServer]:
    with stub_server(routes(fleet)) as server:
        for name, node in fleet.nodes_by_name.items():
            fleet.urls[name] = f"{server.url}/{name}"
            server.routes["GET", f"/{name}/raftmeta/v1/vector/{DEPLOYMENT}"] = vector_route(node)
        yield server


def run(stub: StubServer, *words: str) -> int:
    return main(["check", "--url", stub.url, "--timeout", "2", *words])


def test_equal_sides_exit_0_and_the_verdict_is_recorded(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("search: model tiny, version v1 (number 1)")
    assert captured.out.splitlines()[0].endswith("CONSISTENT")
    ((deployment, verdict, report),) = fleet.recorded
    assert (deployment, verdict, report["mismatch_ratio"]) == (DEPLOYMENT, "consistent", 0.0)


def test_a_difference_exits_1_with_one_json_value(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.nodes_by_name["b1"].damage("embed.weight", 200_000)
    assert run(stub, DEPLOYMENT, "--json") == 1
    captured = capsys.readouterr()
    seen = json.loads(captured.out)
    assert (seen["verdict"], seen["exit"], seen["not_recorded"]) == ("diverged", 1, [])
    _, finding = seen["deployments"][0]["findings"]  # after the one about the sides
    assert (finding["node"], finding["tensor"], finding["block"]) == ("b1", "embed.weight", 3)
    assert captured.err == ""
    assert fleet.recorded[0][1] == "diverged"


def test_a_silent_node_exits_2(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.nodes_by_name["a1"].fault = AgentFault("starting", "the slot is being restored")
    assert run(stub) == 2
    assert "not looked at: a1 (starting)" in capsys.readouterr().out
    assert fleet.recorded[0][1] == "incomplete"


def test_no_record_records_nothing(stub: StubServer, fleet: FakeFleet) -> None:
    assert run(stub, "--all", "--no-record") == 0
    assert fleet.recorded == []


def test_a_verdict_that_cannot_be_recorded_stands_and_says_so(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    stub.routes["POST", "/v1/consistency"] = always(problem("forbidden", "the role reader may not record"))
    assert run(stub) == 0
    assert "not recorded: search: forbidden: the role reader may not record" in capsys.readouterr().out


def test_several_deployments_end_with_a_summary_and_the_worst_verdict(
    stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.declare("another", ("a1",), None)
    assert run(stub, "--all") == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["INCOMPLETE", "another"], ["CONSISTENT", "search"]]


def test_without_any_deployment_nothing_was_proved(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.deployments.clear()
    assert run(stub) == 2
    assert "no deployment is declared" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["seach"], ["--deployment", "seach"], ["search", "--all"], ["--node-timeout", "0"], ["--lag"]])
def test_a_wrong_command_line_exits_3_and_records_nothing(stub: StubServer, fleet: FakeFleet, words: list[str]) -> None:
    assert run(stub, *words) == 3
    assert fleet.recorded == []


@pytest.mark.parametrize("command", ["check", "status"])
def test_every_command_ends_with_3_for_a_deployment_that_there_is_not(
    stub: StubServer, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.routes["GET", "/v1/deployments/seach"] = always(problem("unknown_deployment", "no deployment 'seach'"))
    assert main([command, "seach", "--url", stub.url]) == 3
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "'seach'" in error and error.endswith("(unknown_deployment)") and "`raftmeta status` lists the deployments" in hint


@pytest.mark.parametrize("code", ["unauthenticated", "forbidden", "internal"])
def test_members_that_refuse_leave_it_incomplete_and_not_diverged(stub: StubServer, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    stub.routes["GET", "/v1/deployments"] = always(problem(code))
    assert run(stub) == 2
    assert f"INCOMPLETE: because ({code})" in capsys.readouterr().out


def test_members_that_are_not_there_leave_it_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--url", "http://127.0.0.1:9", "--timeout", "0.2", "--json"]) == 2
    seen: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (seen["verdict"], seen["error"]["code"]) == ("incomplete", "no_quorum")
