"""What `raftmeta check` leaves behind when a node means harm, when the program has a defect, and when nobody takes its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from consistency import collect
from tests.support.check_stub import run
from tests.support.fake_fleet import DEPLOYMENT, FakeFleet
from tests.support.stub_http import Answer, Route, StubServer, always, problem

DEEP = b'{"x":' + b"[" * 3_000 + b"]" * 3_000 + b"}"
ROOTS = "/{}/raftmeta/v1/vector"


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet(("a1",), ("b1", "b2"))


def said(page: Path) -> str:
    return next(line for line in page.read_text().splitlines() if line.startswith("raftmeta_check_exit_status "))


def test_a_node_with_a_hostile_answer_hides_no_difference_of_another(
    stub: StubServer, fleet: FakeFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.routes["GET", ROOTS.format("b1")] = always(Answer(DEEP))
    assert run(stub) == 2
    assert "not looked at: b1 (bad_answer)" in capsys.readouterr().out
    fleet.nodes_by_name["b2"].damage("norm", 0)
    page = tmp_path / "check.prom"
    assert run(stub, "--prometheus", str(page)) == 1
    assert said(page).endswith(" 1")
    assert [verdict for _, verdict, _ in fleet.recorded] == ["incomplete", "diverged"]


def test_a_side_whose_lag_nobody_can_count_is_not_consistent(
    stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in fleet.nodes_by_name.values():
        node.lag_ms = 1e308
    assert run(stub, "--json") == 2
    out = capsys.readouterr().out
    assert "Infinity" not in out and "NaN" not in out and json.loads(out)["not_recorded"] == []


@pytest.mark.parametrize("limit", ["inf", "nan"])
def test_a_limit_that_nothing_exceeds_is_refused(stub: StubServer, limit: str) -> None:
    assert run(stub, "--lag-limit", limit) == 3
    assert stub.requests == []


def test_a_defect_of_the_program_is_told_in_every_report(
    stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, suite = tmp_path / "check.prom", tmp_path / "check.xml"
    words = ("--prometheus", str(page), "--junit", str(suite))
    assert run(stub, *words) == 0 and said(page).endswith(" 0")

    def defect(*_: object) -> None:
        raise ZeroDivisionError("because\x1b[2J")

    monkeypatch.setattr(collect.compare, "compare", defect)
    capsys.readouterr()
    assert run(stub, *words) == 2
    captured = capsys.readouterr()
    assert "INCOMPLETE: ZeroDivisionError: because" in captured.out and "Traceback" in captured.err
    assert "\x1b" not in captured.out + captured.err
    assert said(page).endswith(" 2") and "ZeroDivisionError" in suite.read_text()


def test_a_deployment_that_is_not_there_any_more_leaves_no_page_that_says_all_is_well(stub: StubServer, tmp_path: Path) -> None:
    page = tmp_path / "check.prom"
    assert run(stub, DEPLOYMENT, "--prometheus", str(page)) == 0
    stub.routes["GET", "/v1/deployments"] = always(Answer({"items": [], "next": None}))
    assert run(stub, DEPLOYMENT, "--prometheus", str(page)) == 3
    assert said(page).endswith(" 2")


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/nodes", {"items": None}),
        ("/v1/deployments", {"next": None}),
        ("/v1/deployments", {"items": [1]}),
    ],
)
def test_members_that_answer_in_another_form_leave_it_incomplete(
    stub: StubServer, path: str, answer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.routes["GET", path] = always(Answer(answer))
    assert run(stub) == 2
    captured = capsys.readouterr()
    assert "INCOMPLETE: the member's answer is not" in captured.out and "Traceback" not in captured.err


def test_a_refusal_of_members_is_no_wrong_command_line(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    stub.routes["GET", "/v1/deployments"] = always(problem("unknown_deployment", "\x1b]0;owned\x07"))
    assert run(stub) == 2
    captured = capsys.readouterr()
    assert "unknown_deployment" in captured.out and "\x1b" not in captured.out + captured.err


def test_what_nodes_say_reaches_a_terminal_without_control_characters(
    stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.nodes_by_name["b1"].version = "v\x9b31m\x7f"
    assert run(stub, "--json") == 1
    out = capsys.readouterr().out
    assert not {"\x9b", "\x7f"} & set(out)
    assert json.loads(out)["deployments"][0]["nodes"][1]["version"] == "v\x9b31m\x7f"
    assert run(stub) == 1
    assert not {"\x9b", "\x7f"} & set(capsys.readouterr().out)


def test_reports_and_the_lock_do_not_share_a_file(stub: StubServer, tmp_path: Path) -> None:
    one = tmp_path / "one"
    assert run(stub, "--lock", str(one), "--junit", str(one)) == 3
    assert run(stub, "--junit", str(one), "--prometheus", str(tmp_path / "." / "one")) == 3
    assert not one.exists() and stub.requests == []


def piped(stub: StubServer, out: int, *words: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "raftmeta.cli.main", "check", "--url", stub.url, *words],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return done.returncode, [line for line in done.stderr.splitlines() if "could not be printed" in line or "Traceback" in line]


@pytest.mark.parametrize("words", [(), ("--json",), ("--watch", "1")])
def test_an_outcome_that_nobody_takes_is_no_pass(stub: StubServer, fleet: FakeFleet, words: tuple[str, ...]) -> None:
    told = {}
    for sink in ("closed pipe", "full disk"):
        read_end, out = os.pipe() if sink == "closed pipe" else (os.open("/dev/null", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
        os.close(read_end)
        told[sink] = piped(stub, out, *words)
        os.close(out)
    assert told == {
        "closed pipe": (2, ["error: the outcome (consistent) could not be printed: Broken pipe"]),
        "full disk": (2, ["error: the outcome (consistent) could not be printed: No space left on device"]),
    }
    with open("/dev/full", "wb") as full:
        fleet.nodes_by_name["b1"].damage("norm", 0)
        assert piped(stub, full.fileno(), *words)[0] == 1, "the difference was seen"


def test_the_time_in_which_the_process_stood_still_before_an_answer_counts(
    stub: StubServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ("GET", ROOTS.format("b1"))
    inner: Route = stub.routes[path]

    def slow(body: Any, query: dict[str, str]) -> Answer:
        given = inner(body, query)
        threading.Event().wait(0.3)  # it was answered; the answer arrives now
        return given

    stub.routes[path] = slow
    assert run(stub, "--json") == 0
    made = json.loads(capsys.readouterr().out)["deployments"][0]
    assert made["oldest_answer_ms"] >= 290 and made["oldest_proof_ms"] >= 300
