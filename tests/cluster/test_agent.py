"""A whole agent that serves an encoder, as processes: updates under load, and each process killed beside them.

The control plane is real REST over one log.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("transformers")

from node_agent.probe_command import answers
from node_agent.probe_inputs import TEXTS, of_texts
from tests.support.agent_kinds import ENCODER
from tests.support.agent_node import Node, running

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running(tmp_path_factory.mktemp("agent"), ENCODER) as node:
        yield node


@pytest.fixture
def node(started: Node) -> Node:
    started.begin_again()
    return started


def counters(rollout: dict[str, Any]) -> dict[str, int]:
    assert rollout["status"] == "done", rollout
    found: dict[str, int] = rollout["attestations"][0]["counters"]
    return found


def test_update_and_roll_back_under_load_lose_nothing_and_label_every_answer(node: Node) -> None:
    costs: list[dict[str, int]] = []
    unready: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            reply = node.agent.get("/v2/health/ready")
            if reply.status_code != 200:
                unready.append(reply.text)

    def work() -> None:
        watching = threading.Thread(target=watch)
        watching.start()
        try:
            costs.append(counters(node.driver.activate("2.0.0")))
            node.until_load_meets("2.0.0")
            costs.append(counters(node.driver.roll_back()))
        finally:
            over.set()
            watching.join()

    tally = node.under_load(work)
    assert tally.lost == [] and tally.wrong == []
    assert unready == [], "loading beside what serves keeps the node ready"
    assert tally.ok == tally.sent > 0
    assert set(tally.versions) == {"1.0.0", "2.0.0"}
    update, back = costs
    assert update["bytes_total"] == update["bytes_read"] + update["bytes_from_active"] + update["bytes_kept"]
    assert update["bytes_from_active"] + update["bytes_kept"] > 0
    assert (back["bytes_read"], back["bytes_fetched"], back["bytes_from_active"]) == (0, 0, 0)
    assert back["bytes_kept"] == back["bytes_total"]
    assert min(update["lag_ms"], back["lag_ms"]) >= 0 and min(update["switch_call_us"], back["switch_call_us"]) > 0


def test_the_checkers_vector_comes_from_memory_and_equals_the_manifests(node: Node) -> None:
    manifest = node.kind.manifest_of(node.artifacts / "v1")
    body = node.agent.get("/raftmeta/v1/vector/search?entries=1").json()
    assert body["vector_root"] == manifest.vector_root
    assert body["entries"] == {tensor.name: tensor.entry for tensor in manifest.tensors}
    assert (body["node"], body["version"], body["switching"], body["active_models"]) == ("n1", "1.0.0", False, 1)
    assert body["lag_ms"] >= 0
    evidence = node.agent.get("/raftmeta/v1/evidence/search").json()
    assert (evidence["version"], evidence["vector_root"], evidence["vector_from"]) == ("1.0.0", manifest.vector_root, "memory")
    assert evidence["verified_at_ms"] >= body["computed_at_ms"] - 60_000 and evidence["derived"]
    assert {file["role"] for file in evidence["files"]} >= {"config", "tokenizer"} and evidence["probed"]["kernel"]
    name = manifest.tensors[0].name
    assert node.agent.get(f"/raftmeta/v1/vector/search?blocks={name}").json()["tensor"] == name


def test_members_hear_where_the_node_is_and_what_it_serves(node: Node) -> None:
    def heard() -> bool:
        items = node.driver.call(lambda client: client.nodes())["items"]
        return bool(items) and items[0]["deployments"]["search"]["version"] == "1.0.0" and items[0]["url"] == node.agent.url

    node.agent.until(heard, "a heartbeat with 1.0.0")


def test_members_are_told_which_bytes_serve_and_of_what_else_the_answers_are_made(node: Node) -> None:
    def told() -> dict[str, Any]:
        (found,) = node.driver.call(lambda client: client.evidence("search"))["nodes"]
        return dict(found)

    node.agent.until(lambda: bool(told()["serves_decided"]), "evidence of 1.0.0")
    said = told()["evidence"]
    assert (said["version"], said["vector_from"], said["finding"]) == ("1.0.0", "memory", "")
    assert said["derived_digest"] and said["config_digest"] and said["tokenizer_digest"]


def test_control_killed_changes_nothing_for_requests_and_the_next_one_takes_over(node: Node) -> None:
    def work() -> None:
        node.agent.kill("control")
        node.agent.until_settled("1.0.0")
        node.driver.activate("2.0.0")
        node.until_load_meets("2.0.0")

    tally = node.under_load(work)
    assert tally.lost == [] and tally.wrong == []
    assert set(tally.versions) == {"1.0.0", "2.0.0"}


def test_a_killed_worker_loses_no_request(node: Node) -> None:
    def work() -> None:
        before = node.agent.kill("worker")
        node.agent.until(lambda: node.agent.child("worker") != before, "another worker")
        node.agent.until_settled("1.0.0")

    tally = node.under_load(work)
    assert tally.lost == [] and tally.wrong == []
    assert tally.ok == tally.sent


def test_a_killed_front_refuses_no_connection_and_comes_back(node: Node) -> None:
    tally = node.under_load(lambda: (node.agent.kill("front"), node.agent.until_settled("1.0.0")), rate=4.0)
    assert tally.wrong == []
    assert not [error for error in tally.lost if error.startswith(("ConnectError", "5"))], tally.lost
    assert len(tally.lost) <= 4, "only what the killed front had in its hands may be lost"


def test_a_file_that_changed_after_publishing_fails_the_rollout_and_leaves_what_serves(node: Node) -> None:
    directory = node.kind.write(node.artifacts / "changed", 9)
    node.driver.publish("9.0.0", node.kind.manifest_of(directory))
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    before = node.agent.get("/raftmeta/v1/vector/search").json()["vector_root"]
    rollout = node.driver.activate("9.0.0")
    assert rollout["status"] == "failed"
    assert rollout["failure"]["code"] == "integrity_mismatch"
    assert node.driver.serving == "1.0.0"
    after = node.agent.get("/raftmeta/v1/vector/search").json()
    assert (after["vector_root"], after["version"]) == (before, "1.0.0")
    node.agent.until_ready()


def test_a_version_that_answers_other_than_its_publisher_said_never_reaches_a_worker(node: Node) -> None:
    directory = node.kind.write(node.artifacts / "probed", 7)
    manifest = node.kind.manifest_of(directory)
    asked = [of_texts(TEXTS, "texts", 0.0)]
    (right,), (other,) = answers(directory, asked), answers(node.artifacts / "v1", asked)
    node.driver.publish("7.0.0", msgspec.structs.replace(manifest, probes=(right,)))
    node.driver.publish("7.0.1", msgspec.structs.replace(manifest, probes=(msgspec.structs.replace(other, name="of-another"),)))

    def work() -> None:
        rollout = node.driver.activate("7.0.1")
        assert (rollout["status"], rollout["failure"]["code"]) == ("failed", "probe_drift"), rollout
        assert "of-another" in rollout["failure"]["detail"]

    tally = node.under_load(work)
    assert tally.lost == [] and set(tally.versions) == {"1.0.0"}
    assert node.driver.activate("7.0.0")["status"] == "done", node.agent.log[-3000:]
    assert "proved" in node.agent.log


def test_a_source_outside_the_artifact_roots_is_refused(node: Node, tmp_path: Path) -> None:
    node.driver.publish("8.0.0", node.kind.manifest_of(node.kind.write(tmp_path / "elsewhere", 8)))
    rollout = node.driver.activate("8.0.0")
    assert rollout["failure"]["code"] == "source_unavailable"
    assert "artifact root" in rollout["failure"]["detail"]


def test_a_second_agent_on_the_same_store_is_refused(node: Node) -> None:
    status, said = node.agent.run_to_end()
    assert status != 0
    assert "in use" in said
    assert node.agent.get("/livez").status_code == 200
