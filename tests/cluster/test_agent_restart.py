"""A whole agent whose processes are killed, one or all, and started again: what serves, what is counted, what its memory holds."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")

from node_agent.device import inventory
from tests.support.agent_kinds import CHAIN
from tests.support.agent_node import Node, running
from tests.support.agent_process import PATIENCE_S, Tally, is_answer_of

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running(tmp_path_factory.mktemp("agent"), CHAIN) as node:
        yield node


@pytest.fixture
def node(started: Node) -> Node:
    started.begin_again()
    return started


def test_no_count_is_lost_or_goes_back_when_any_process_is_killed(node: Node) -> None:
    def rising() -> dict[str, float]:
        lines = [line.rpartition(" ") for line in node.agent.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines if re.search(r"_(total|sum|count|bucket)(\{|$)", name)}

    def ask(times: int) -> None:
        for _ in range(times):
            assert node.ask().status_code == 200

    assert node.driver.activate("2.0.0")["status"] == "done", node.agent.log[-3000:]
    ask(4)
    before = rising()
    for step in ("fetch", "stage", "probe", "warm", "switch", "await_workers"):
        assert before[f'raftmeta_agent_step_seconds_count{{deployment="search",step="{step}"}}'] > 0
    computed = [name for name in before if name.startswith("raftmeta_agent_worker_requests_total") and 'outcome="ok"' in name]
    answered = 'raftmeta_agent_requests_total{deployment="search",status="200"}'
    first = sum(before[name] for name in computed), before[answered]
    for role in ("worker", "control", "front", "worker"):
        killed = node.agent.kill(role)
        ask(2)
        now = rising()  # perhaps before the killed process is back
        assert {name for name, value in before.items() if now.get(name, -1.0) < value} == set(), role
        node.agent.until(lambda killed=killed: killed not in node.agent.children(), "the next life")  # type: ignore[misc]
        node.agent.until_settled("2.0.0")
        before = now
    ask(3)
    now = rising()
    assert {name for name, value in before.items() if now.get(name, -1.0) < value} == set()
    assert now[answered] == first[1] + 11
    assert sum(value for name, value in now.items() if name.startswith("raftmeta_agent_worker_requests_total")) >= first[0] + 11
    text = node.agent.get("/metrics").text
    assert "raftmeta_agent_series_lost_total" in text and not re.search(r"series_lost_total\{.*\} [^0]", text)
    assert not re.search(r"^raftmeta_agent_(private|arena)_bytes[^ ]* 0", text, re.MULTILINE)
    assert "2.0.0" not in text


def test_processes_killed_at_random_moments_of_updates_always_end_in_what_was_decided(node: Node) -> None:
    chance = random.Random(20)
    storm = [("2.0.0", ["control"]), ("3.0.0", ["worker", "control"]), ("1.0.0", ["control"]), ("2.0.0", ["control"])]

    def work() -> None:
        for label, victims in storm:
            rollout = node.driver.begin(label)
            time.sleep(chance.random() * 0.8)
            for role in victims:
                node.agent.kill(role)
            assert node.driver.finish(rollout)["status"] == "done", node.agent.log[-3000:]
            node.agent.until_settled(label)

    tally = node.under_load(work)
    assert tally.lost == [] and tally.wrong == []
    assert node.agent.get("/raftmeta/v1/vector/search").json()["vector_root"] == node.kind.manifest_of(node.artifacts / "v2").vector_root


def test_without_a_quorum_the_node_serves_on_and_says_so_and_starts_again_from_its_pin(node: Node) -> None:
    node.serve("2.0.0")
    node.plane.member.log.switches.no_leader = True
    node.agent.until(lambda: not node.agent.status()["control_plane"]["reachable"], "the loss is noticed")
    assert "raftmeta_agent_control_plane_reachable 0.0" in node.agent.get("/metrics").text
    assert "control_plane_unreachable" in node.agent.log
    assert node.ask().status_code == 200
    node.agent.until_ready()
    node.plane.stop()
    assert node.agent.stop() == 0
    node.agent.start()
    node.agent.until_ready()
    reply = node.ask()
    assert reply.headers["x-raftmeta-version"] == "2.0.0"
    assert "serving_without_control_plane" in node.agent.log
    node.plane.start()
    node.plane.member.log.switches.no_leader = False
    node.agent.until(lambda: node.agent.status()["control_plane"]["reachable"], "the control plane is back")
    node.serve("3.0.0")


def test_nothing_outlives_a_killed_supervisor_and_a_stopped_one_answers_what_it_took(node: Node) -> None:
    children = node.agent.children()
    assert sorted(children.values()) == ["control", "front", "prober", "worker", "worker"]
    node.agent.close()  # SIGKILL
    until(lambda: _all_ended(children))
    node.agent.start()
    node.agent.until_settled("1.0.0")
    children = node.agent.children()

    async def ask_and_stop() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            asking = [asyncio.create_task(http.post(node.agent.url + "/v2/models/search/infer", json=node.kind.body)) for _ in range(5)]
            await asyncio.sleep(0.1)
            os.kill(node.agent.child("prober"), signal.SIGSTOP)  # as one that an idle priority keeps from its turn
            os.kill(node.agent.pid, signal.SIGTERM)
            assert [reply.status_code for reply in await asyncio.gather(*asking)] == [200] * 5

    asyncio.run(ask_and_stop())
    assert node.agent.wait() == 0
    assert _all_ended(children)
    assert "process_killed" not in node.agent.log


def test_after_all_were_killed_the_next_start_serves_from_the_memory_without_a_weight_file_or_a_control_plane(node: Node) -> None:
    blobs, elsewhere = node.agent.store / "blobs", node.agent.store / "elsewhere"
    node.agent.close()  # SIGKILL, and the kernel takes the children along
    node.plane.stop()
    blobs.rename(elsewhere)
    node.artifacts.rename(node.artifacts.with_name("away"))
    try:
        node.agent.start()
        node.agent.until_ready()
        reply = node.ask()
        assert is_answer_of(reply.json(), node.expected["1.0.0"])
        assert node.agent.get("/raftmeta/v1/vector/search").json()["vector_root"]
    finally:
        node.artifacts.with_name("away").rename(node.artifacts)
        for path in blobs.rglob("*"):
            assert path.is_dir(), "nothing was fetched"
        shutil.rmtree(blobs, ignore_errors=True)
        elsewhere.rename(blobs)
        node.plane.start()
    node.agent.until(lambda: node.agent.status()["control_plane"]["reachable"], "the control plane is back")


def test_memory_that_rotted_while_nothing_ran_never_serves_and_is_staged_again(node: Node) -> None:
    node.agent.close()
    (arena,) = node.arena_dir.glob("*.arena")
    until(lambda: state_of(arena) is inventory.ArenaState.KEPT)
    found = inventory.look(arena)
    assert found is not None
    slot = next(number for number, record in enumerate(found.slots) if record.version == "1.0.0")
    with arena.open("r+b") as file:
        place = (1 << 16) + slot * ((found.size_bytes - (1 << 16)) // 2)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    tally = Tally()
    node.agent.start()
    while not (reply := node.ask()).is_success:
        assert reply.status_code == 503, reply.text
        tally.lost.append(reply.text)
        time.sleep(0.05)
    assert is_answer_of(reply.json(), node.expected["1.0.0"])
    assert "vector_mismatch" in node.agent.log


def test_memory_is_kept_at_a_clean_end_and_given_back_when_told(node: Node) -> None:
    assert node.agent.stop() == 0
    assert [item.state for item in inventory.find(node.arena_dir)] == [inventory.ArenaState.KEPT]
    node.agent.start("--purge-arena")
    node.agent.until_settled("1.0.0")
    assert [item.state for item in inventory.find(node.arena_dir)] == [inventory.ArenaState.IN_USE]
    assert node.agent.stop() == 0
    assert list(node.arena_dir.iterdir()) == []
    node.agent.start()
    node.agent.until_settled("1.0.0")


def state_of(arena: Path) -> inventory.ArenaState | None:
    found = inventory.look(arena)
    return None if found is None else found.state


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _all_ended(children: dict[int, str]) -> bool:
    return all(_has_ended(pid) for pid in children)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True
