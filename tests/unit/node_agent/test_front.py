"""The HTTP face of a node, in front of a worker and a control that are played by the test."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node_agent import serve
from node_agent.heavy import MAX_WAITING
from node_agent.ipc import CallFailed, Link
from node_agent.messages import (
    Done,
    GetDigests,
    GetStatus,
    GetVector,
    GetVectors,
    Held,
    Hold,
    LetGo,
    Tensor,
)
from node_agent.metric_table import WORKER_REQUESTS
from node_agent.metrics import Meter
from node_agent.tally import Tally
from tests.support.front_scene import RECORD, TEXT, Scene, refused_unread, run


def test_an_answer_names_the_version_that_computed_it(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        reply = await scene.infer()
        assert reply.status_code == 200
        assert reply.headers["x-raftmeta-version"] == reply.json()["model_version"] == "1.0.0"
        assert reply.json()["model_name"] == "search"
        assert reply.json()["outputs"][0] == {"name": "embedding", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 0.25]}
        assert scene.worker.calls[0].inputs == (Tensor("text", "BYTES", (1,), ("hello",)),)

    run(tmp_path, work)


def test_a_pinned_path_asks_for_that_version(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        reply = await scene.infer("/v2/models/search/versions/0.9.0/infer")
        assert reply.headers["x-raftmeta-version"] == "0.9.0"
        scene.worker.fault = 409, "no slot of this node holds version 0.9.0"  # it went between two looks of the front
        reply = await scene.infer("/v2/models/search/versions/0.9.0/infer")
        assert (reply.status_code, reply.json()) == (409, {"error": "no slot of this node holds version 0.9.0"})

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v2/models/other/infer", b"{}", {}, 404),
        ("GET", "/v2/models/other", b"", {}, 404),
        ("GET", "/v2/models/search/infer", b"", {}, 405),
        ("POST", "/v2/models/search", b"{}", {}, 405),
        ("POST", "/v2/health/ready", b"{}", {}, 405),
        ("GET", "/v2/nothing", b"", {}, 404),
        ("POST", "/v2/models/search/infer", b"{", {}, 400),
        ("POST", "/v2/models/search/infer", b"{}", {"content-type": "text/plain"}, 415),
        ("POST", "/v2/models/search/infer", b"{}", {"inference-header-content-length": "2"}, 415),
        ("POST", "/v2/models/search/infer", b"x" * 5000, {}, 413),
        ("GET", "/v2/models/search/versions/7", b"", {}, 409),
    ],
)
def test_refusals_have_the_protocols_error_body(
    tmp_path: Path, method: str, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    async def work(scene: Scene) -> None:
        reply = await scene.http.request(method, path, content=body, headers={"content-type": "application/json"} | headers)
        assert reply.status_code == status
        assert set(reply.json()) == {"error"} and reply.json()["error"]
        assert "x-raftmeta-version" not in reply.headers
        assert scene.worker.calls == []

    run(tmp_path, work, body_limit_bytes=4096)


def test_a_body_announced_as_a_gigabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        status, answered = await refused_unread(scene, [(b"content-type", b"application/json"), (b"content-length", b"1073741824")])
        assert status == 413
        assert (b"connection", b"close") in answered

    run(tmp_path, work)


def test_a_body_of_unsaid_length_is_read_no_further_than_the_limit(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        sent: list[dict[str, Any]] = []
        read = 0

        async def receive() -> dict[str, Any]:
            nonlocal read
            read += 1000
            assert read <= 6000, "it went on reading"
            return {"type": "http.request", "body": b" " * 1000, "more_body": True}

        async def send(message: Any) -> None:
            sent.append(dict(message))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "raw_path": b"/v2/models/search/infer", "headers": headers, "query_string": b""}
        await scene.front(scope, receive, send)
        assert sent[0]["status"] == 413

    run(tmp_path, work, body_limit_bytes=4096)


def test_a_full_queue_answers_503_with_retry_after(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        scene.worker.hold = asyncio.Event()
        tasks = [asyncio.create_task(scene.infer()) for _ in range(3)]
        await scene.until(lambda: scene.front._dispatcher.queued == 2)
        refused = await scene.infer()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        scene.worker.hold.set()
        assert [reply.status_code for reply in await asyncio.gather(*tasks)] == [200] * 3

    run(tmp_path, work, queue_limit=2, worker_depth=1)


def test_a_request_survives_the_death_of_its_worker(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        scene.worker.hold = asyncio.Event()
        task = asyncio.create_task(scene.infer())
        await scene.until(lambda: bool(scene.worker.calls))
        await scene.worker.die()
        await scene.until(lambda: not scene.front._workers[0].connected)
        scene.worker.hold = None
        await scene.worker.start()
        assert (await task).status_code == 200
        assert len(scene.worker.calls) == 2
        assert "raftmeta_agent_replays_total 1.0" in (await scene.http.get("/metrics")).text

    run(tmp_path, work)


def test_requests_end_by_their_deadline_when_no_worker_comes_back(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.worker.die()
        await scene.until(lambda: not scene.front._workers[0].connected)
        reply = await scene.infer()
        assert reply.status_code == 504

    run(tmp_path, work, request_deadline_s=0.2)


def test_control_away_changes_nothing_for_requests_and_is_said(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.control.server.stop()
        await scene.until(lambda: not scene.front._control.connected)
        assert (await scene.infer()).status_code == 200
        assert (await scene.http.get("/v2/health/ready")).status_code == 200
        status = await scene.http.get("/raftmeta/v1/status")
        assert status.status_code == 503
        assert status.headers["content-type"] == "application/problem+json"
        assert "what serves goes on" in status.json()["detail"]
        assert 'process_up{index="0",role="control"} 0.0' in (await scene.http.get("/metrics")).text

    run(tmp_path, work)


def test_questions_about_the_node_go_to_control(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.http.get("/raftmeta/v1/slots")).json() == {"said": "control"}
        await scene.http.get("/raftmeta/v1/vector/search", params={"entries": "1"})
        await scene.http.get("/raftmeta/v1/vector/search", params={"blocks": "a.weight"})
        await scene.http.get("/raftmeta/v1/vector/search", params={"sha256": "1", "after": "a", "limit_bytes": "9"})
        assert (await scene.http.get("/raftmeta/v1/vector?deployments=search&max_age_ms=5")).json() == {"said": "control"}
        kinds = [call for call in scene.control.asked if isinstance(call, GetStatus | GetVector | GetVectors | GetDigests)]
        assert [msgspec.structs.replace(call, number=0) for call in kinds] == [
            GetStatus(0),
            GetVector(0, "search", True, ""),
            GetVector(0, "search", False, "a.weight"),
            GetDigests(0, "search", "a", 9, 30),
            GetVectors(0, ("search",), 5, 30),
        ]
        missing = await scene.http.get("/raftmeta/v1/vector/other")
        assert (missing.status_code, missing.json()["code"]) == (404, "unknown_deployment")
        for query in ("entries=2", "depth=1", "entries"):
            assert (await scene.http.get(f"/raftmeta/v1/vector/search?{query}")).status_code == 400

    run(tmp_path, work)


def test_ready_says_why_not(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        async def reason() -> str:
            reply = await scene.http.get("/v2/health/ready")
            assert reply.status_code == (200 if reply.json()["ready"] else 503)
            return str(reply.json().get("reason", ""))

        assert await reason() == ""
        assert (await scene.http.get("/v2/models/search/ready")).json() == {"name": "search", "ready": True}
        scene.journal.put(msgspec.structs.replace(RECORD, behind=True))
        assert "not verified on this node yet" in await reason()
        assert (await scene.infer()).status_code == 200, "the old version goes on serving"
        scene.journal.put(msgspec.structs.replace(RECORD, name="other", pin=None))
        assert "other: no version was activated yet" in await reason()
        scene.journal.drop("other")
        scene.journal.cordon("fan replaced")
        assert await reason() == "cordoned: fan replaced"
        assert (await scene.infer()).status_code == 200, "what still comes is served"
        scene.journal.cordon("")
        scene.journal.drop("search")
        assert "no deployment lists this node" in await reason()
        assert (await scene.http.get("/v2/health/live")).status_code == 200
        scene.journal.put(RECORD)
        await scene.worker.die()
        await scene.until(lambda: not scene.front._workers[0].connected)
        assert "no worker serves it yet" in await reason()
        scene.front.draining = True
        assert "shutting down" in await reason()

    run(tmp_path, work)


def test_while_no_slot_can_be_entered_the_node_is_not_ready_and_refuses_at_once_whether_control_lives_or_not(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        async def ready() -> list[tuple[int, str]]:
            replies = [await scene.http.get(path) for path in ("/v2/health/ready", "/readyz", "/v2/models/search/ready")]
            return [(reply.status_code, reply.json().get("reason", "")) for reply in replies]

        await scene.control.server.stop()
        await scene.until(lambda: not scene.front._control.connected)
        assert [status for status, _ in await ready()] == [200, 200, 200]
        scene.worker.say("the slot that should serve, 0, is empty, not verified")
        await scene.until(lambda: bool(scene.front._workers[0].served[0].blocked))
        for behind in (False, True):
            scene.journal.put(msgspec.structs.replace(RECORD, behind=behind))
            for status, reason in await ready():
                assert status == 503 and "is empty, not verified" in reason
        scene.journal.put(RECORD)
        refused = await scene.infer()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json() == {"error": "search: the slot that should serve, 0, is empty, not verified"}
        assert scene.worker.calls == []
        assert (await scene.http.get("/v2/health/live")).status_code == 200
        assert (await scene.infer("/v2/models/search/versions/0.9.0/infer")).status_code == 200, (
            "the worker knows what the other slot holds"
        )
        scene.worker.say("")
        await scene.until(lambda: not scene.front._workers[0].served[0].blocked)
        assert [status for status, _ in await ready()] == [200, 200, 200]
        assert (await scene.infer()).status_code == 200

    run(tmp_path, work)


def test_a_deployment_without_any_version_answers_at_once_instead_of_queueing(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        scene.journal.put(msgspec.structs.replace(RECORD, name="fresh", pin=None))
        reply = await scene.infer("/v2/models/fresh/infer")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")

    run(tmp_path, work)


def test_metadata_lists_the_versions_held_and_what_the_model_takes(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        reply = await scene.http.get("/v2/models/search")
        assert reply.headers["x-raftmeta-version"] == "1.0.0"
        assert reply.json() == {
            "name": "search",
            "versions": ["0.9.0", "1.0.0"],
            "platform": "raftmeta",
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
            "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 2]}],
        }
        server = (await scene.http.get("/v2")).json()
        assert server["name"] == "raftmeta" and server["extensions"] == []

    run(tmp_path, work)


def test_one_metrics_page_covers_the_tree_and_never_names_a_version(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.infer()
        (tmp_path / RECORD.arena).write_bytes(bytes(4096))
        page = (await scene.http.get("/metrics")).text
        assert 'raftmeta_agent_worker_private_bytes{worker="0"} 7.0' in page
        assert 'raftmeta_agent_in_flight_requests{worker="0"} 0.0' in page
        assert 'raftmeta_agent_arena_bytes{deployment="search"} 4096.0' in page
        assert "raftmeta_agent_replays_total 0.0" in page
        assert 'raftmeta_agent_requests_total{deployment="search",status="200"} 1.0' in page
        assert "raftmeta_agent_ready 1.0" in page
        assert "1.0.0" not in page
        families = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
        assert len(families) == len(set(families))
        scene.journal.drop("search")
        assert "arena_bytes{" not in (await scene.http.get("/metrics")).text, "the deployment left this node"

    run(tmp_path, work, arena_dir=tmp_path)


def test_the_page_shows_what_a_process_counted_while_that_process_is_away(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        tally = Tally.private()
        Meter(tally).count(WORKER_REQUESTS, "0", "search", "ok", amount=7)
        scene.runtime.tallies = {("worker", "0"): tally}
        await scene.worker.die()
        await scene.until(lambda: not scene.front._workers[0].connected)
        page = (await scene.http.get("/metrics")).text
        assert 'worker_requests_total{deployment="search",outcome="ok",worker="0"} 7.0' in page
        assert 'process_up{index="0",role="worker"} 0.0' in page
        assert "worker_private_bytes{" not in page, "what was so is not so for ever"

    run(tmp_path, work)


def test_requests_that_wait_and_those_that_each_worker_has_are_shown_apart(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        scene.worker.hold = asyncio.Event()
        tasks = [asyncio.create_task(scene.infer()) for _ in range(3)]
        await scene.until(lambda: scene.front._dispatcher.queued == 2)
        page = (await scene.http.get("/metrics")).text
        assert 'raftmeta_agent_in_flight_requests{worker="0"} 1.0' in page and "raftmeta_agent_queued_requests 2.0" in page
        scene.worker.hold.set()
        await asyncio.gather(*tasks)
        page = (await scene.http.get("/metrics")).text
        assert 'raftmeta_agent_in_flight_requests{worker="0"} 0.0' in page and "raftmeta_agent_queued_requests 0.0" in page

    run(tmp_path, work, worker_depth=1)


def test_control_holds_the_requests_of_a_deployment_and_lets_them_go(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        link = Link(lambda push: None, lambda: None)
        await link.connect(scene.runtime.front_socket())
        held = await link.call(lambda n: Hold(n, "search", 4000), 5)
        assert isinstance(held, Held) and held.in_flight == 0 and 0 < held.lease_ms <= 4000
        asking = asyncio.create_task(scene.infer())
        await scene.until(lambda: scene.front._dispatcher.queued == 1)
        assert scene.worker.calls == []
        assert isinstance(await link.call(lambda n: LetGo(n, "search"), 5), Done)
        assert (await asking).status_code == 200
        assert 'raftmeta_agent_hold_seconds_count{deployment="search"} 1.0' in (await scene.http.get("/metrics")).text
        for lease_ms in (0, -5, 60_000):
            with pytest.raises(CallFailed, match="bad_request"):
                await link.call(lambda n, lease_ms=lease_ms: Hold(n, "search", lease_ms), 5)  # type: ignore[misc]
        with pytest.raises(CallFailed, match="bad_request"):
            await link.call(GetStatus, 5)
        await link.close()

    run(tmp_path, work)


def test_a_control_process_that_ends_while_it_holds_requests_keeps_nobody_waiting(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        link = Link(lambda push: None, lambda: None)
        await link.connect(scene.runtime.front_socket())
        await link.call(lambda n: Hold(n, "search", 5000), 5)
        asking = asyncio.create_task(scene.infer())
        await scene.until(lambda: scene.front._dispatcher.queued == 1)
        await link.close()
        async with asyncio.timeout(2):  # much less than the lease
            assert (await asking).status_code == 200

    run(tmp_path, work)


def test_damage_in_the_memory_that_serves_takes_the_node_out_of_readiness_and_is_said(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.http.get("/v2/health/ready")).status_code == 200
        scene.journal.put(msgspec.structs.replace(RECORD, damage="memory of 1.0.0 is damaged: tensor 'w' block 3"))
        for path in ("/v2/health/ready", "/v2/models/search/ready"):
            reply = await scene.http.get(path)
            assert reply.status_code == 503 and "tensor 'w' block 3" in reply.text
        scene.journal.put(RECORD)
        assert (await scene.http.get("/v2/health/ready")).status_code == 200

    run(tmp_path, work)


def test_while_its_memory_is_mended_a_deployment_that_workers_call_blocked_is_waited_for_until_one_says_otherwise(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        link = Link(lambda push: None, lambda: None)
        await link.connect(scene.runtime.front_socket())
        scene.worker.say(blocked="the slot that should serve, 0, is dirty, not verified")
        await scene.until(lambda: bool(scene.front._workers[0].served[0].blocked))
        assert (await scene.infer()).status_code == 503
        await link.call(lambda n: Hold(n, "search", 5000), 5)
        asking = asyncio.create_task(scene.infer())
        await scene.until(lambda: scene.front._dispatcher.queued == 1)
        letting = asyncio.create_task(link.call(lambda n: LetGo(n, "search"), 5))
        await asyncio.sleep(0.1)
        assert not letting.done() and not asking.done()
        scene.worker.say()
        await letting
        assert (await asking).status_code == 200
        await link.close()

    run(tmp_path, work)


def test_large_bodies_are_read_beside_the_loop_and_only_so_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, parse, large = threading.Event(), serve.parse_infer, msgspec.json.encode(TEXT) + b" " * (100 << 10)

    def slow(body: bytes, limit: int) -> Any:
        assert len(body) < 1000 or go.wait(10)
        return parse(body, limit)

    monkeypatch.setattr(serve, "parse_infer", slow)

    async def work(scene: Scene) -> None:
        tasks = [asyncio.create_task(scene.infer(body=large)) for _ in range(MAX_WAITING)]
        await scene.until(lambda: scene.front._heavy._waiting == MAX_WAITING)
        assert (await scene.infer()).status_code == 200
        refused = await scene.infer(body=large)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        go.set()
        assert [reply.status_code for reply in await asyncio.gather(*tasks)] == [200] * MAX_WAITING

    run(tmp_path, work)
