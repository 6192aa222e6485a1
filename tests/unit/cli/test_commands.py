"""Commands against a scripted member: what is sent, what is printed, which exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raftmeta.cli.exits import Exit
from raftmeta.cli.main import main
from raftmeta.core.types import StageCounters
from tests.support.command_line import run
from tests.support.stub_http import Answer, StubServer, always, problem

COUNTERS = dict.fromkeys(StageCounters.__struct_fields__, 0)


def rollout(phase: str, status: str, **changes: Any) -> dict[str, Any]:
    attestations = [
        {"node": "a1", "side": "primary", "stage": "active", "counters": COUNTERS | {"bytes_fetched": 10, "switch_call_us": 31}},
        {"node": "b1", "side": "standby", "stage": "ready", "counters": COUNTERS},
    ]
    record = {"id": "r1", "deployment": "search", "kind": "activate", "from_version": "v1", "to_version": "v2", "phase": phase}
    record |= {"status": status, "attestations": attestations, "failure": None, "started_ms": 1_000, "ended_ms": 2_500}
    return record | changes


DEPLOYMENT = {
    "name": "search", "model": "minilm", "version": "v1", "previous": "", "rollout_id": "r1",
    "primary": {"zone": "a", "nodes": ["a1"]}, "standby": {"zone": "b", "nodes": ["b1"]},
}  # fmt: skip
NODES = [
    {"node": "a1", "zone": "a", "missing": False, "age_ms": 120, "deployments": {"search": {"version": "v1", "ready": True}}},
    {
        "node": "b1",
        "zone": "b",
        "missing": True,
        "age_ms": 9_000,
        "deployments": {"search": {"version": "v1", "ready": False, "why": "cordoned: \x1b disk"}},
    },
]
CLUSTER = {
    "member_id": "m1", "cluster_id": "c1", "role": "leader", "leader_id": "m1", "term": 3, "commit_index": 9, "revision": 7,
    "generation": 1, "feature_level": 1, "state_hash": "ab" * 32, "journal_bytes": 2_000_000, "sync_ms": 0.4, "fault": "",
    "members": [
        {"id": "m1", "zone": "a", "role": "leader", "match_index": 9, "peer_address": "h:1", "api_url": "http://h:2"},
        {"id": "m2", "zone": "b", "role": "unreachable", "match_index": -1, "peer_address": "h:3", "api_url": "http://h:4"},
    ],
}  # fmt: skip


def cluster_of(*features: int, level: int = 1) -> dict[str, Any]:
    members = [CLUSTER["members"][0] | {"id": f"m{number}", "feature_level": each} for number, each in enumerate(features)]  # type: ignore[index]
    return CLUSTER | {"members": members, "feature_level": level}


def in_turn(*answers: Answer) -> Any:
    left = list(answers)
    return lambda body, query: left.pop(0) if len(left) > 1 else left[0]


def test_deploy_sends_both_sides_sorted(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["PUT", "/v1/deployments/search"] = always(Answer(DEPLOYMENT | {"version": ""}))
    assert run(member, "deploy", "search", "--model", "minilm", "--primary", "a:a2,a1", "--standby", "b:b1") == Exit.OK
    _, _, body, headers = member.requests[0]
    assert body == {"model": "minilm", "primary": {"zone": "a", "nodes": ["a1", "a2"]}, "standby": {"zone": "b", "nodes": ["b1"]}}
    assert len(headers["idempotency-key"]) == 13 + 1 + 16
    assert "next: raftmeta activate search" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--primary", "a:a1", "--standby", "b:b1"), []),
        (("--primary", "a:a1,a2", "--standby", "b:b1,b2"), ["note: no member has heard of a2, b2; no version becomes ready"]),
        (
            ("--primary", "a:a1", "--standby", "a:b1"),
            ["note: nodes that say they are in another zone: b1 (in b,", "note: both"],
        ),
    ],
)
def test_deploy_tells_what_stands_out_about_its_places(
    words: tuple[str, ...], expected: list[str], member: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    member.routes["PUT", "/v1/deployments/search"] = always(Answer(DEPLOYMENT | {"version": ""}))
    member.routes["GET", "/v1/nodes"] = always(Answer({"items": NODES}))
    assert run(member, "deploy", "search", "--model", "minilm", *words) == Exit.OK
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    assert len(told) == len(expected) and all(line.startswith(start) for line, start in zip(told, expected, strict=True)), told


def test_deploy_is_done_also_when_nobody_may_say_whether_its_nodes_are_there(
    member: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    member.routes["PUT", "/v1/deployments/search"] = always(Answer(DEPLOYMENT | {"version": ""}))
    member.routes["GET", "/v1/nodes"] = always(problem("forbidden"))
    assert run(member, "deploy", "search", "--model", "minilm", "--primary", "a:a1") == Exit.OK
    assert "note: whether its nodes are there is not known: forbidden" in capsys.readouterr().out


def test_deploy_sends_what_it_was_given_of_the_policy(member: StubServer) -> None:
    member.routes["PUT", "/v1/deployments/search"] = always(Answer(DEPLOYMENT | {"version": ""}))
    words = ["deploy", "search", "--model", "minilm", "--primary", "a:a1"]
    assert run(member, *words, "--drain-s", "2.5", "--drain-overdue", "cancel") == Exit.OK
    assert run(member, *words, "--drain-overdue", "wait") == Exit.OK
    assert run(member, *words, "--drain-overdue", "kill") == Exit.USAGE
    policies = [body["policy"] for method, _, body, _ in member.requests if method == "PUT"]
    assert policies == [{"drain_timeout_ms": 2500, "drain_overdue": "cancel"}, {"drain_overdue": "wait"}]


def test_activate_follows_to_the_end_and_tells_each_step_once(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["POST", "/v1/deployments/search/activate"] = always(Answer({"rollout_id": "r1", "revision": 7}, 202))
    steps = (rollout("syncing", "running"), rollout("syncing", "running"), rollout("active", "done"))
    member.routes["GET", "/v1/rollouts/r1"] = in_turn(*(Answer(step) for step in steps))
    assert run(member, "activate", "search", "v2", "--expect", "v1") == Exit.OK
    assert member.requests[0][2] == {"version": "v2", "expected_version": "v1"}
    captured = capsys.readouterr()
    assert "search serves v2 on every node after 1.50 s" in captured.out and " 31" in captured.out
    assert captured.err.splitlines() == [
        "search v1 -> v2: syncing (a1 active, b1 ready)",
        "search v1 -> v2: active (a1 active, b1 ready)",
    ]


def test_a_failed_rollout_says_where_and_why_and_ends_with_1(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    failure = {"code": "integrity", "node": "b1", "detail": "vector differs"}
    member.routes["POST", "/v1/deployments/search/rollback"] = always(Answer({"rollout_id": "r1", "revision": 7}, 202))
    member.routes["GET", "/v1/rollouts/r1"] = always(Answer(rollout("syncing", "failed", failure=failure)))
    assert run(member, "rollback", "search") == Exit.NO
    assert "failed: integrity on b1: vector differs; v1 keeps serving" in capsys.readouterr().out


def test_a_rollout_that_takes_longer_than_the_wait_ends_with_2(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["POST", "/v1/deployments/search/activate"] = always(Answer({"rollout_id": "r1", "revision": 7}, 202))
    member.routes["GET", "/v1/rollouts/r1"] = always(Answer(rollout("preparing", "running")))
    assert run(member, "activate", "search", "v2", "--wait-s", "0.05", "--json") == Exit.UNAVAILABLE
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "unknown_outcome" and "goes on" in error["detail"] and "`raftmeta status search`" in error["hint"]


def test_members_that_are_away_for_longer_than_one_call_are_waited_for(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["POST", "/v1/deployments/search/activate"] = always(Answer({"rollout_id": "r1", "revision": 7}, 202))
    away = [problem("no_leader")] * 4
    member.routes["GET", "/v1/rollouts/r1"] = in_turn(Answer(rollout("syncing", "running")), *away, Answer(rollout("active", "done")))
    assert main(["activate", "search", "v2", "--url", member.url, "--timeout", "0.1"]) == Exit.OK
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["search v1 -> v2", "trying again", "search v1 -> v2"]


def test_members_that_never_come_back_end_the_wait_with_2_and_say_that_the_rollout_goes_on(
    member: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    member.routes["POST", "/v1/deployments/search/activate"] = always(Answer({"rollout_id": "r1", "revision": 7}, 202))
    member.routes["GET", "/v1/rollouts/r1"] = in_turn(Answer(rollout("syncing", "running")), problem("no_leader"))
    assert run(member, "activate", "search", "v2", "--wait-s", "0.2") == Exit.UNAVAILABLE
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: rollout r1 was started and goes on; no member could say how it stands: because")
    assert "last seen: search v1 -> v2: syncing" in error and error.endswith("(unknown_outcome)")
    assert "raftmeta cluster status" in hint and "repeat" not in hint


def test_no_wait_returns_at_once_with_the_id(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["POST", "/v1/deployments/search/activate"] = always(Answer({"rollout_id": "r1", "revision": 7}, 202))
    assert run(member, "activate", "search", "v2", "--no-wait", "--json") == Exit.OK
    assert json.loads(capsys.readouterr().out) == {"rollout_id": "r1", "revision": 7}
    assert len(member.requests) == 1


@pytest.mark.parametrize(
    ("code", "exit_code"), [("unknown_version", Exit.USAGE), ("rollout_in_progress", Exit.NO), ("no_leader", Exit.UNAVAILABLE)]
)
def test_a_refusal_prints_error_and_hint(code: str, exit_code: Exit, member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["POST", "/v1/deployments/search/activate"] = always(problem(code))
    assert run(member, "activate", "search", "v9") == exit_code
    lines = capsys.readouterr().err.splitlines()[-2:]
    assert lines[0].startswith("error: because") and lines[0].endswith(f"({code})") and lines[1].startswith("hint:  ")


def test_abort_ends_the_deployments_running_rollout(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["GET", "/v1/deployments/search"] = always(Answer(DEPLOYMENT))
    member.routes["POST", "/v1/rollouts/r1/abort"] = always(Answer({"revision": 8}))
    assert run(member, "abort", "search") == Exit.OK
    assert "r1 aborted" in capsys.readouterr().out


def status_routes(stub: StubServer) -> None:
    stub.routes |= {
        ("GET", "/v1/deployments"): always(Answer({"items": [DEPLOYMENT], "next": None})),
        ("GET", "/v1/deployments/search"): always(Answer(DEPLOYMENT)),
        ("GET", "/v1/rollouts/r1"): always(Answer(rollout("syncing", "running"))),
        ("GET", "/v1/nodes"): always(Answer({"items": NODES, "next": None})),
        ("GET", "/v1/consistency"): always(
            Answer({"items": [{"deployment": "search", "verdict": "consistent", "recorded_ms": 1}], "next": None})
        ),
    }


def test_status_shows_sides_nodes_and_what_is_on_its_way(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    status_routes(member)
    assert run(member, "status") == Exit.OK
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["primary", "a", "a1", "v1", "yes", "120", "ms", "ago"] in rows
    assert ["standby", "b", "b1", "(v1)", "?", "missing"] in rows
    assert "search v1 -> v2: syncing" in out and "consistent at 1970-01-01 00:00:00Z" in out
    assert "  b1: cordoned: \\x1b disk\n" in out and "  a1: " not in out


def test_status_as_json_holds_the_records(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    status_routes(member)
    assert run(member, "status", "search", "--json") == Exit.OK
    seen = json.loads(capsys.readouterr().out)
    assert seen["deployments"] == [DEPLOYMENT] and seen["nodes"] == NODES and seen["revision"] == 7


def test_status_of_an_empty_cluster_says_what_to_do_next(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("deployments", "nodes", "consistency"):
        member.routes["GET", f"/v1/{path}"] = always(Answer({"items": [], "next": None}))
    assert run(member, "status") == Exit.OK
    assert "next: raftmeta publish" in capsys.readouterr().out


def test_versions_lists_numbers_labels_and_sizes(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    version = {"number": 4, "label": "v4", "checksum": "ab" * 32, "size_bytes": 91_000_000, "tensor_count": 104, "published_ms": 0}
    member.routes["GET", "/v1/models/minilm/versions"] = always(Answer({"items": [version | {"principal": "ci"}], "next": None}))
    member.routes["GET", "/v1/models"] = always(
        Answer({"items": [{"name": "minilm", "version_count": 1, "last_number": 4, "created_ms": 0}], "next": None})
    )
    assert run(member, "versions", "minilm") == Exit.OK
    assert capsys.readouterr().out.splitlines()[1].split() == ["4", "v4", "abababababab", "91.0", "MB", "104", "-", "ci"]
    assert run(member, "versions") == Exit.OK
    assert "minilm" in capsys.readouterr().out


def test_cluster_status_is_a_stale_read_and_tells_a_missing_leader_by_its_exit_code(
    member: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, str]] = []

    def route(body: Any, query: dict[str, str]) -> Answer:
        asked.append(query)
        return Answer(CLUSTER if len(asked) == 1 else CLUSTER | {"leader_id": "", "role": "follower"})

    member.routes["GET", "/v1/cluster"] = route
    assert run(member, "cluster", "status") == Exit.OK
    out = capsys.readouterr().out
    assert "leader m1, term 3" in out and "unreachable" in out
    assert run(member, "cluster", "status", "--json") == Exit.UNAVAILABLE
    assert asked == [{"consistency": "stale"}] * 2


def test_watch_prints_one_line_per_record_and_ends_after_count(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    deployed = {"kind": "deployment", "key": "search", "op": "put", "value": {"version": "v2\u001b[2J", "previous": "v1"}}
    gone = {"kind": "version", "key": "minilm/v0", "op": "delete", "value": None}
    stream = "".join(
        f"event: change\ndata: {json.dumps({'revision': revision, 'events': [event]})}\n\n"
        for revision, event in ((8, deployed), (9, gone))
    )
    member.routes["GET", "/v1/watch"] = always(Answer(stream.encode(), content_type="text/event-stream"))
    assert run(member, "watch", "--from", "7", "--count", "2") == Exit.OK
    assert capsys.readouterr().out.splitlines() == [
        "       8  deployment search  version=v2\\x1b[2J previous=v1",
        "       9  version    minilm/v0  deleted",
    ]
    assert run(member, "watch", "--from", "7", "--count", "1", "--json") == Exit.OK
    assert json.loads(capsys.readouterr().out)["events"] == [deployed]


def test_a_watch_that_starts_too_early_says_so(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["GET", "/v1/watch"] = always(problem("compacted"))
    assert run(member, "watch", "--from", "1") == Exit.NO
    assert "leave --from away" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seen", "words", "sent"),
    [
        (cluster_of(3, 2, 3), (), [2]),
        (cluster_of(3, 3, 3), (), [2, 3]),
        (cluster_of(2, 2, 2), ("2",), [2]),
        (cluster_of(2, 0, 2), (), [2]),  # the member says who is away
        (cluster_of(2, 2, 2, level=2), (), [2]),
    ],
)
def test_raise_level_goes_up_one_by_one_to_what_all_can_run(member: StubServer, seen: dict[str, Any], words: Any, sent: list[int]) -> None:
    member.routes["GET", "/v1/cluster"] = always(Answer(seen))
    member.routes["POST", "/v1/cluster/feature-level"] = lambda body, query: Answer({"feature_level": body["level"], "revision": 9})
    assert run(member, "cluster", "raise-level", *words) == Exit.OK
    assert [body["level"] for method, _, body, _ in member.requests if method == "POST"] == sent


def test_a_level_that_cannot_be_raised_ends_with_1_and_names_the_member(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["GET", "/v1/cluster"] = always(Answer(cluster_of(2, 1)))
    member.routes["POST", "/v1/cluster/feature-level"] = always(problem("feature_level_unsupported", "m1 (up to 1)"))
    assert run(member, "cluster", "raise-level", "2") == Exit.NO
    assert "m1 (up to 1)" in capsys.readouterr().err


def proof(node: str, side: str, standing: str, *, proven: bool = True, **said: Any) -> dict[str, Any]:
    evidence = {"generation": 1, "order_revision": 9, "version": "2.0.0", "checksum": "ab" * 32, "vector_root": "cd" * 32}
    evidence |= {"vector_from": "memory", "finding": "", "age_ms": 4_000, "verified_age_ms": 1_000, **said}
    place = {"node": node, "side": side, "zone": side[0], "standing": standing, "heard_age_ms": 300}
    return place | {"serves_decided": proven, "knows_order": proven, "evidence": evidence}


def proven_by(*nodes: dict[str, Any]) -> dict[str, Any]:
    decided = {"deployment": "search", "model": "minilm", "version": "2.0.0", "checksum": "ab" * 32, "vector_root": "cd" * 32}
    return decided | {
        "generation": 1,
        "order_revision": 9,
        "all_serve_decided": all(node["serves_decided"] for node in nodes),
        "nodes": nodes,
    }


NOTHING_SAID = proof("b1", "standby", "unproven", proven=False) | {"evidence": None}
OTHER_BYTES = proof("b1", "standby", "current", proven=False, version="1.0.0", finding="integrity_mismatch", order_revision=4)
SILENT = proof("b1", "standby", "silent", proven=False, age_ms=7_200_000) | {"heard_age_ms": None}


@pytest.mark.parametrize(
    ("second", "code", "line"),
    [
        (proof("b1", "standby", "current"), Exit.OK, "2 of 2 nodes serve what was decided"),
        (OTHER_BYTES, Exit.NO, "1 of 2 nodes serve what was decided; other bytes: b1"),
        (SILENT, Exit.UNAVAILABLE, "1 of 2 nodes serve what was decided; unknown: b1 (silent)"),
        (NOTHING_SAID, Exit.UNAVAILABLE, "1 of 2 nodes serve what was decided; unknown: b1 (unproven)"),
    ],
)
def test_evidence_ends_with_0_only_when_every_node_serves_what_was_decided(
    member: StubServer, capsys: pytest.CaptureFixture[str], second: dict[str, Any], code: Exit, line: str
) -> None:
    seen = proven_by(proof("a1", "primary", "current"), second)
    member.routes["GET", "/v1/deployments/search/evidence"] = always(Answer(seen))
    assert run(member, "evidence", "search") == code
    out = capsys.readouterr().out
    assert line in out and "search is decided to serve minilm 2.0.0, checksum abababababab" in out
    assert run(member, "evidence", "search", "--json") == code
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(seen))


def test_evidence_shows_what_a_node_found_and_how_old_a_word_is(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    member.routes["GET", "/v1/deployments/search/evidence"] = always(Answer(proven_by(OTHER_BYTES, SILENT | {"node": "b2"})))
    run(member, "evidence", "search")
    lines = capsys.readouterr().out.splitlines()
    assert "1/4 old" in lines[2] and "cdcdcdcd " in lines[2]
    assert "2 h" in lines[3] and "unknown" in lines[3] and "never" in lines[3]
    assert "b1: its last comparison found integrity_mismatch" in lines


def test_status_says_which_side_takes_requests_after_a_failover(member: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    decided = {"to": "standby", "principal": "on-call", "forced": True, "overridden": ["verdict_too_old"], "decided_ms": 1_764_453_600_000}
    member.routes["GET", "/v1/deployments/search"] = always(Answer(DEPLOYMENT | {"serving_side": "standby", "failover": decided}))
    member.routes["GET", "/v1/rollouts/r1"] = always(Answer(rollout("active", "done")))
    member.routes["GET", "/v1/nodes"] = always(Answer({"items": NODES, "next": None}))
    member.routes["GET", "/v1/consistency"] = always(Answer({"items": [], "next": None}))
    assert run(member, "status", "search") == Exit.OK
    line = "the standby side takes requests, decided by on-call at 2025-11-29 22:00:00Z, forced over verdict_too_old"
    assert line in capsys.readouterr().out
