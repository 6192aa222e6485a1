"""Every operation over a fake log, with the thin layer and without it: shapes, headers, and what a refusal leaves unchanged."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from api.routes import OPERATIONS
from api.schemas import examples
from raftmeta.core.types import Phase
from tests.unit.api.harness import DEPLOYMENT, JSON, MODEL, PUBLISH, Api, api, basis, manifest, run

Scene = Callable[[Api], Awaitable[None]]
pytestmark = pytest.mark.parametrize("thin", [True, False], ids=["thin", "fastapi"])

STATUS = {**examples.HEARTBEAT_BODY, "node": "n1"}


def play(scene: Scene, thin: bool) -> None:
    async def work() -> None:
        async with api(thin=thin) as made:
            await scene(made)

    run(work())


def problem(reply: httpx.Response, code: str) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = reply.json()
    assert body["code"] == code, body
    assert body["status"] == reply.status_code
    assert body["type"] == f"urn:raftmeta:error:{code}"
    assert body["title"] and body["class"]
    return body


def test_publishing_creates_once_and_then_changes_nothing(thin: bool) -> None:
    async def scene(made: Api) -> None:
        first = await made.publish()
        assert first.status_code == 201
        assert first.headers["x-raftmeta-revision"] == "1"
        again = await made.publish()
        assert (again.status_code, again.headers["x-raftmeta-revision"]) == (200, "2")
        assert again.json() == first.json()
        assert (first.json()["number"], first.json()["published_revision"], first.json()["principal"]) == (1, 1, "anonymous")
        other = await made.publish(number=1)
        problem(other, "version_exists")
        assert other.headers["x-raftmeta-revision"] == "3"

    play(scene, thin)


def test_a_version_reads_back_as_it_was_published(thin: bool) -> None:
    async def scene(made: Api) -> None:
        published = (await made.publish()).json()
        assert (await made.client.get(PUBLISH)).json() == published
        assert (await made.client.get(f"{PUBLISH}/manifest")).json() == manifest()
        assert (await made.client.get(f"{MODEL}/versions")).json() == {"items": [published], "next": None}
        model = (await made.client.get(MODEL)).json()
        assert (model["name"], model["last_number"], model["version_count"]) == ("encoder", 1, 1)
        assert (await made.client.get("/v1/models")).json() == {"items": [model], "next": None}

    play(scene, thin)


def test_a_batch_publishes_all_or_none(thin: bool) -> None:
    async def scene(made: Api) -> None:
        items = [{"label": f"1.{i}", "manifest": manifest(i)} for i in range(3)]
        reply = await made.client.post(f"{MODEL}/versions:batch", json={"items": items})
        assert reply.status_code == 200
        assert [version["label"] for version in reply.json()["versions"]] == ["1.0", "1.1", "1.2"]
        before = made.member.state
        items = [{"label": "1.3", "manifest": manifest(3)}, {"label": "1.0", "manifest": manifest(9)}]
        problem(await made.client.post(f"{MODEL}/versions:batch", json={"items": items}), "version_exists")
        assert made.member.state.versions == before.versions
        items = [{"label": "1.3", "manifest": manifest(3)}, {"label": "1.3", "manifest": manifest(3)}]
        problem(await made.client.post(f"{MODEL}/versions:batch", json={"items": items}), "bad_field")
        problem(await made.client.post(f"{MODEL}/versions:batch", json={"items": []}), "bad_field")

    play(scene, thin)


def test_pages_follow_each_other_without_gap_or_repeat(thin: bool) -> None:
    async def scene(made: Api) -> None:
        for number in range(7):
            await made.publish(f"1.{number}", number)
        seen, after = [], ""
        while True:
            query = {"limit": "3", **({"after": after} if after else {})}
            page = (await made.client.get(f"{MODEL}/versions", params=query)).json()
            seen += [item["number"] for item in page["items"]]
            after = page["next"]
            if after is None:
                break
        assert seen == list(range(1, 8))
        problem(await made.client.get(f"{MODEL}/versions?after=x"), "bad_field")
        problem(await made.client.get(f"{MODEL}/versions?limit=0"), "bad_field")
        problem(await made.client.get(f"{MODEL}/versions?limit=1001"), "bad_field")

    play(scene, thin)


def test_a_version_is_deleted_unless_something_names_it(thin: bool) -> None:
    async def scene(made: Api) -> None:
        await made.prepared()
        reply = await made.client.delete(f"{MODEL}/versions/2.0.0")
        assert reply.json() == {"revision": int(reply.headers["x-raftmeta-revision"])}
        problem(await made.client.get(f"{MODEL}/versions/2.0.0"), "unknown_version")
        await made.client.post("/v1/deployments/search/activate", json={"version": "1.0.0"})
        problem(await made.client.delete(f"{MODEL}/versions/1.0.0"), "in_use")
        assert (await made.client.get(f"{MODEL}/versions/1.0.0")).status_code == 200

    play(scene, thin)


def test_a_deployment_is_declared_and_shows_where_it_stands(thin: bool) -> None:
    async def scene(made: Api) -> None:
        await made.publish()
        shuffled = {**DEPLOYMENT, "primary": {"zone": "zone-a", "nodes": ["n9", "n1"]}}
        reply = await made.client.put("/v1/deployments/search", json=shuffled)
        assert reply.status_code == 200
        shown = reply.json()
        assert (shown["primary"]["nodes"], shown["version"], shown["phase"]) == (["n1", "n9"], "", "idle")
        assert (await made.client.get("/v1/deployments/search")).json() == shown
        assert (await made.client.get("/v1/deployments")).json() == {"items": [shown], "next": None}
        both = {**DEPLOYMENT, "standby": {"zone": "zone-b", "nodes": ["n1"]}}
        problem(await made.client.put("/v1/deployments/search", json=both), "bad_field")
        twice = {**DEPLOYMENT, "primary": {"zone": "zone-b", "nodes": ["n1", "n1"]}}
        problem(await made.client.put("/v1/deployments/search", json=twice), "bad_field")
        problem(await made.client.put("/v1/deployments/other", json={**DEPLOYMENT, "model": "nobody"}), "unknown_model")
        problem(await made.client.get("/v1/deployments/other"), "unknown_deployment")

    play(scene, thin)


def test_a_rollout_starts_once_and_names_the_running_one(thin: bool) -> None:
    async def scene(made: Api) -> None:
        await made.prepared()
        reply = await made.client.post("/v1/deployments/search/activate", json={"version": "1.0.0", "expected_version": ""})
        assert reply.status_code == 202
        rollout_id = reply.json()["rollout_id"]
        assert reply.json()["revision"] == int(reply.headers["x-raftmeta-revision"])
        shown = (await made.client.get(f"/v1/rollouts/{rollout_id}")).json()
        assert (shown["phase"], shown["status"], shown["to_version"], shown["attestations"]) == ("preparing", "running", "1.0.0", [])
        refused = problem(await made.client.post("/v1/deployments/search/activate", json={"version": "2.0.0"}), "rollout_in_progress")
        assert refused["rollout_id"] == rollout_id
        assert (await made.client.get("/v1/deployments/search/rollouts")).json() == {"items": [shown], "next": None}
        assert (await made.client.get("/v1/deployments/search/served")).json()["version"] == ""

    play(scene, thin)


def test_an_unexpected_version_is_refused_with_the_present_one(thin: bool) -> None:
    async def scene(made: Api) -> None:
        await made.prepared()
        reply = await made.client.post("/v1/deployments/search/activate", json={"version": "1.0.0", "expected_version": "0.9"})
        assert problem(reply, "expected_version_mismatch")["version"] == ""
        problem(await made.client.post("/v1/deployments/search/activate", json={"version": "7.7"}), "unknown_version")
        problem(await made.client.post("/v1/deployments/search/rollback"), "nothing_to_roll_back")
        problem(await made.client.post("/v1/deployments/search/rollback", json={}), "nothing_to_roll_back")

    play(scene, thin)


def test_a_rollout_is_aborted_without_a_body_too(thin: bool) -> None:
    async def scene(made: Api) -> None:
        await made.prepared()
        started = (await made.client.post("/v1/deployments/search/activate", json={"version": "1.0.0"})).json()
        assert (await made.client.post(f"/v1/rollouts/{started['rollout_id']}/abort")).status_code == 200
        shown = (await made.client.get(f"/v1/rollouts/{started['rollout_id']}")).json()
        assert (shown["status"], shown["failure"]["code"]) == ("failed", "aborted_by_operator")
        problem(await made.client.post(f"/v1/rollouts/{started['rollout_id']}/abort", json={}), "rollout_not_running")
        problem(await made.client.post("/v1/rollouts/nobody/abort"), "unknown_rollout")

    play(scene, thin)


def test_attestations_carry_a_rollout_through_its_phases(thin: bool) -> None:
    async def scene(made: Api) -> None:
        await made.prepared()
        started = (await made.client.post("/v1/deployments/search/activate", json={"version": "1.0.0"})).json()
        version = (await made.client.get(f"{MODEL}/versions/1.0.0")).json()
        sent = {"rollout_id": started["rollout_id"], "stage": "prepared", "checksum": version["checksum"], "boot_id": "b1"}
        for node, side in (("n1", "primary"), ("n2", "standby")):
            reply = await made.client.post(f"/v1/nodes/{node}/attestations", json={**sent, "side": side})
            assert reply.status_code == 200, reply.text
        shown = (await made.client.get(f"/v1/rollouts/{started['rollout_id']}")).json()
        assert [(one["node"], one["stage"]) for one in shown["attestations"]] == [("n1", "prepared"), ("n2", "prepared")]
        assert shown["phase"] == Phase.PREPARING
        wrong = {**sent, "side": "primary", "checksum": "0" * 64}
        problem(await made.client.post("/v1/nodes/n1/attestations", json=wrong), "attestation_mismatch")
        problem(await made.client.post("/v1/nodes/n9/attestations", json={**sent, "side": "primary"}), "unknown_node")

    play(scene, thin)


def test_a_heartbeat_is_kept_told_to_the_others_and_not_replicated(thin: bool) -> None:
    async def scene(made: Api) -> None:
        reply = await made.client.post("/v1/nodes/n1/heartbeat", json=STATUS)
        assert reply.json() == {"generation": 0, "revision": 0, "interval_ms": 2000}
        assert made.member.state.revision == 0
        assert [topic for topic, _ in made.member.gossiped] == ["heartbeat"]
        made.member.monotonic_ms += 8_000
        listed = (await made.client.get("/v1/nodes")).json()
        assert listed == {"items": [{**STATUS, "age_ms": 8_000, "missing": True}], "next": None}
        problem(await made.client.post("/v1/nodes/n2/heartbeat", json=STATUS), "bad_field")
        assert len(made.member.gossiped) == 1

    play(scene, thin)


def test_nodes_are_listed_in_pages(thin: bool) -> None:
    async def scene(made: Api) -> None:
        for number in range(3):
            await made.client.post(f"/v1/nodes/n{number}/heartbeat", json={**STATUS, "node": f"n{number}"})
        page = (await made.client.get("/v1/nodes?limit=2")).json()
        assert ([item["node"] for item in page["items"]], page["next"]) == (["n0", "n1"], "n1")
        page = (await made.client.get("/v1/nodes?limit=2&after=n1")).json()
        assert ([item["node"] for item in page["items"]], page["next"]) == (["n2"], None)

    play(scene, thin)


def test_verdicts_are_recorded_and_listed_with_their_report(thin: bool) -> None:
    async def scene(made: Api) -> None:
        await made.prepared()
        sent = {"deployment": "search", "verdict": "diverged", "report": {"findings": [{"tensor": "ü", "block": 3}], "ratio": 0.25}}
        body = {**sent, "basis": basis(made.member)}
        assert (await made.client.post("/v1/consistency", json=body)).status_code == 200
        listed = (await made.client.get("/v1/consistency")).json()["items"]
        assert [{key: item[key] for key in sent} for item in listed] == [sent]
        problem(await made.client.post("/v1/consistency", json={**body, "report": {"x": "y" * 65_536}}), "bad_field")
        problem(await made.client.post("/v1/consistency", json={**body, "verdict": "fine"}), "bad_field")

    play(scene, thin)


def test_the_cluster_shows_its_members_and_the_hash_of_the_state(thin: bool) -> None:
    async def scene(made: Api) -> None:
        shown = (await made.client.get("/v1/cluster")).json()
        assert shown["state_hash"] == made.member.state.state_hash.hex()
        assert (shown["role"], shown["members"][0]["id"], shown["feature_level"]) == ("leader", "m1", 2)

    play(scene, thin)


@pytest.mark.parametrize(
    "broken",
    [
        {"files": [{**manifest()["files"][0], "sha256": "f" * 63}, manifest()["files"][1]]},
        {"files": [{**manifest()["files"][0], "size_bytes": -1}, manifest()["files"][1]]},
        {"files": [{**manifest()["files"][0], "name": "../config.json"}, manifest()["files"][1]]},
        {"tensors": [{**manifest()["tensors"][0], "dtype": "F16"}]},
        {"tensors": [{**manifest()["tensors"][0], "end": 1 << 70}]},
        {"tensors": [{**manifest()["tensors"][0], "name": "a"}, {**manifest()["tensors"][0], "name": "b"}]},
    ],
    ids=["digest", "size", "path", "dtype", "range", "overlap"],
)
def test_a_manifest_that_contradicts_itself_is_refused_and_nothing_is_proposed(thin: bool, broken: dict[str, Any]) -> None:
    async def scene(made: Api) -> None:
        problem(await made.client.put(PUBLISH, json={"manifest": {**manifest(), **broken}}), "bad_manifest")
        assert made.member.log.proposed == []

    play(scene, thin)


@pytest.mark.parametrize("name", ["UPPER", "a" * 129, "-a", "a%20b", "a%2Fb", "a%00", "%C3%BC", "..", "a:b"])
def test_a_name_outside_its_alphabet_is_refused_and_nothing_is_proposed(thin: bool, name: str) -> None:
    async def scene(made: Api) -> None:
        reply = await made.client.put(f"/v1/models/{name}/versions/1.0", json={"manifest": manifest()})
        assert reply.status_code in (404, 422), reply.text
        assert reply.json()["code"] in ("bad_name", "not_found")
        assert made.member.log.proposed == []

    play(scene, thin)


@pytest.mark.parametrize("path", [PUBLISH.replace("/1.0.0", "%2F1.0.0"), PUBLISH.replace("/versions/", "%2fversions/")])
def test_an_encoded_slash_changes_nothing_and_shows_nothing(thin: bool, path: str) -> None:
    async def scene(made: Api) -> None:
        await made.prepared()
        proposed = len(made.member.log.proposed)
        for method in ("GET", "DELETE"):
            problem(await made.client.request(method, path), "bad_name")
        assert len(made.member.log.proposed) == proposed

    play(scene, thin)


@pytest.mark.parametrize("name", ["Authorization", "Content-Type", "Host", "Idempotency-Key", "Origin"])
def test_a_header_that_decides_something_stands_once(thin: bool, name: str) -> None:
    async def scene(made: Api) -> None:
        given = {"Content-Type": "application/json", "Host": "127.0.0.1:7400", "Idempotency-Key": "k"} | {name: "application/json"}
        twice = [*given.items(), (name.lower(), given[name])]
        reply = await made.client.put(PUBLISH, content=json.dumps({"manifest": manifest()}), headers=twice)
        problem(reply, "bad_request")
        assert name.lower() in reply.json()["detail"] and made.member.log.proposed == []

    play(scene, thin)


def test_a_header_that_decides_nothing_may_stand_twice(thin: bool) -> None:
    async def scene(made: Api) -> None:
        assert (await made.client.get("/v1/models", headers=[("accept", "a/b"), ("accept", "c/d")])).status_code == 200

    play(scene, thin)


def test_a_path_that_nobody_serves_and_a_method_that_it_does_not_take_are_problems(thin: bool) -> None:
    async def scene(made: Api) -> None:
        for path in ("/", "/v1", "/v2/models", "/v1/models/", "/v1/models//versions/1.0", f"{PUBLISH}/"):
            problem(await made.client.get(path), "not_found")
        reply = await made.client.patch(PUBLISH)
        problem(reply, "method_not_allowed")
        assert reply.headers["allow"] == "DELETE, GET, PUT"

    play(scene, thin)


def test_every_reply_names_revision_and_generation(thin: bool) -> None:
    async def scene(made: Api) -> None:
        await made.prepared()
        for operation in OPERATIONS:
            path = operation.path.replace("{model}", "encoder").replace("{label}", "1.0.0")
            for parameter in ("{deployment}", "{rollout}", "{node}"):
                path = path.replace(parameter, "search")
            if operation.id != "watch":
                reply = await made.client.request(operation.method, path, headers=JSON, content=b"{" if operation.body else None)
                assert reply.headers["x-raftmeta-revision"].isdigit(), operation.id
                assert reply.headers["x-raftmeta-generation"].isdigit(), operation.id
                assert reply.headers["cache-control"] == "no-store", operation.id

    play(scene, thin)


def test_the_same_request_gets_the_same_reply_on_either_way_in(thin: bool) -> None:
    if not thin:
        return

    async def replies(way: bool) -> list[tuple[int, dict[str, str], bytes]]:
        found = []
        async with api(thin=way) as made:
            key = {"idempotency-key": "k1"}
            bodies: list[tuple[str, str, Any]] = [
                ("PUT", PUBLISH, {"manifest": manifest()}),
                ("PUT", PUBLISH, {"manifest": manifest(1)}),
                ("GET", PUBLISH, None),
                ("GET", PUBLISH + "?consistency=stale", None),
                ("GET", PUBLISH + "?consistency=odd", None),
                ("GET", "/v1/deployments/d", None),
                ("GET", "/v1/rollouts/r", None),
                ("POST", "/v1/nodes/n1/heartbeat", STATUS),
                ("POST", "/v1/nodes/n1/attestations", {"node": "n1"}),
                ("GET", "/livez", None),
            ]
            for method, path, body in bodies:
                reply = await made.client.request(method, path, json=body, headers=key)
                found.append((reply.status_code, dict(reply.headers), reply.content))
        return found

    async def work() -> None:
        assert await replies(True) == await replies(False)

    run(work())


def test_the_bytes_of_a_reply_are_plain_json(thin: bool) -> None:
    async def scene(made: Api) -> None:
        reply = await made.client.get("/v1/models")
        assert reply.headers["content-type"] == "application/json"
        assert json.loads(reply.content) == {"items": [], "next": None}

    play(scene, thin)
