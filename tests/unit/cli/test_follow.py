"""Following a rollout over members of paper: how long it waits for them, and what it says when nobody comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from raftmeta.cli.exits import Exit, Unfinished, exit_code, hint
from raftmeta.cli.follow import Teller, failure_text, follow
from raftmeta.client import Client, Options, RaftmetaError, Reply
from tests.unit.client.members import Handler, Members, dead, in_turn, ok, problem, run

CALL_S = 5.0  # what one call of these clients may take
STARTED = Reply({"rollout_id": "r1"}, status=202, revision=7, generation=1)


def rollout(status: str) -> Handler:
    record = {"deployment": "search", "from_version": "v1", "to_version": "v2", "phase": "syncing", "status": status, "attestations": []}
    return ok(record, revision=9)


def followed(members: Members, wait_s: float, said: list[str] | None = None) -> Reply:
    teller = Teller([].append if said is None else said.append)

    async def work() -> Reply:
        options = members.options(timeout_s=CALL_S, on_retry=teller.away)
        async with Client([f"http://{host}:1" for host in members.handlers], options=options) as client:
            return await follow(client, STARTED, wait_s, teller.step, members.time.timing())

    answer: Reply = run(work())
    return answer


def test_an_absence_longer_than_a_call_is_waited_out_and_told_once() -> None:
    said: list[str] = []
    away = [dead] * 60
    members = Members({"a": in_turn(rollout("running"), *away, rollout("done")), "b": dead})
    assert followed(members, 900, said)["status"] == "done"
    assert sum(members.time.sleeps) > 4 * CALL_S
    assert [line[:13] for line in said] == ["search v1 -> ", "trying again:", "search v1 -> "]


def test_two_absences_are_told_twice() -> None:
    said: list[str] = []
    step = rollout("running")
    followed(Members({"a": in_turn(step, dead, dead, step, problem("no_leader"), rollout("done"))}), 900, said)
    assert [line[:6] for line in said] == ["search", "trying", "search", "trying", "search"]


@pytest.mark.parametrize("answer", [dead, problem("no_quorum"), problem("too_many_requests"), problem("revision_not_reached")])
def test_members_that_never_come_back_end_it_when_the_time_is_up(answer: Handler) -> None:
    members = Members({"a": in_turn(rollout("running"), answer)})
    with pytest.raises(Unfinished) as raised:
        followed(members, 30)
    assert 28 <= sum(members.time.sleeps) <= 30
    assert "rollout r1 was started and goes on" in raised.value.detail
    assert raised.value.detail.endswith("last seen: search v1 -> v2: syncing")
    assert exit_code(raised.value) == Exit.UNAVAILABLE
    assert hint(raised.value) == raised.value.next_step


def test_a_rollout_that_nobody_ever_showed_is_said_to_be_unseen() -> None:
    with pytest.raises(Unfinished, match="last seen: not seen yet"):
        followed(Members({"a": dead}), 3)


def test_time_that_runs_out_over_a_running_rollout_says_where_it_stands() -> None:
    members = Members({"a": rollout("running")})
    with pytest.raises(Unfinished, match=r"rollout r1 is syncing after 2 s and goes on") as raised:
        followed(members, 2)
    assert "raftmeta status search" in hint(raised.value)


def test_without_any_time_it_looks_once() -> None:
    members = Members({"a": rollout("done")})
    assert followed(members, 0)["status"] == "done"
    assert len(members.requests) == 1


@pytest.mark.parametrize("code", ["unauthenticated", "unknown_rollout"])
def test_a_refusal_is_not_waited_out(code: str) -> None:
    members = Members({"a": in_turn(rollout("running"), problem(code))})
    with pytest.raises(RaftmetaError) as raised:
        followed(members, 900)
    assert raised.value.code == code and len(members.requests) == 2


def test_a_member_that_is_silent_is_said_to_be_silent_and_not_a_type_of_error() -> None:
    async def silent(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(30)
        raise AssertionError("unreachable")

    async def work() -> Any:
        async with Client(["http://a:1"], options=Options(timeout_s=0.05, http=httpx.MockTransport(silent))) as client:
            return await client.get_rollout("r1")

    with pytest.raises(RaftmetaError, match=r"did not answer: nothing came within 0\.05 s"):
        run(work())


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        ("probe_drift: probe 'texts': expected 1", "probe_drift on node-b: probe 'texts': expected 1"),
        ("probe_drift in bind: expected 1", "probe_drift on node-b in bind: expected 1"),
        ("not_quiet in gate: search", "probe_drift on node-b: not_quiet in gate: search"),
        ("probe_drifting", "probe_drift on node-b: probe_drifting"),
        ("", "probe_drift on node-b: no detail"),
    ],
)
def test_a_failure_names_its_code_once(detail: str, text: str) -> None:
    assert failure_text({"failure": {"code": "probe_drift", "node": "node-b", "detail": detail}}) == text
