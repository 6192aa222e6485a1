"""Evidence over the API: recorded by agents, shown with who is silent, watched like any other record."""

from __future__ import annotations

from typing import Any

from api.schemas import examples
from tests.unit.api.harness import Api, Exchange, api, run

DIGEST = "ab" * 32


def said(**changes: Any) -> dict[str, Any]:
    body = {"deployment": "search", "generation": 0, "order_revision": 0, "boot_id": "boot-1", "told_ms": 1_000}
    return body | {"version": "1.0.0", "checksum": DIGEST, "vector_root": DIGEST, "verified_age_ms": 40} | changes


async def record(made: Api, node: str, **changes: Any) -> tuple[int, str]:
    response = await made.client.post(f"/v1/nodes/{node}/evidence", json=said(**changes))
    return response.status_code, response.json().get("code", "")


async def beat(made: Api, node: str, boot: str = "boot-1") -> None:
    body = {**examples.HEARTBEAT_BODY, "node": node, "boot_id": boot, "slots": [], "deployments": {}}
    assert (await made.client.post(f"/v1/nodes/{node}/heartbeat", json=body)).status_code == 200


async def nodes(made: Api) -> dict[str, Any]:
    response = await made.client.get("/v1/deployments/search/evidence")
    assert response.status_code == 200
    return {node["node"]: node for node in response.json()["nodes"]}


def test_what_a_node_said_is_current_while_it_is_heard_and_silent_after_that() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            assert await record(made, "n1") == (200, "")
            assert (await nodes(made))["n1"]["standing"] == "silent"
            await beat(made, "n1")
            shown = (await nodes(made))["n1"]
            assert (shown["standing"], shown["evidence"]["checksum"], shown["evidence"]["told_ms"]) == ("current", DIGEST, 1_000)
            made.member.monotonic_ms += 60_000
            made.member.log.now_ms += 60_000
            shown = (await nodes(made))["n1"]
            assert (shown["standing"], shown["serves_decided"], shown["heard_age_ms"]) == ("silent", False, 60_000)
            assert (shown["evidence"]["version"], shown["evidence"]["age_ms"]) == ("1.0.0", 60_000)

    run(work())


def test_what_cannot_be_is_refused_with_its_code() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            assert await record(made, "n1", deployment="other") == (404, "unknown_deployment")
            assert await record(made, "n9") == (404, "unknown_node")
            assert await record(made, "n1", checksum="x") == (422, "bad_field")
            assert await record(made, "n1", finding="Some words") == (422, "bad_field")
            assert await record(made, "n1", more=1) == (422, "bad_field")
            assert await record(made, "n1") == (200, "")
            assert await record(made, "n1", told_ms=999) == (409, "stale_evidence")
            missing = await made.client.get("/v1/deployments/other/evidence")
            assert (missing.status_code, missing.json()["code"]) == (404, "unknown_deployment")

    run(work())


def test_evidence_can_be_watched() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            async with Exchange(made.application, "/v1/watch", "resource=evidence") as exchange:
                await exchange.until(lambda seen: seen.status == 200)
                await record(made, "n1", version="", checksum="", vector_root="", finding="integrity_mismatch")
                await exchange.until(lambda seen: b"integrity_mismatch" in seen.body)

    run(work())
