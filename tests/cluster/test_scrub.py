"""Memory of a node that serves under load is damaged from outside: found, named, mended, and no answer is made of half a repair."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

from tests.support.agent_process import PATIENCE_S, AgentProcess, Driver
from tests.support.fake_control_plane import FakeControlPlane
from tests.support.memory_damage import ServingSlot
from tests.support.shm import shm_directory
from tests.support.table_version import BAD, BLOCKS, GOOD, NAME, block_of, body, manifest_of, write_table

pytestmark = pytest.mark.cluster

INTERVAL_S = 0.4
BLOCK = 5  # that is damaged and asked for
URL = "/v2/models/search/infer"


class TableNode:
    def __init__(self, root: Path, arena_dir: Path, **settings: object) -> None:
        self.arena_dir = arena_dir
        self.plane = FakeControlPlane()
        self.plane.start()
        given = {"workers": 2, "engines": ["torch_module"], "scrub_interval_s": INTERVAL_S} | settings
        self.agent = AgentProcess(root / "node", arena_dir, self.plane.url, **given)
        self.driver = Driver(self.plane)
        self.driver.publish("1.0.0", manifest_of(write_table(root / "artifacts" / "v1")))
        self.driver.declare("n1")
        self.agent.start()
        assert self.driver.activate("1.0.0")["status"] == "done", self.agent.log[-3000:]
        self.at_rest()

    def at_rest(self) -> None:
        self.agent.until_settled("1.0.0")
        self.agent.until_ready()

    def damage(self, *blocks: int) -> None:
        slot = ServingSlot(self.arena_dir)
        for block in blocks or (BLOCK,):
            slot.write(NAME, block * len(block_of(BAD)), block_of(BAD))

    def is_whole(self) -> bool:
        size, slot = len(block_of(GOOD)) * BLOCKS, ServingSlot(self.arena_dir)
        return NAME in slot.places and slot.read(NAME, 0, size) == block_of(GOOD) * BLOCKS

    def findings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.agent.status()["deployments"]["search"]["scrub"]["findings"]
        return found

    def ask(self) -> tuple[float, ...]:
        reply = httpx.post(self.agent.url + URL, json=body(BLOCK), timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return tuple(reply.json()["outputs"][0]["data"])

    def queued(self) -> float:
        lines = self.agent.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("raftmeta_agent_queued_requests "))

    def close(self) -> None:
        self.agent.close()
        self.plane.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TableNode]:
    with shm_directory() as arena_dir:
        node = TableNode(tmp_path_factory.mktemp("scrub"), arena_dir)
        try:
            yield node
        finally:
            node.close()


@pytest.fixture
def node(started: TableNode) -> TableNode:
    started.at_rest()
    return started


class Load:
    """Asks all the time. `answers`: (began, ended, first number, last number) by the monotonic clock; `lost`: everything else."""

    def __init__(self, url: str, rate: float = 40.0) -> None:
        self.answers: list[tuple[float, float, float, float]] = []
        self.lost: list[str] = []
        self._url, self._rate = url, rate

    @contextmanager
    def running(self) -> Iterator[Load]:
        stop = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._run(stop)))
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()

    async def _run(self, stop: threading.Event) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S) as http:
            tasks: set[asyncio.Task[None]] = set()
            while not stop.is_set():
                tasks.add(asyncio.create_task(self._ask(http)))
                await asyncio.sleep(1 / self._rate)
            await asyncio.gather(*tasks)

    async def _ask(self, http: httpx.AsyncClient) -> None:
        began = time.monotonic()
        try:
            reply = await http.post(URL, json=body(BLOCK))
        except httpx.HTTPError as cause:
            self.lost.append(f"{type(cause).__name__}: {cause}")
            return
        if reply.status_code == 200:
            self.answers.append((began, time.monotonic(), *reply.json()["outputs"][0]["data"]))
        else:
            self.lost.append(f"{reply.status_code} {reply.text[:200]}")


def until(holds: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_damage_under_load_is_named_and_mended_without_a_lost_request_or_an_answer_from_half_a_repair(node: TableNode) -> None:
    writes: list[tuple[float, float]] = []
    with Load(node.agent.url).running() as load:
        for _ in range(6):
            before = time.monotonic()
            node.damage()
            writes.append((before, time.monotonic()))
            until(node.is_whole, f"the block is as it was; {node.agent.log[-2000:]}")
            mended = time.monotonic()
            node.at_rest()
            time.sleep(0.2)
            late = [answer for answer in load.answers if answer[0] > mended and answer[2:] != (GOOD, GOOD)]
            assert late == []
    assert load.lost == [] and len(load.answers) > 50
    met = [answer for answer in load.answers if not any(began <= answer[1] and answer[0] <= ended for began, ended in writes)]
    assert {answer[2:] for answer in met} <= {(GOOD, GOOD), (BAD, BAD)}, "never half of each"
    found = [finding for finding in node.findings() if finding["kind"] == "memory"]
    assert len(found) >= 6
    assert {(each["tensor"], each["block"], each["remedy"]) for each in found} == {(NAME, BLOCK, "repaired")}


def test_more_damage_than_is_written_in_place_is_staged_into_the_other_slot_while_requests_wait(node: TableNode) -> None:
    slot = ServingSlot(node.arena_dir).slot
    with Load(node.agent.url, 10.0).running() as load:
        node.damage(*range(20))
        until(lambda: ServingSlot(node.arena_dir).slot != slot, f"the other slot serves; {node.agent.log[-3000:]}")
        node.at_rest()
        assert node.ask() == (GOOD, GOOD)
    assert load.lost == [], node.agent.log[-3000:]
    assert node.is_whole() and "memory_given_up" in node.agent.log
    assert 'raftmeta_agent_scrub_repairs_total{deployment="search",outcome="restaged"} 1.0' in node.agent.get("/metrics").text


def test_the_blob_of_a_damaged_block_is_fetched_again_when_it_rotted_too(node: TableNode) -> None:
    for path in (node.agent.store / "blobs").rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            path.chmod(0o640)
            path.write_bytes(bytes(path.stat().st_size))
    node.damage()
    until(node.is_whole, f"the block is as it was; {node.agent.log[-2000:]}")
    node.at_rest()
    assert "blob_fetched_again" in node.agent.log and node.ask() == (GOOD, GOOD)


@contextmanager
def held(node: TableNode) -> Iterator[list[threading.Thread]]:
    """Requests are held for damage that cannot be mended yet: a worker stands still with a request in its hands. Ends with it going on."""
    worker = node.agent.child("worker")
    os.kill(worker, signal.SIGSTOP)
    answers: list[tuple[float, ...]] = []

    def ask() -> None:
        with suppress(httpx.HTTPError):  # a front that is killed drops what it had in its hands
            answers.append(node.ask())

    asking = [threading.Thread(target=ask) for _ in range(2)]
    try:
        for thread in asking:
            thread.start()
        until(lambda: len(answers) == 1, "one worker answers and the other one has a request")
        node.damage()
        until(lambda: "is damaged" in node.agent.get("/v2/health/ready").text, f"it is found; {node.agent.log[-2000:]}")
        waiting = threading.Thread(target=ask)
        waiting.start()
        until(lambda: node.queued() >= 1, "a request waits although a worker is free")
        yield [waiting]
    finally:
        os.kill(worker, signal.SIGCONT)
        for thread in asking:
            thread.join()
    waiting.join()


def test_control_killed_while_it_holds_requests_keeps_nobody_waiting_and_the_next_one_finds_the_damage(node: TableNode) -> None:
    with held(node) as (waiting,):
        node.agent.kill("control")
        waiting.join(5.0)
        assert not waiting.is_alive(), "it was answered: a dead control process holds nothing"
    until(node.is_whole, f"the memory is as it was; {node.agent.log[-2000:]}")
    node.at_rest()
    assert node.ask() == (GOOD, GOOD)


def test_control_that_hangs_while_it_holds_requests_loses_its_lease(node: TableNode) -> None:
    with held(node) as (waiting,):
        control = node.agent.child("control")
        os.kill(control, signal.SIGSTOP)
        try:
            waiting.join(5.0)
            assert not waiting.is_alive()
            assert "is damaged" in node.agent.get("/v2/health/ready").text, "and the node stays out of readiness"
        finally:
            os.kill(control, signal.SIGCONT)
    until(node.is_whole, f"the memory is as it was; {node.agent.log[-2000:]}")
    node.at_rest()


def test_a_front_that_is_killed_while_it_holds_requests_is_replaced_and_the_damage_mended(node: TableNode) -> None:
    with held(node):
        before = node.agent.kill("front")
        node.agent.until(lambda: before not in node.agent.children(), "another front")
    until(node.is_whole, f"the memory is as it was; {node.agent.log[-2000:]}")
    node.at_rest()
    assert node.ask() == (GOOD, GOOD)
