"""Reports: the text is a golden picture, the JSON a promise, the recorded form fits into the log."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from consistency import report
from consistency.agent_answers import AgentFault
from consistency.collect import Checker
from consistency.findings import Finding, Limits, NodeSummary, Reason, Verdict, worst
from raftmeta.core.handlers.verdicts import MAX_REPORT_BYTES
from tests.support.fake_fleet import FakeAgents, FakeFleet


def verdict_of(fleet: FakeFleet) -> Verdict:
    return asyncio.run(Checker(fleet, FakeAgents(fleet), clock=lambda: 0.0).check([]))[0]


CONSISTENT = """\
search: model tiny, version v1 (number 1)                                                 CONSISTENT
====================================================================================================
checksum 7bfc5b468dbb   vector root c403daaa7e47   revision 812

                   PRIMARY   STANDBY   LIMIT
nodes seen         1 of 1    1 of 1    all
memory read        7 ms ago  7 ms ago  for this check
active models      1         1         as decided
mean version lag   40.0 ms   40.0 ms   200 ms apart
tensors different  0 of 4    0 of 4    0
share of tensors   0.00 %              0.00 %

NODE  SIDE     ZONE  VERSION  SLOT  VECTOR ROOT   MEMORY
a1    primary  a     v1       1     c403daaa7e47  as published
b1    standby  b     v1       1     c403daaa7e47  as published
"""

DIVERGED = """\
search: model tiny, version v1 (number 1)                                                   DIVERGED
====================================================================================================
checksum 7bfc5b468dbb   vector root c403daaa7e47   revision 812

                   PRIMARY   STANDBY   LIMIT
nodes seen         1 of 2    1 of 1    all
memory read        7 ms ago  7 ms ago  for this check
active models      1         1         as decided
mean version lag   40.0 ms   999.0 ms  200 ms apart
tensors different  0 of 4    1 of 4    0
share of tensors   25.00 %             0.00 %

NODE  SIDE     ZONE  VERSION  SLOT  VECTOR ROOT   MEMORY
a1    primary  a     v1       1     c403daaa7e47  as published
a2    primary  a     -        -     -             timed_out
b1    standby  b     v1       1     3012745e3ec8  1 differ

not looked at: a2 (timed_out) http://a2 did not answer within 60 s

differs: (sides) both sides
    expected the same weights on both sides
    found    primary c403daaa7e4701c3d72cd9ea59edb425551bf1fc1fba03472c89f935102f7678; standby
        3012745e3ec824934e9c0f7542aa794338aab0e799ec089dc9ae0333d421c629
    the primary holds what was published, the standby does not
differs: (block) node b1, tensor embed.weight, block 3
    expected d18d2e11713662b5:91820cff5e4fc9f2
    found    e50632728d433535:11820cff5e4fc9f2
    bytes 196608..262144 of the tensor; 1 of its 5 blocks differ
differs: (lag) both sides
    expected sides at most 200 ms apart
    found    primary 40.0 ms, standby 999.0 ms
"""


def diverged_fleet() -> FakeFleet:
    fleet = FakeFleet(("a1", "a2"), ("b1",))
    fleet.nodes_by_name["a2"].fault = AgentFault("timed_out", "http://a2 did not answer within 60 s")
    fleet.nodes_by_name["b1"].damage("embed.weight", 200_000)
    fleet.nodes_by_name["b1"].lag_ms = 999.0
    return fleet


def test_a_consistent_deployment_reads_at_a_glance() -> None:
    assert report.as_text(verdict_of(FakeFleet())) == CONSISTENT


def test_a_diverged_one_names_what_differs_and_what_was_not_looked_at() -> None:
    assert report.as_text(verdict_of(diverged_fleet())) == DIVERGED


def test_a_quorum_is_stated_and_in_the_log_it_is_not_called_consistent() -> None:
    fleet = FakeFleet(("a1", "a2", "a3"), ("b1",))
    fleet.nodes_by_name["a2"].fault = AgentFault("timed_out", "because")
    (made,) = asyncio.run(Checker(fleet, FakeAgents(fleet), Limits(quorum="majority")).check([]))
    text = report.as_text(made)
    assert text.splitlines()[0].endswith("CONSISTENT FOR 3 OF 4 NODES")
    assert "nodes seen         2 of 3" in text and "majority" in text
    assert "unseen, as the quorum allows: a2 (timed_out) because" in text
    assert report.summary(made).endswith("0 findings, 1 unseen")
    recorded = report.for_record(made)
    assert (made.verdict, report.recorded_as(made), recorded["verdict"]) == ("consistent", "incomplete", "incomplete")
    assert (recorded["nodes_seen"], recorded["nodes_total"]) == (3, 4)
    whole = verdict_of(FakeFleet())
    assert (report.recorded_as(whole), report.for_record(whole)) == ("consistent", report.as_json(whole))


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0 ms"), (9_999, "9999 ms"), (10_000, "10 s"), (599_999, "599 s"), (600_000, "10 min"), (36_000_000, "10 h"), (10**9, "277 h")],
)
def test_an_age_is_told_in_a_unit_that_people_read(ms: int, text: str) -> None:
    assert report.duration(ms) == text


def test_a_summary_is_one_line() -> None:
    line = report.summary(verdict_of(diverged_fleet()))
    assert line == "DIVERGED    search  model tiny, version v1 (number 1)  3 findings, 1 not looked at"


def test_the_json_holds_every_field_under_its_name() -> None:
    made = verdict_of(diverged_fleet())
    seen = json.loads(json.dumps(report.as_json(made)))
    assert {"verdict", "models_primary", "models_standby", "lag_ms_primary", "lag_ms_standby", "mismatch_ratio"} <= seen.keys()
    assert (seen["verdict"], seen["mismatch_ratio"], seen["findings_total"]) == ("diverged", 0.25, 3)
    assert seen["findings"][1] == {
        "code": "block",
        "model": "tiny",
        "deployment": "search",
        "node": "b1",
        "expected": "d18d2e11713662b5:91820cff5e4fc9f2",
        "found": "e50632728d433535:11820cff5e4fc9f2",
        "tensor": "embed.weight",
        "block": 3,
        "detail": "bytes 196608..262144 of the tensor; 1 of its 5 blocks differ",
    }
    assert msgspec.convert(seen, Verdict) == made


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], "incomplete"),
        (["consistent"], "consistent"),
        (["consistent", "incomplete"], "incomplete"),
        (["incomplete", "diverged", "consistent"], "diverged"),
    ],
)
def test_the_worst_verdict_of_several_stands_for_all(verdicts: list[str], expected: str) -> None:
    assert worst(verdicts) == expected


texts = st.text(max_size=20) | st.text(st.sampled_from("ab \n\x1b\u202e"), min_size=90, max_size=120)
nodes = st.builds(
    NodeSummary, texts, st.sampled_from(["primary", "standby"]), texts, st.booleans(), version=texts, slot=st.integers(-1, 9),
    vector_root=texts, equal_to_manifest=st.sampled_from([None, True, False]), tensors_different=st.integers(0, 10**6), code=texts,
)  # fmt: skip
findings = st.builds(Finding, st.just("tensor"), texts, texts, texts, texts, texts, texts, st.integers(-1, 10**6), texts)
reasons = st.builds(Reason, texts, texts, texts)
verdicts = st.builds(
    Verdict,
    verdict=st.sampled_from(["consistent", "diverged", "incomplete"]), deployment=texts, model=texts, version=texts,
    number=st.integers(0, 2**63), checksum=texts, vector_root=texts, revision=st.integers(0, 2**63), generation=st.integers(0, 9),
    models_primary=st.none() | st.integers(0, 99), models_standby=st.none() | st.integers(0, 99),
    lag_ms_primary=st.none() | st.floats(0, 1e9), lag_ms_standby=st.none() | st.floats(0, 1e9),
    mismatch_ratio=st.none() | st.floats(0, 1), tensors_total=st.integers(0, 10**6), tensors_different=st.integers(0, 10**6),
    limits=st.just(Limits()), nodes=st.lists(nodes, max_size=4).map(tuple), reasons=st.lists(reasons, max_size=3).map(tuple),
    findings=st.lists(findings, max_size=4).map(tuple), findings_total=st.integers(0, 10**6),
)  # fmt: skip


# A failing verdict is large, and making it smaller would take minutes.
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(verdicts)
def test_whatever_names_contain_the_text_stays_in_its_columns_and_prints_safely(made: Verdict) -> None:
    text = report.as_text(made)
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        assert len(line) <= report.WIDTH
        assert line.isprintable()
    assert report.summary(made).isprintable()


def test_the_recorded_form_fits_into_the_log_and_keeps_the_count() -> None:
    made = verdict_of(diverged_fleet())
    many = tuple(msgspec.structs.replace(made.findings[0], tensor=f"{number}-" + "é\x01" * 500) for number in range(200))
    large = msgspec.structs.replace(made, findings=many, findings_total=5_000)
    recorded = report.for_record(large)
    assert len(json.dumps(recorded)) < MAX_REPORT_BYTES
    assert (recorded["findings_total"], recorded["verdict"]) == (5_000, "diverged")
    assert 0 < len(recorded["findings"]) < 200
    assert report.for_record(made) == report.as_json(made)


def test_a_fleet_too_large_for_the_log_is_recorded_without_its_nodes_and_reasons() -> None:
    made = verdict_of(diverged_fleet())
    large = msgspec.structs.replace(made, nodes=made.nodes * 1_000, reasons=made.reasons * 2_000)
    assert len(json.dumps(report.for_record(large))) < MAX_REPORT_BYTES


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_report_fits_the_terminal_and_keeps_what_it_says(width: int) -> None:
    lines = report.as_text(verdict_of(diverged_fleet()), width).splitlines()
    assert max(map(len, lines)) <= width and lines[1] == "=" * width and lines[0].endswith("DIVERGED")
    assert report.as_text(verdict_of(diverged_fleet()), 1000) == DIVERGED
