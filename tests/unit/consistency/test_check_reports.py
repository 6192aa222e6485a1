"""Reports for machines: JUnit and the textfile page hold what the verdict says, whatever names contain, and are replaced whole."""

from __future__ import annotations

import asyncio
import re
import shutil
import stat
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings

from consistency import files, junit, outcome, textfile
from consistency.agent_answers import AgentFault
from consistency.collect import Checker
from consistency.findings import Limits, Verdict
from consistency.outcome import Changes, Fault, Outcome
from raftmeta.core.errors import RaftmetaError
from tests.support.fake_fleet import FakeAgents, FakeFleet
from tests.unit.consistency.test_report import verdicts as any_verdict


def verdict_of(fleet: FakeFleet, quorum: str = "all") -> Verdict:
    return asyncio.run(Checker(fleet, FakeAgents(fleet), Limits(quorum=quorum), clock=lambda: 0.0).check([]))[0]


def diverged() -> Verdict:
    fleet = FakeFleet(("a1", "a2", "a3"), ("b1", "b2"))
    fleet.nodes_by_name["a2"].fault = AgentFault("timed_out", "because")
    fleet.nodes_by_name["b2"].fault = AgentFault("unreachable", "because")
    fleet.nodes_by_name["b1"].damage("embed.weight", 200_000)
    return verdict_of(fleet, "2")


def cases(made: bytes) -> dict[str, str]:
    """case -> what is wrong with it, "" for nothing"""
    root = ElementTree.fromstring(made)
    return {case.attrib["name"]: next((child.tag for child in case), "") for case in root.iter("testcase")}


def test_a_junit_report_has_a_case_for_each_node_and_one_for_what_concerns_no_single_one() -> None:
    made = junit.document([diverged()], 1.5)
    assert cases(made) == {"search": "failure", "a1": "", "a2": "skipped", "a3": "", "b1": "failure", "b2": "error"}
    suite = ElementTree.fromstring(made).find("testsuite")
    assert suite is not None
    assert {name: suite.attrib[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6",
        "failures": "2",
        "errors": "1",
        "skipped": "1",
    }
    assert b"block embed.weight block 3: expected d18d2e11713662b5:91820cff5e4fc9f2, found" in made
    assert cases(junit.document([verdict_of(FakeFleet())], 0.1)) == {"search": "", "a1": "", "b1": ""}


def test_members_that_cannot_be_asked_are_an_error_in_junit() -> None:
    made = outcome.as_junit(Outcome((), fault=Fault("no_quorum", "nobody <answers>\x00", "wait")))
    assert cases(made) == {"members": "error"}
    assert "no_quorum: nobody &lt;answers&gt;�" in made.decode()


@settings(max_examples=60, deadline=None)
@given(any_verdict)
def test_whatever_names_contain_both_reports_can_be_read_back(made: Verdict) -> None:
    root = ElementTree.fromstring(junit.document([made], 1.0))
    assert len(list(root.iter("testcase"))) == 1 + len(made.nodes)
    page = textfile.page([made], textfile.Run(0, 1.0, 1, 0)).decode()
    for line in page.removesuffix("\n").split("\n"):
        assert re.fullmatch(r'#.*|raftmeta_check_[a-z_]+(\{deployment="([^"\\]|\\.)*"(,verdict="[a-z]+")?\})? [-0-9.e+]+', line), line


PAGE = """\
# HELP raftmeta_check_verdict The verdict of the last check of a deployment: 1 for the one that was given, 0 for the others
# TYPE raftmeta_check_verdict gauge
raftmeta_check_verdict{deployment="search",verdict="consistent"} 0
raftmeta_check_verdict{deployment="search",verdict="diverged"} 1
raftmeta_check_verdict{deployment="search",verdict="incomplete"} 0
# HELP raftmeta_check_findings Differences beyond their limit
# TYPE raftmeta_check_findings gauge
raftmeta_check_findings{deployment="search"} 2
# HELP raftmeta_check_not_looked_at What could not be looked at and keeps the verdict from being consistent
# TYPE raftmeta_check_not_looked_at gauge
raftmeta_check_not_looked_at{deployment="search"} 1
# HELP raftmeta_check_nodes Nodes of the deployment
# TYPE raftmeta_check_nodes gauge
raftmeta_check_nodes{deployment="search"} 5
# HELP raftmeta_check_nodes_seen Nodes whose memory was seen
# TYPE raftmeta_check_nodes_seen gauge
raftmeta_check_nodes_seen{deployment="search"} 3
# HELP raftmeta_check_mismatch_ratio Share of the manifest's tensors that differ on some node
# TYPE raftmeta_check_mismatch_ratio gauge
raftmeta_check_mismatch_ratio{deployment="search"} 0.25
# HELP raftmeta_check_memory_age_seconds Since the oldest reading of a node's memory began, when the verdict was given
# TYPE raftmeta_check_memory_age_seconds gauge
raftmeta_check_memory_age_seconds{deployment="search"} 0.007
# HELP raftmeta_check_duration_seconds How long the last check took
# TYPE raftmeta_check_duration_seconds gauge
raftmeta_check_duration_seconds 1.500
# HELP raftmeta_check_completed_timestamp_seconds When the last check ended
# TYPE raftmeta_check_completed_timestamp_seconds gauge
raftmeta_check_completed_timestamp_seconds 1700000000.123
# HELP raftmeta_check_exit_status Exit status of the last check: 0 consistent, 1 diverged, 2 incomplete
# TYPE raftmeta_check_exit_status gauge
raftmeta_check_exit_status 1
# HELP raftmeta_check_not_recorded Verdicts of the last check that the members did not take
# TYPE raftmeta_check_not_recorded gauge
raftmeta_check_not_recorded 1
"""


def test_the_page_for_the_textfile_collector_is_a_promise() -> None:
    made = Outcome((diverged(),), ("search: because",), 1.5, 1_700_000_000_123)
    assert outcome.as_textfile(made).decode() == PAGE


def test_the_documentation_lists_every_metric_of_the_page() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text("utf-8").splitlines()
    rows = [line for line in documented if line.startswith(f"| `{textfile.PREFIX}")]
    assert rows == [
        f"| `{textfile.PREFIX}{item.name}` | gauge | {'seconds' if item.name.endswith('seconds') else ''} | {item.labels} | {item.help} |"
        for item in textfile.METRICS
    ]


def test_figures_that_are_not_known_are_left_out_and_never_0() -> None:
    fleet = FakeFleet()
    for node in fleet.nodes_by_name.values():
        node.fault = AgentFault("unreachable", "because")
    page = outcome.as_textfile(Outcome((verdict_of(fleet),))).decode()
    assert "mismatch_ratio" not in page and "memory_age" not in page
    assert "raftmeta_check_exit_status 2" in page
    page = outcome.as_textfile(Outcome((), fault=Fault("no_quorum", "because", ""), completed_ms=5_000)).decode()
    assert "raftmeta_check_exit_status 2" in page and "completed_timestamp_seconds 5.000" in page and "{" not in page


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say_about_the_page() -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=PAGE, text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_report_is_replaced_whole_and_anybody_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "raftmeta.prom"
    path.write_text("old")
    with path.open() as reader:
        assert files.replace(path, b"new") == ""
        assert reader.read() == "old", "who reads it meanwhile reads all of the old one"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_leaves_the_old_one_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.mkdir()
    assert "report" in files.replace(path, b"new")
    assert path.is_dir() and list(tmp_path.iterdir()) == [path]
    for wrong in (path, tmp_path / "no" / "x.prom"):
        with pytest.raises(RaftmetaError, match="--junit"):
            files.require_writable(wrong, "--junit")


def test_a_repeated_check_tells_a_verdict_when_it_changes_and_its_report_unless_it_is_consistent() -> None:
    changes, good, bad = Changes(), verdict_of(FakeFleet()), diverged()
    first = changes.text(Outcome((good,), completed_ms=1_700_000_000_000))
    assert first == "2023-11-14 22:13:20Z  CONSISTENT  search  model tiny, version v1 (number 1)  0 findings\n"
    older = msgspec.structs.replace(good, oldest_proof_ms=9_999, lag_ms_primary=50.0, revision=900)
    assert changes.text(Outcome((older,))) == "", "ages, lags and revisions change all the time"
    second = changes.text(Outcome((bad,)))
    assert second.splitlines()[0].startswith("-  DIVERGED") and "differs: (block) node b1" in second
    assert changes.text(Outcome((bad,))) == ""
    assert "CONSISTENT" in changes.text(Outcome((good,)))
    away = Outcome((), fault=Fault("no_quorum", "nobody answers", "wait"))
    assert "INCOMPLETE: nobody answers (no_quorum)" in changes.text(away)
    assert changes.text(away) == ""
    assert "CONSISTENT" in changes.text(Outcome((good,))), "that it is over is told"
    assert "INCOMPLETE" in changes.text(away)
