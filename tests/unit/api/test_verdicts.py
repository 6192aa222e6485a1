"""Verdicts over the API: what they were computed for comes beside the report or in it, and who asks for a history gets it in order."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from api.routes.verdicts import MAX_BATCH_KEY, summary_of
from api.schemas.bodies import MAX_BATCH, MAX_REPORT_BYTES
from raftmeta.core.commands import Body, RaiseFeatureLevel
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import MAX_ANSWER_AGE_MS, Outcome
from raftmeta.log.ticket import Ticket
from tests.support.fake_log import FakeLog, FakeMember
from tests.unit.api.harness import DEPLOYMENT, Api, api, basis, run

FOUND = {"code": "block", "node": "n2", "tensor": "encoder.weight", "block": 17, "detail": ""}


async def post(made: Api, **body: Any) -> httpx.Response:
    return await made.client.post("/v1/consistency", json={"deployment": "search", "verdict": "incomplete", "report": {}} | body)


async def since(made: Api, query: str = "since=0") -> dict[str, Any]:
    response = await made.client.get(f"/v1/consistency?{query}")
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()
    return shown


def test_a_report_that_says_what_it_is_of_needs_no_basis_beside_it() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            seen = basis(made.member)
            report = {**seen, "nodes_seen": 1, "oldest_answer_ms": 5_000, "findings_total": 2, "findings": [FOUND, FOUND]}
            assert (await post(made, verdict="diverged", report=report)).status_code == 200
            (item,) = (await since(made))["items"]
            assert item["basis"] == seen | {"node_count": 1, "age_ms": 5_000}
            assert item["summary"] == "2 findings; 1 nodes seen; block n2 encoder.weight block 17"

    run(work())


@pytest.mark.parametrize(
    "report",
    [{}, {"generation": 0}, {"generation": True}, {"generation": -1}, {"version": 1}, {"started_revision": 1 << 60}, {"nodes_seen": 1.0}],
)
def test_a_verdict_that_does_not_say_all_that_it_is_of_is_refused(report: dict[str, Any]) -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            whole = basis(made.member) | {"nodes_seen": 2}
            sent = whole | report if report else {}
            if report == {"generation": 0}:
                del sent["version"]
            refused = await post(made, report=sent)
            assert (refused.status_code, refused.json()["code"]) == (422, "bad_field")
            assert "what it was computed for" in refused.json()["detail"]

    run(work())


@pytest.mark.parametrize("age", [MAX_ANSWER_AGE_MS + 1, 10**12, 10**30, -1, True, 5.0, "5", [5]])
@pytest.mark.parametrize("name", ["oldest_proof_ms", "oldest_answer_ms"])
def test_an_age_in_a_report_is_refused_like_one_in_a_basis(name: str, age: Any) -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            seen = basis(made.member)
            beside = await post(made, basis=seen | {"age_ms": age})
            refused = await post(made, report=seen | {"nodes_seen": 1, "oldest_proof_ms": 5, "oldest_answer_ms": 5, name: age})
            assert {response.status_code for response in (beside, refused)} <= {400, 422} and refused.json()["code"] == "bad_field"
            assert not (await since(made))["items"]

    run(work())


@pytest.mark.parametrize(
    ("told", "age_ms"),
    [
        ({}, 0),
        ({"oldest_answer_ms": None, "oldest_proof_ms": None}, 0),
        ({"oldest_answer_ms": 7}, 7),
        ({"oldest_answer_ms": 7, "oldest_proof_ms": 3_600_007}, 3_600_007),
        ({"oldest_answer_ms": 7, "oldest_proof_ms": MAX_ANSWER_AGE_MS}, MAX_ANSWER_AGE_MS),
    ],
)
def test_the_age_of_a_report_without_a_basis_is_that_of_its_oldest_reading(told: dict[str, Any], age_ms: int) -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            taken = await post(made, report=basis(made.member) | {"nodes_seen": 0} | told)
            assert taken.status_code == 200, taken.text
            assert (await since(made))["items"][0]["basis"]["age_ms"] == age_ms

    run(work())


def test_a_verdict_of_an_order_that_is_over_is_refused_and_its_repetition_too() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            seen = basis(made.member)
            await made.client.put("/v1/deployments/search", json={**DEPLOYMENT, "standby": None})
            for _ in range(2):
                refused = await made.client.post(
                    "/v1/consistency",
                    json={"deployment": "search", "verdict": "diverged", "report": {}, "basis": seen},
                    headers={"idempotency-key": "check-1"},
                )
                assert (refused.status_code, refused.json()["code"], refused.json()["class"]) == (409, "verdict_outdated", "rejected")
            assert (await since(made))["items"] == []
            nodes = await post(made, verdict="consistent", basis=basis(made.member, node_count=0))
            assert (nodes.status_code, nodes.json()["code"]) == (409, "nodes_not_covered")

    run(work())


def test_a_history_is_read_page_by_page_and_filtered() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            for number in range(5):
                assert (await post(made, basis=basis(made.member), summary=f"number {number}")).status_code == 200
            first = await since(made, "since=0&limit=3&deployment=search")
            assert [item["summary"] for item in first["items"]] == ["number 0", "number 1", "number 2"]
            assert [item["report"] for item in first["items"]] == [None, None, None]
            rest = await since(made, f"since=0&limit=3&after={first['next']}")
            assert [item["summary"] for item in rest["items"]] == ["number 3", "number 4"]
            assert (rest["items"][-1]["report"], rest["next"], rest["dropped_revision"]) == ({}, None, 0)
            assert [item["summary"] for item in (await since(made, "deployment=search"))["items"]] == ["number 4"]
            for query, code in (("since=x", "bad_field"), ("deployment=Bad", "bad_name"), ("since=0&deployment=x", "unknown_deployment")):
                assert (await made.client.get(f"/v1/consistency?{query}")).json()["code"] == code

    run(work())


def test_below_level_two_a_verdict_is_kept_as_before() -> None:
    member = FakeMember()
    member.log.state = member.state = msgspec.structs.replace(member.state, feature_level=1)

    async def work() -> None:
        async with api(member) as made:
            await made.prepared()
            assert (await post(made, basis=basis(member))).status_code == 200
            assert (await post(made)).status_code == 200
            (item,) = (await since(made))["items"]
            assert (item["basis"], item["summary"]) == (None, "")

    run(work())


@pytest.mark.parametrize(
    ("report", "summary"),
    [
        ({}, ""),
        ({"findings_total": 0, "findings": [], "nodes_seen": 4}, "0 findings; 4 nodes seen"),
        ({"reasons": [{"code": "timeout", "node": "n1", "detail": "no answer"}]}, "timeout n1 no answer"),
        ({"findings": "none", "reasons": [3]}, ""),
        ({"findings": [{"code": "x" * 600}]}, "x" * 512),
    ],
)
def test_a_summary_is_made_of_what_a_report_has(report: dict[str, Any], summary: str) -> None:
    assert summary_of(report) == summary


def item(made: Api, deployment: str, verdict: str = "incomplete", **seen: Any) -> dict[str, Any]:
    return {"deployment": deployment, "verdict": verdict, "report": {}, "basis": basis(made.member) | seen}


async def post_batch(made: Api, items: list[dict[str, Any]], key: str = "check-1") -> httpx.Response:
    return await made.client.post("/v1/consistency:batch", json={"items": items}, headers={"idempotency-key": key})


def test_each_verdict_of_a_batch_is_judged_for_itself_and_a_repeated_batch_records_nothing_twice() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            items = [item(made, "search"), item(made, "nowhere"), item(made, "search", order_revision=1), item(made, "search", "diverged")]
            items[3]["basis"]["started_revision"] += 1
            first = await post_batch(made, items)
            assert first.status_code == 200, first.text
            told = first.json()["items"]
            codes = [one.get("code", "ok") for one in told]
            assert codes == ["ok", "unknown_deployment", "verdict_outdated", "ok"]
            assert all(one["detail"] for one in told[1:3]) and "nowhere" in told[1]["detail"]
            assert first.headers["x-raftmeta-revision"] == str(max(one["revision"] for one in told))
            kept = await since(made)
            assert [(one["verdict"], one["revision"]) for one in kept["items"]] == [
                ("incomplete", told[0]["revision"]),
                ("diverged", told[3]["revision"]),
            ]
            again = await post_batch(made, items)
            assert again.json() == first.json() and await since(made) == kept
            other = await post_batch(made, items[3:], "check-2")
            assert other.json()["items"][0].get("code", "ok") == "ok" and len((await since(made))["items"]) == 3

    run(work())


def test_a_batch_that_the_log_cannot_take_is_an_error_as_a_whole_and_is_finished_by_repeating_it() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            items = [item(made, "search"), item(made, "nowhere")]
            made.member.log.switches.unknown = True  # applied, and nobody hears of it
            lost = await post_batch(made, items)
            assert (lost.status_code, lost.json()["code"]) == (503, "unknown_outcome"), lost.text
            made.member.log.switches.unknown = False
            told = (await post_batch(made, items)).json()["items"]
            assert [one.get("code", "ok") for one in told] == ["ok", "unknown_deployment"]
            assert len((await since(made))["items"]) == 1

    run(work())


def test_nothing_of_a_batch_with_a_wrong_item_or_of_somebody_who_may_not_is_recorded() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            good, count = item(made, "search"), len(made.member.log.proposed)
            for items, code in (
                ([], "bad_field"),
                ([good, good | {"verdict": "perhaps"}], "bad_field"),
                ([good, good | {"more": 1}], "bad_field"),
                ([good] * (MAX_BATCH + 1), "bad_field"),
            ):
                refused = await post_batch(made, items)
                assert (refused.status_code, refused.json()["code"]) == (422, code), refused.text
            key = await post_batch(made, [good], "k" * (MAX_BATCH_KEY + 1))
            assert (key.status_code, key.json()["code"]) == (422, "bad_field")
            made.member.authorizer.denied.add(("anonymous", "verdict", "*"))
            denied = await post_batch(made, [good])
            assert (denied.status_code, denied.json()["code"]) == (403, "forbidden")
            assert len(made.member.log.proposed) == count

    run(work())


def test_a_report_that_is_too_long_is_refused_for_itself() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            good = item(made, "search")
            too_long = good | {"report": {"text": "x" * MAX_REPORT_BYTES}}
            told = (await post_batch(made, [too_long, good])).json()["items"]
            assert [one.get("code", "ok") for one in told] == ["bad_field", "ok"] and "the limit is" in told[0]["detail"]
            assert len((await since(made))["items"]) == 1
            alone = await post_batch(made, [too_long], "check-2")
            assert (alone.status_code, alone.json()["items"][0]["code"]) == (200, "bad_field")

    run(work())


@pytest.mark.parametrize(
    ("codes", "answer"),
    [
        (["ok", "overloaded"], "unknown_outcome"),
        (["overloaded", "no_leader"], "unknown_outcome"),
        (["overloaded", "overloaded"], "overloaded"),
        (["disk_full", "disk_full"], "disk_full"),
        (["unknown_outcome", "unknown_outcome"], "unknown_outcome"),
    ],
)
def test_a_batch_of_which_a_part_has_no_answer_is_of_unknown_outcome(codes: list[str], answer: str) -> None:
    class Choosy(FakeLog):
        def propose(self, body: Body, request_id: str, principal: str, timeout_s: float) -> Ticket[Outcome]:
            code = refusals.get(request_id, "ok")
            if code == "ok":
                return super().propose(body, request_id, principal, timeout_s)
            ticket: Ticket[Outcome] = Ticket()
            ticket.set_exception(RaftmetaError(code, "because"))
            return ticket

    refusals: dict[str, str] = {}
    member = FakeMember()
    member.log = Choosy(member._published)

    async def work() -> None:
        async with api(member) as made:
            await made.prepared()
            refusals.update({f"check-1.{at}": code for at, code in enumerate(codes)})
            items = [item(made, "search") for _ in codes]
            lost = await post_batch(made, items)
            assert lost.json()["code"] == answer, lost.text
            assert len((await since(made))["items"]) == codes.count("ok")
            refusals.clear()
            assert [one.get("code", "ok") for one in (await post_batch(made, items)).json()["items"]] == ["ok", "ok"]
            assert len((await since(made))["items"]) == 2

    run(work())


def at_level_one() -> FakeMember:
    member = FakeMember()
    member.log.state = member.state = msgspec.structs.replace(member.state, feature_level=1)
    return member


async def post_under(made: Api, key: str, seen: dict[str, Any], summary: str = "s") -> httpx.Response:
    body = {"deployment": "search", "verdict": "incomplete", "report": {}, "summary": summary, "basis": seen}
    return await made.client.post("/v1/consistency", json=body, headers={"idempotency-key": key})


async def raised(made: Api) -> None:
    assert (await made.client.post("/v1/cluster/feature-level", json={"level": 2})).status_code == 200


def test_a_verdict_that_is_repeated_after_a_raise_of_the_level_has_its_outcome() -> None:
    async def work() -> None:
        async with api(at_level_one()) as made:
            await made.prepared()
            seen = basis(made.member)
            first = await post_under(made, "check-1", seen)
            batch = await post_batch(made, [item(made, "search"), item(made, "nowhere")], "batch-1")
            items = [json.loads(batch.request.content)["items"], batch.json()["items"]]
            await raised(made)
            again = await post_under(made, "check-1", seen)
            assert (again.status_code, again.json(), again.headers["idempotency-replayed"]) == (200, first.json(), "true")
            assert (await post_batch(made, items[0], "batch-1")).json()["items"] == items[1]
            other = await made.client.post(
                "/v1/consistency",
                json={"deployment": "search", "verdict": "diverged", "report": {}, "basis": seen},
                headers={"idempotency-key": "check-1"},
            )
            assert (other.status_code, other.json()["code"]) == (422, "idempotency_reused")

    run(work())


def test_a_member_that_has_not_applied_the_raise_asks_before_it_chooses_the_form() -> None:
    member = at_level_one()

    class Behind(FakeLog):
        def _barrier(self) -> int:
            self.catch_up()
            return super()._barrier()

    member.log = Behind(member._published)
    member.log.state = member.state

    async def work() -> None:
        async with api(member) as made:
            await made.prepared()
            seen = basis(member)
            await raise_unseen(member)
            assert (await post_under(made, "check-1", seen)).status_code == 200
            (kept,) = (await since(made))["items"]
            assert kept["basis"] == seen

    run(work())


async def raise_unseen(member: FakeMember) -> None:
    """The level rises; this member has not applied it yet."""
    member.log.switches.lag = True
    member.log.propose(RaiseFeatureLevel(2), "raise", "root", 1.0)
    assert member.state.feature_level == 1


def test_a_verdict_that_meets_the_raise_on_its_way_is_recorded_and_repeated_as_one() -> None:
    member = at_level_one()

    async def work() -> None:
        async with api(member) as made:
            await made.prepared()
            seen = basis(member)
            barrier, begun = member.log._barrier, []

            def late() -> int:
                """The first barrier is over before the raise."""
                found = barrier()
                if begun:
                    member.log.catch_up()
                else:
                    begun.append(member.log.switches)
                    member.log.switches.lag = True
                    member.log.propose(RaiseFeatureLevel(2), "raise", "root", 1.0)
                return found

            member.log._barrier = late  # type: ignore[method-assign]
            first = await post_under(made, "check-1", seen)
            assert first.status_code == 200, first.text
            again = await post_under(made, "check-1", seen)
            assert (again.status_code, again.json()) == (200, first.json())
            (kept,) = (await since(made))["items"]
            assert kept["basis"] == seen

    run(work())
