"""Verdicts over the API: what they were computed for comes beside the report or in it, and who asks for a history gets it in order."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from api.routes.verdicts import MAX_BATCH_KEY, summary_of
from api.schemas.bodies import MAX_BATCH, MAX_REPORT_BYTES
from tests.support.fake_log import FakeMember
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
            report = {**seen, "nodes_seen": 1, "findings_total": 2, "findings": [FOUND, FOUND]}
            assert (await post(made, verdict="diverged", report=report)).status_code == 200
            (item,) = (await since(made))["items"]
            assert item["basis"] == seen | {"node_count": 1}
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
            too_long = item(made, "search") | {"report": {"text": "x" * MAX_REPORT_BYTES}}
            for items, code in (
                ([], "bad_field"),
                ([good, good | {"verdict": "perhaps"}], "bad_field"),
                ([good, good | {"more": 1}], "bad_field"),
                ([good, too_long], "bad_field"),
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
