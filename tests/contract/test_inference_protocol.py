"""The inference port as a table: route x method x state of the node -> status. What it answers with is the Open Inference Protocol's.

States: `serving` two versions, 1.0.0 active and 0.9.0 in the other slot; `blocked`, the active slot lost its version; `loading`, workers
were started again and have loaded nothing yet; `away`, no worker is there; `fresh`, no version was ever activated; `drained`, the agent
stops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from node_agent.routes import ROUTES
from tests.support.front_scene import RECORD, TEXT, Scene, run

STATES = ("serving", "blocked", "loading", "away", "fresh", "drained", "half")
MODEL = "/v2/models/search"
GET: dict[str, tuple[int, ...]] = {
    "/livez": (200,) * 7,
    "/readyz": (200, 503, 503, 503, 503, 503, 200),
    "/v2/health/live": (200,) * 7,
    "/v2/health/ready": (200, 503, 503, 503, 503, 503, 200),
    "/v2": (200,) * 7,
    "/v2/": (200,) * 7,
    MODEL: (200, 503, 503, 503, 503, 200, 200),
    f"{MODEL}/versions/1.0.0": (200, 409, 503, 503, 503, 200, 200),
    f"{MODEL}/versions/0.9.0": (200, 200, 503, 503, 503, 200, 503),
    f"{MODEL}/versions/7": (409, 409, 503, 503, 503, 409, 503),
    f"{MODEL}/ready": (200, 503, 503, 503, 503, 200, 200),
    f"{MODEL}/versions/1.0.0/ready": (200, 409, 503, 503, 503, 200, 200),
    f"{MODEL}/versions/0.9.0/ready": (200, 200, 503, 503, 503, 200, 503),
    f"{MODEL}/versions/7/ready": (409, 409, 503, 503, 503, 409, 503),
    "/v2/models/other": (404,) * 7,
    "/v2/models/other/ready": (404,) * 7,
    "/v2/models/other/versions/1/ready": (404,) * 7,
    "/v2/models": (404,) * 7,
    "/v2/models/search/": (404,) * 7,
    "/v2/repository/index": (404,) * 7,
    "/metrics": (200,) * 7,
    "/raftmeta/v1/status": (200,) * 7,
    "/raftmeta/v1/slots": (200,) * 7,
    "/raftmeta/v1/vector": (200,) * 7,
    "/raftmeta/v1/vector/search": (200,) * 7,
    "/raftmeta/v1/vector/other": (404,) * 7,
    "/raftmeta/v1/evidence/search": (200,) * 7,
    "/raftmeta/v1/evidence/other": (404,) * 7,
}
POST: dict[str, tuple[int, ...]] = {
    f"{MODEL}/infer": (200, 503, 504, 504, 503, 200, 200),
    f"{MODEL}/versions/1.0.0/infer": (200, 409, 504, 504, 503, 200, 200),
    f"{MODEL}/versions/0.9.0/infer": (200, 200, 504, 504, 503, 200, 504),
    f"{MODEL}/versions/7/infer": (409, 409, 504, 504, 503, 409, 504),
    "/v2/models/other/infer": (404,) * 7,
    "/v2/models/se%61rch/infer": (200, 503, 504, 504, 503, 200, 200),
}


async def put_into(scene: Scene, state: str) -> None:
    if state == "blocked":
        scene.worker.say("the slot that should serve, 0, is empty, not verified")
        await scene.until(lambda: bool(scene.front._workers[0].served[0].blocked))
    if state in ("loading", "fresh"):
        scene.worker.say(is_loading=True)
        await scene.until(lambda: not scene.front._workers[0].served[0].slots)
    if state == "half":
        scene.worker.say(is_half_loaded=True)
        await scene.until(lambda: len(scene.front._workers[0].served[0].slots) == 1)
    if state == "away":
        await scene.worker.die()
        await scene.until(lambda: not scene.front._workers[0].connected)
    if state == "fresh":
        scene.journal.put(msgspec.structs.replace(RECORD, pin=None))
    scene.front.draining = state == "drained"


@pytest.mark.parametrize("state", STATES)
def test_every_route_answers_in_every_state_as_the_table_says(tmp_path: Path, state: str) -> None:
    column = STATES.index(state)

    async def work(scene: Scene) -> None:
        await put_into(scene, state)
        for path, statuses in GET.items():
            reply = await scene.http.get(path)
            assert reply.status_code == statuses[column], (path, reply.text)
            check_error(path, reply)
            head = await scene.http.head(path)
            assert (head.status_code, head.content) == (reply.status_code, b""), path
            if path != "/metrics":
                assert head.headers["content-length"] == str(len(reply.content)), path
        for path, statuses in POST.items():
            reply = await scene.infer(path)
            assert reply.status_code == statuses[column], (path, reply.text)
            check_error(path, reply)

    run(tmp_path, work, request_deadline_s=0.2)


@pytest.mark.parametrize(
    ("state", "says", "retry_s"),
    [("fresh", "no version was activated yet", "5"), ("loading", "no worker serves it yet", "1"), ("blocked", "is empty", "5")],
)
def test_metadata_that_nobody_knows_says_why_and_when_to_come_back(tmp_path: Path, state: str, says: str, retry_s: str) -> None:
    async def work(scene: Scene) -> None:
        await put_into(scene, state)
        reply = await scene.http.get(MODEL)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, retry_s)
        assert says in reply.json()["error"]

    run(tmp_path, work)


def check_error(path: str, reply: Any) -> None:
    """Below /v2 the protocol's error object, except that readiness answers with its own object; problem bodies elsewhere."""
    if reply.status_code < 400 or path in ("/readyz", "/v2/health/ready"):
        return
    body = reply.json()
    if path.startswith("/v2"):
        is_readiness = path.endswith("/ready") and reply.status_code != 404
        assert set(body) == ({"name", "ready", "reason"} if is_readiness else {"error"}), path
        assert body.get("ready") in (None, False) and body.get("error", body.get("reason"))
    else:
        assert reply.headers["content-type"] == "application/problem+json" and body["status"] == reply.status_code
    assert ("retry-after" in reply.headers) == (reply.status_code == 503 and not path.endswith("/ready")), path


def test_the_table_has_every_route() -> None:
    filled = {row.path.format(model="search", version="1.0.0", deployment="search"): row.methods for row in ROUTES}
    assert {path for path, methods in filled.items() if "GET" in methods} <= set(GET)
    assert {path for path, methods in filled.items() if "POST" in methods} <= set(POST)


def test_methods_that_a_route_does_not_take_are_answered_with_those_that_it_takes(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        for path in (*GET, *POST):
            known = GET.get(path, POST.get(path, ()))[0] != 404 or "other" in path
            for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                if method in (("GET", "HEAD") if path in GET else ("POST",)):
                    continue
                reply = await scene.http.request(method, path)
                assert reply.status_code == (405 if known else 404), (method, path)
                assert reply.headers.get("allow") == (None if not known else "GET, HEAD" if path in GET else "POST"), (method, path)
        assert scene.worker.calls == []

    run(tmp_path, work)


def test_the_objects_have_the_members_that_the_protocol_requires(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        server = (await scene.http.get("/v2")).json()
        assert set(server) == {"name", "version", "extensions"} and server["extensions"] == [], "JSON tensors, and nothing beyond"
        assert (await scene.http.get("/v2/health/live")).json() == {"live": True}
        assert (await scene.http.get("/v2/health/ready")).json() == {"ready": True}
        assert (await scene.http.get(f"{MODEL}/ready")).json() == {"name": "search", "ready": True}
        for path, width in ((MODEL, 2), (f"{MODEL}/versions/1.0.0", 2), (f"{MODEL}/versions/0.9.0", 1)):
            assert (await scene.http.get(path)).json() == {
                "name": "search",
                "versions": ["0.9.0", "1.0.0"],
                "platform": "raftmeta",
                "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
                "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, width]}],
            }, "of the version that would answer"
        answer = (await scene.infer(body=TEXT | {"id": "", "outputs": [{"name": "embedding"}]})).json()
        assert answer.pop("id") == ""
        assert scene.worker.calls[-1].outputs == ("embedding",)
        assert set(answer) == {"model_name", "model_version", "outputs"}
        assert set(answer["outputs"][0]) == {"name", "datatype", "shape", "data"}

    run(tmp_path, work)
