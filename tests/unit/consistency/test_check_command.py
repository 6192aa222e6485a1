"""`raftmeta check` as cron runs it: real connections to scripted members and nodes on loopback, exit status, output, the record."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from consistency import lock
from consistency.agent_answers import AgentFault
from consistency.main import with_seconds
from raftmeta.cli.main import main
from tests.support.check_stub import run
from tests.support.fake_fleet import DEPLOYMENT, FakeFleet
from tests.support.stub_http import StubServer, always, problem


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


def asked_of_nodes(stub: StubServer) -> list[str]:
    return sorted(path for _, path, _, _ in stub.requests if "/raftmeta/v1/" in path)


def test_equal_sides_exit_0_and_the_verdict_is_recorded(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("search: model tiny, version v1 (number 1)")
    assert captured.out.splitlines()[0].endswith("CONSISTENT")
    ((deployment, verdict, report),) = fleet.recorded
    assert (deployment, verdict, report["mismatch_ratio"]) == (DEPLOYMENT, "consistent", 0.0)


def test_each_node_gets_one_question_and_one_of_an_earlier_build_two(stub: StubServer, fleet: FakeFleet) -> None:
    assert run(stub) == 0
    assert asked_of_nodes(stub) == ["/a1/raftmeta/v1/vector", "/b1/raftmeta/v1/vector"]
    del stub.routes["GET", "/b1/raftmeta/v1/vector"]
    stub.requests.clear()
    assert run(stub) == 0
    assert asked_of_nodes(stub) == ["/a1/raftmeta/v1/vector", "/b1/raftmeta/v1/vector", "/b1/raftmeta/v1/vector/search"]


def test_a_deep_check_asks_for_digests_too(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub, "--deep", "--json") == 0
    seen = json.loads(capsys.readouterr().out)["deployments"][0]
    assert [node["sha256_equal"] for node in seen["nodes"]] == [True, True] and seen["limits"]["deep"] is True


def test_a_quorum_is_kept_to_and_stated(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.nodes_by_name["a1"].fault = AgentFault("starting", "because")
    assert run(stub, "--quorum", "majority") == 2, "of one node that is all"
    fleet.declare(DEPLOYMENT, ("a1", "b1"), None, version="v1", order_revision=5, activated_revision=6)
    assert run(stub, "--quorum", "1") == 0
    assert "CONSISTENT FOR 1 OF 2 NODES" in capsys.readouterr().out
    assert [verdict for _, verdict, _ in fleet.recorded] == ["incomplete", "incomplete"]


def test_a_reading_that_is_older_than_allowed_is_not_taken(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.nodes_by_name["b1"].age_ms = 61_000
    assert run(stub, "--max-age", "60") == 2
    assert "not looked at: b1 (too_old)" in capsys.readouterr().out
    assert run(stub, "--max-age", "120") == 0
    assert "61 s ago  120 s ago" in capsys.readouterr().out
    assert run(stub) == 2


def test_reports_are_written_beside_what_is_printed(
    stub: StubServer, fleet: FakeFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, suite = tmp_path / "check.prom", tmp_path / "check.xml"
    words = ("--prometheus", str(page), "--junit", str(suite))
    assert run(stub, *words) == 0
    assert 'raftmeta_check_verdict{deployment="search",verdict="consistent"} 1' in page.read_text()
    assert '<testcase classname="search" name="a1" />' in suite.read_text()
    stub.routes["GET", "/v1/deployments"] = always(problem("forbidden"))
    assert run(stub, *words) == 2
    assert "raftmeta_check_exit_status 2" in page.read_text() and "forbidden" in suite.read_text()
    assert run(stub, "--prometheus", str(tmp_path / "no" / "x.prom")) == 3


def test_a_second_run_ends_at_once_and_says_who_is_there(stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "check.lock"
    with lock.held(path):
        assert run(stub, "--lock", str(path)) == 2
        assert f"INCOMPLETE: another check runs (process {os.getpid()}, since " in capsys.readouterr().out
        assert run(stub, "--lock", str(path), "--json") == 2
        seen = json.loads(capsys.readouterr().out)
        assert (seen["verdict"], seen["error"]["code"]) == ("incomplete", "check_running")
        assert stub.requests == []
        assert run(stub) == 0, "another lock"
    with lock.held(lock.path_for(tmp_path / "raftmeta", [stub.url])):
        assert run(stub) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_repeated_check_tells_changes_and_ends_with_the_last_status(
    stub: StubServer, fleet: FakeFleet, tmp_path: Path, number: signal.Signals
) -> None:
    words = [sys.executable, "-m", "raftmeta.cli.main", "check", "--url", stub.url, "--watch", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert process.stdout is not None
    with process.stdout as out:
        assert "CONSISTENT  search" in out.readline()
        fleet.nodes_by_name["b1"].damage("norm", 0)
        assert "DIVERGED    search" in out.readline()
        while "differs: (block) node b1" not in out.readline():
            pass
        process.send_signal(number)
        assert process.wait(30) == 1
    assert {verdict for _, verdict, _ in fleet.recorded} == {"consistent", "diverged"}


def test_a_killed_check_records_nothing_wrong_and_keeps_nobody_out(stub: StubServer, fleet: FakeFleet, tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hold(question: str) -> None:
        asked.set()
        go_on.wait(30)

    fleet.nodes_by_name["b1"].before_answer = hold
    words = [sys.executable, "-m", "raftmeta.cli.main", "check", "--url", stub.url]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert asked.wait(30)
    assert run(stub) == 2, "it is running"
    process.kill()
    process.wait(30)
    go_on.set()
    assert fleet.recorded == []
    fleet.nodes_by_name["b1"].before_answer = lambda question: None
    assert run(stub) == 0


def test_a_large_report_arrives_whole_at_a_slow_reader(stub: StubServer, fleet: FakeFleet, tmp_path: Path) -> None:
    """A faster event loop was tried here, after whose end this process wrote only the first pages of what a pipe does not take at once."""
    for number in range(250):
        fleet.declare(f"d{number:03d}", ("a1",), ("b1",), version="v1", order_revision=5, activated_revision=6)
    for node in fleet.nodes_by_name.values():
        node.active_models = 251
    words = [sys.executable, "-m", "raftmeta.cli.main", "check", "--url", stub.url, "--no-record", "--json"]
    for _ in range(4):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)})
        assert process.stdout is not None
        with process.stdout as out:
            select.select([out], [], [], 120)  # it has begun to write, and soon finds the pipe full
            output = out.read()
        assert process.wait(120) == 0
        assert len(output) > 300_000 and len(json.loads(output)["deployments"]) == 251


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--watch"], ["--watch", "60"]),
        (["--watch", "5.5"], ["--watch", "5.5"]),
        (["--watch", "--json"], ["--watch", "60", "--json"]),
        (["search", "--watch"], ["search", "--watch", "60"]),
        (["--watch", "search"], ["--watch", "60", "search"]),
        (["--watch=5", "search"], ["--watch=5", "search"]),
    ],
)
def test_watch_takes_seconds_or_none(words: list[str], meant: list[str]) -> None:
    assert with_seconds(words) == meant


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
    stub.routes["POST", "/v1/consistency:batch"] = always(problem("forbidden", "the role reader may not record"))
    assert run(stub) == 0
    assert "not recorded: search: forbidden: the role reader may not record" in capsys.readouterr().out


def test_several_deployments_end_with_a_summary_and_the_worst_verdict(
    stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.declare("another", ("a1",), None)
    assert run(stub, "--deployment", "another", "--deployment", "search") == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["INCOMPLETE", "another"], ["CONSISTENT", "search"]]


def test_a_deployment_that_serves_nothing_yet_is_left_out_of_all_and_named(
    stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.declare("serach", ("node-that-never-was",), None)
    assert run(stub, "--all") == 0
    assert capsys.readouterr().out.endswith("left out, nothing was activated yet: serach\n")
    assert run(stub, "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nothing_active"] == ["serach"]
    del fleet.deployments["search"]
    assert run(stub, "--all") == 2
    told = capsys.readouterr().out
    assert "no deployment serves anything, so nothing was compared" in told and "left out" in told


def test_without_any_deployment_nothing_was_proved(stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.deployments.clear()
    assert run(stub) == 2
    assert "no deployment is declared" in capsys.readouterr().out


WRONG = [["--quorum", "0"], ["--quorum", "most"], ["--quorum", "-1"], ["--max-age", "-1"], ["--watch", "0"], ["--lock", "/no/such/file"]]


@pytest.mark.parametrize("words", [["seach"], ["--deployment", "seach"], ["search", "--all"], ["--node-timeout", "0"], ["--lag"], *WRONG])
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
