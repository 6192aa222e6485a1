"""`raftmeta failover` against a scripted member: what it decides, and what it says when something speaks against it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raftmeta.cli.exits import Exit
from raftmeta.cli.failover import hints_for
from raftmeta.core.failover import CODES, OF_THE_VERDICT
from tests.support.command_line import run
from tests.support.stub_http import Answer, StubServer, always, problem

SILENT_NODE = {"code": "node_silent", "detail": "b1: sent no heartbeat", "nodes": ["b1"], "yields": False}
OLD_VERDICT = {"code": "verdict_too_old", "detail": "the last verdict is 400000 ms old", "nodes": [], "yields": True}


def preview(*reasons: dict[str, Any]) -> dict[str, Any]:
    sides = {"deployment": "search", "version": "2.0.0", "serving_side": "primary", "to": "standby"}
    forced = [reason for reason in reasons if not reason["yields"]]
    return sides | {"allowed": not reasons, "allowed_with_force": not forced, "reasons": list(reasons)}


@pytest.mark.parametrize(
    ("reasons", "words", "code", "line"),
    [
        ((), ("--dry-run",), Exit.OK, "search 2.0.0: primary -> standby would be decided; nothing was changed"),
        ((SILENT_NODE,), ("--dry-run",), Exit.NO, "search 2.0.0: primary -> standby would be refused, nothing was changed"),
        (
            (OLD_VERDICT,),
            ("--dry-run",),
            Exit.NO,
            "hint:  `raftmeta check search` compares the sides and says what differs; repeat this once it is consistent",
        ),
        ((OLD_VERDICT,), ("--dry-run", "--force"), Exit.OK, "would be decided"),
        ((OLD_VERDICT, SILENT_NODE), ("--dry-run", "--force"), Exit.NO, "would be refused, nothing was changed"),
    ],
)
def test_a_dry_run_of_a_failover_lists_what_speaks_against_it_and_decides_nothing(
    member: StubServer, capsys: pytest.CaptureFixture[str], reasons: Any, words: Any, code: Exit, line: str
) -> None:
    member.routes["GET", "/v1/deployments/search/failover"] = always(Answer(preview(*reasons)))
    assert run(member, "failover", "search", "--to", "standby", *words) == code
    out = capsys.readouterr().out
    assert line in out and all(reason["code"] in out and reason["detail"] in out for reason in reasons)
    assert all(method == "GET" for method, _, _, _ in member.requests)


def test_a_failover_is_decided_against_the_side_that_was_seen(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["GET", "/v1/deployments/search/failover"] = always(Answer(preview()))
    decided = {"serving_side": "standby", "order_revision": 60, "overridden": [], "revision": 60}
    member.routes["POST", "/v1/deployments/search/failover"] = always(Answer(decided))
    assert run(member, "failover", "search", "--to", "standby", "--max-verdict-age", "90") == Exit.OK
    body = member.requests[-1][2]
    assert body == {"to": "standby", "expected_serving_side": "primary", "max_verdict_age_ms": 90_000, "force": False}
    assert "decided at revision 60; the standby side takes requests" in capsys.readouterr().out
    assert run(member, "failover", "search", "--back", "--json") == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert (shown["decided"], shown["dry_run"], shown["reasons"]) == (decided, False, [])


def test_a_refused_failover_ends_with_1_and_lists_why(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["GET", "/v1/deployments/search/failover"] = always(Answer(preview(SILENT_NODE)))
    member.routes["POST", "/v1/deployments/search/failover"] = always(problem("failover_refused", "node_silent: b1"))
    assert run(member, "failover", "search", "--to", "standby") == Exit.NO
    assert "b1: sent no heartbeat" in capsys.readouterr().out
    member.routes["GET", "/v1/deployments/search/failover"] = always(Answer(preview()))
    assert run(member, "failover", "search", "--to", "standby") == Exit.NO, "it changed after it was looked at"
    assert "node_silent: b1" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--to", "standby", "--back"), ("--to", "left")])
def test_a_failover_says_which_side(member: StubServer, words: Any) -> None:
    assert run(member, "failover", "search", *words) == Exit.USAGE
    assert member.requests == []


def against(*codes: str) -> tuple[dict[str, Any], ...]:
    return tuple({"code": code, "detail": f"about {code}", "nodes": [], "yields": code in OF_THE_VERDICT} for code in codes)


def test_what_speaks_against_a_failover_reads_as_such_and_each_has_a_hint(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["GET", "/v1/deployments/search/failover"] = always(Answer(preview(*against("side_serves_already", "verdict_missing"))))
    assert run(member, "failover", "search", "--to", "standby", "--dry-run", "--force") == Exit.NO
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "would be refused because:" and lines[2].split() == ["side_serves_already", "about", "side_serves_already"]
    assert lines[3] == "overridden by --force:" and lines[5].startswith("  verdict_missing")
    assert lines[-1] == "hint:  nothing to do: that side takes the requests already"
    assert run(member, "failover", "search", "--to", "standby", "--dry-run", "--json") == Exit.NO
    assert len(json.loads(capsys.readouterr().out)["hints"]) == 2


@pytest.mark.parametrize("code", CODES)
def test_everything_that_can_speak_against_a_failover_has_a_hint_of_its_own(code: str) -> None:
    (hint,) = hints_for([code], "search")
    assert "NAME" not in hint and hint != hints_for(["of a later build"], "search")[0]


def test_while_a_node_is_silent_nobody_is_sent_to_a_check_that_cannot_be_consistent(
    member: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    member.routes["GET", "/v1/deployments/search/failover"] = always(Answer(preview(*against("verdict_not_consistent"))))
    nodes = [{"node": "a1", "standing": "silent"}, {"node": "b1", "standing": "current"}]
    member.routes["GET", "/v1/deployments/search/evidence"] = always(Answer({"nodes": nodes}))
    assert run(member, "failover", "search", "--to", "standby", "--dry-run") == Exit.NO
    (hint,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint:")]
    assert "a1 is silent" in hint and "--force goes without a verdict" in hint and "`raftmeta deploy search" in hint
    assert "b1" not in hint and "`raftmeta check" not in hint
