"""Fail-over over the API: what speaks against it is told at once, silent nodes included, and a repetition is answered by the log."""

from __future__ import annotations

from typing import Any

import httpx

from api.schemas import examples
from raftmeta.core.rollout import decide
from tests.unit.api.harness import Api, api, basis, run

MINUTE_MS = 60_000


async def beat(made: Api, node: str, boot: str = "boot-1") -> None:
    body = {**examples.HEARTBEAT_BODY, "node": node, "boot_id": boot, "slots": [], "deployments": {}}
    assert (await made.client.post(f"/v1/nodes/{node}/heartbeat", json=body)).status_code == 200


async def say(made: Api, node: str, told_ms: int = 1_000) -> None:
    summary = made.member.state.versions["encoder/1.0.0"].summary
    order = made.member.state.deployments["search"].order_revision
    body = {"deployment": "search", "generation": 0, "order_revision": order, "boot_id": "boot-1", "told_ms": told_ms}
    body |= {"version": "1.0.0", "checksum": summary.checksum, "vector_root": summary.vector_root}
    assert (await made.client.post(f"/v1/nodes/{node}/evidence", json=body)).status_code == 200


async def serve(made: Api) -> None:
    """1.0.0 serves on n1 and n2, both are heard, both said so, and they were found consistent."""
    await made.prepared()
    started = (await made.client.post("/v1/deployments/search/activate", json={"version": "1.0.0"})).json()
    rollout = (await made.client.get(f"/v1/rollouts/{started['rollout_id']}")).json()
    for stage in ("prepared", "ready", "active"):
        for node, side in (("n1", "primary"), ("n2", "standby")):
            body = {"rollout_id": rollout["id"], "side": side, "stage": stage, "boot_id": "boot-1", "checksum": rollout["checksum"]}
            body |= {} if stage == "prepared" else {"vector_root": rollout["vector_root"]}
            assert (await made.client.post(f"/v1/nodes/{node}/attestations", json=body)).status_code == 200
        for command in decide(made.member.state, made.member.log.now_ms, ()):
            made.member.log.propose(command, f"controller-{stage}", "system:controller", 1).result()
    for node in ("n1", "n2"):
        await beat(made, node)
        await say(made, node)
    await found_consistent(made)


async def found_consistent(made: Api) -> None:
    body = {"deployment": "search", "verdict": "consistent", "report": {}, "basis": basis(made.member)}
    assert (await made.client.post("/v1/consistency", json=body)).status_code == 200


async def over(made: Api, key: str = "", **body: Any) -> httpx.Response:
    headers = {"idempotency-key": key} if key else {}
    return await made.client.post("/v1/deployments/search/failover", json={"to": "standby"} | body, headers=headers)


async def preview(made: Api, query: str = "") -> dict[str, Any]:
    response = await made.client.get(f"/v1/deployments/search/failover?{query}")
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()
    return shown


def test_a_failover_and_the_way_back_show_on_the_deployment() -> None:
    async def work() -> None:
        async with api() as made:
            await serve(made)
            assert (await preview(made))["allowed"]
            done = await over(made, expected_serving_side="primary")
            assert (done.status_code, done.json()["serving_side"], done.json()["overridden"]) == (200, "standby", [])
            shown = (await made.client.get("/v1/deployments/search")).json()
            assert (shown["serving_side"], shown["order_revision"]) == ("standby", done.json()["order_revision"])
            assert shown["failover"]["principal"] == "anonymous" and shown["failover"]["forced"] is False
            seen = await preview(made)
            assert (seen["to"], [reason["code"] for reason in seen["reasons"]]) == ("primary", ["verdict_of_another_order"])
            assert (seen["allowed"], seen["allowed_with_force"]) == (False, True)
            for node in ("n1", "n2"):
                await say(made, node, 2_000)
            await found_consistent(made)
            assert (await over(made, to="primary")).status_code == 200

    run(work())


def test_silent_and_restarted_nodes_refuse_it_with_all_else_that_does_and_nothing_is_proposed() -> None:
    async def work() -> None:
        async with api() as made:
            await serve(made)
            made.member.monotonic_ms += MINUTE_MS
            made.member.log.now_ms += 2 * MINUTE_MS
            await beat(made, "n1")
            proposed = len(made.member.log.proposed)
            refused = await over(made, max_verdict_age_ms=MINUTE_MS)
            body = refused.json()
            assert (refused.status_code, body["code"], body["reasons"]) == (409, "failover_refused", ["verdict_too_old", "node_silent"])
            assert "x-raftmeta-judged" not in refused.headers, "an earlier request with its key may have done it"
            assert "n2: sent no heartbeat" in body["detail"] and body["details"][1].startswith("n2")
            assert (await over(made, max_verdict_age_ms=MINUTE_MS, force=True)).json()["reasons"] == ["node_silent"]
            await beat(made, "n2", boot="boot-2")
            assert (await over(made, force=True)).json()["reasons"] == ["node_restarted"]
            assert len(made.member.log.proposed) == proposed
            await beat(made, "n2")
            done = await over(made, max_verdict_age_ms=MINUTE_MS, force=True)
            assert (done.status_code, done.json()["overridden"]) == (200, ["verdict_too_old"])

    run(work())


def test_a_node_that_says_that_it_is_not_ready_refuses_it_before_anything_is_proposed() -> None:
    async def work() -> None:
        async with api() as made:
            await serve(made)
            summary = made.member.state.versions["encoder/1.0.0"].summary
            shown = {"version": "1.0.0", "checksum": summary.checksum, "vector_root": summary.vector_root, "lag_ms": 1}
            body = {**examples.HEARTBEAT_BODY, "node": "n2", "boot_id": "boot-1", "slots": []}
            for ready, codes in ((False, ["node_not_ready"]), (True, [])):
                said = body | {"deployments": {"search": {**shown, "ready": ready}}}
                assert (await made.client.post("/v1/nodes/n2/heartbeat", json=said)).status_code == 200
                seen = await preview(made)
                assert ([reason["code"] for reason in seen["reasons"]], seen["allowed_with_force"]) == (codes, ready)
                if not ready:
                    proposed = len(made.member.log.proposed)
                    assert (await over(made, force=True)).json()["reasons"] == codes
                    assert len(made.member.log.proposed) == proposed
            assert (await over(made)).status_code == 200

    run(work())


def test_a_repetition_is_answered_as_the_first_time_though_its_nodes_are_silent_by_then() -> None:
    async def work() -> None:
        async with api() as made:
            await serve(made)
            first = await over(made, key="over-1")
            made.member.monotonic_ms += MINUTE_MS
            again = await over(made, key="over-1")
            assert (first.status_code, again.status_code) == (200, 200)
            assert again.json() == first.json() and again.headers["idempotency-replayed"] == "true"
            assert (await over(made, key="over-2")).json()["reasons"] == ["side_serves_already", "verdict_of_another_order", "node_silent"]

    run(work())


def test_what_the_log_refuses_has_the_same_shape() -> None:
    async def work() -> None:
        async with api() as made:
            await serve(made)
            await made.client.post("/v1/deployments/search/activate", json={"version": "2.0.0"})
            refused = (await over(made, force=True)).json()
            assert (refused["code"], refused["class"], refused["reasons"]) == ("failover_refused", "rejected", ["rollout_running"])
            assert len(refused["details"]) == 1
            assert (await preview(made))["allowed_with_force"] is False

    run(work())


def test_questions_that_cannot_be_meant_are_refused() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            assert (await over(made, to="both")).json()["code"] == "bad_field"
            assert (await over(made, max_verdict_age_ms=-1)).json()["code"] == "bad_field"
            assert (await made.client.get("/v1/deployments/search/failover?to=left")).json()["code"] == "bad_field"
            assert (await made.client.get("/v1/deployments/x/failover")).json()["code"] == "unknown_deployment"
            unknown = await made.client.post("/v1/deployments/x/failover", json={"to": "standby"})
            assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_deployment")

    run(work())
