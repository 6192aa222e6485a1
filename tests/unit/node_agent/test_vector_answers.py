"""What control answers of the memory that serves: all deployments at once, how old an answer may be, digests page by page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.vector import Words, block_checks, unpack_blocks
from node_agent.messages import Fault, GetDigests, GetVector, GetVectors, Json, Reply
from node_agent.report import NodeFacts
from node_agent.tend import Tender
from node_agent.vector_answers import VectorAnswers
from raftmeta.core import block_file
from raftmeta.core.manifest import config_digest
from tests.support.small_version import with_blocks
from tests.support.tending import TendScene, run

FACTS = NodeFacts("n1", "a", "boot-1", "http://n1")


@dataclass
class Clock:
    now_ns: int = 10**12

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class Node:
    scene: TendScene
    clock: Clock = field(default_factory=Clock)
    tenders: dict[str, Tender] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scene.memory.places = self.scene.memory.places.__class__(**(self.scene.memory.places.__dict__ | {"clock_ns": self.clock}))
        self.scene.close()
        self.scene.take_over()
        self.tenders["search"] = self.scene.tender
        self.answers = VectorAnswers(self, FACTS, self.scene.memory.store, self.clock)

    async def reply(self, call: GetVector | GetVectors | GetDigests) -> Reply:
        return await self.answers.answer(call)

    async def ask(self, call: GetVector | GetVectors | GetDigests) -> Any:
        reply = await self.reply(call)
        assert isinstance(reply, Json), reply
        return msgspec.json.decode(reply.body)

    async def all(self, *names: str, max_age_ms: int | None = None, wait_s: float = 30.0) -> Mapping[str, Any]:
        return await self.ask(GetVectors(1, names, max_age_ms, wait_s))  # type: ignore[no-any-return]

    def flip(self) -> None:
        arena, slot = self.scene.station._arena, self.scene.station.active
        assert arena is not None and slot is not None
        arena._slot(slot)[5] ^= 1

    def reads(self) -> int:
        return self._reads

    def count_reads(self) -> None:
        self._reads, vector = 0, self.scene.station.vector

        def counted(tensor: str) -> Any:
            self._reads += 1
            return vector(tensor)

        self.scene.station.vector = counted  # type: ignore[method-assign]


@pytest.fixture
def node(tmp_path: Path, shm: Path) -> Iterator[Node]:
    made = Node(TendScene(tmp_path, shm))
    yield made
    made.scene.close()


def test_one_answer_has_the_roots_of_all_deployments_and_a_fault_for_each_that_there_is_not(node: Node) -> None:
    async def work() -> None:
        assert (await node.all())["faults"]["search"]["code"] == "starting"
        await node.scene.roll(None, 1)
        body = await node.all()
        target, manifest = node.scene.target(1), node.scene.versions["1.0.0"].manifest
        assert (body["node"], body["zone"], body["boot_id"], body["active_models"], body["faults"]) == ("n1", "a", "boot-1", 1, {})
        seen = body["vectors"]["search"]
        assert (seen["model"], seen["version"], seen["checksum"]) == ("encoder", "1.0.0", target.checksum)
        assert (seen["vector_root"], seen["vector_from"], seen["config_digest"]) == (target.vector_root, "memory", config_digest(manifest))
        assert (seen["slot"], seen["switching"]) == (0, False)
        single = await node.ask(GetVector(1, "search", False, ""))
        assert single | {"computed_at_ms": 0} == {
            **{name: body[name] for name in ("node", "zone", "boot_id", "active_models")},
            "deployment": "search",
            **seen,
            "computed_at_ms": 0,
        }
        assert (await node.all("other", "search"))["faults"]["other"]["code"] == "unknown_deployment"

    run(work)


def test_a_deployment_that_cannot_be_read_takes_no_other_answer_along(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)

        class Broken:
            remembered, look = node.scene.tender.remembered, node.scene.tender.look

            class serving:
                slots = staticmethod(node.scene.tender.serving.slots)

                @staticmethod
                def vector() -> None:
                    raise OSError(5, "gone")

        node.tenders["broken"] = Broken  # type: ignore[assignment]
        body = await node.all()
        assert list(body["vectors"]) == ["search"]
        assert body["faults"]["broken"]["code"] == "unreadable" and "gone" in body["faults"]["broken"]["detail"]

    run(work)


def test_nothing_is_read_any_more_once_nobody_waits_for_it(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        node.tenders |= {"late": node.scene.tender, "later": node.scene.tender}
        vector = node.scene.station.vector

        def slow(tensor: str) -> Any:
            node.clock.now_ns += 20 * 10**9
            return vector(tensor)

        node.scene.station.vector = slow  # type: ignore[method-assign]
        body = await node.all("search", "late", "later")
        assert sorted(body["vectors"]) == ["late", "search"]
        assert body["faults"]["later"]["code"] == "timed_out"
        reply = await node.reply(GetDigests(1, "search", "", 1 << 20, -1.0))
        assert isinstance(reply, Fault) and reply.code == "starting"

    run(work)


def test_an_earlier_reading_answers_only_who_says_how_old_it_may_be_and_only_while_it_is_that_young(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        node.count_reads()
        assert (await node.all(max_age_ms=60_000))["vectors"]["search"]["age_ms"] == 0
        assert node.reads() == 1, "nothing was read whole by this process yet"
        node.clock.now_ns += 60_000 * 10**6
        seen = (await node.all(max_age_ms=60_000))["vectors"]["search"]
        assert (seen["age_ms"], seen["vector_root"], node.reads()) == (60_000, node.scene.target(1).vector_root, 1)
        await node.all()
        assert node.reads() == 2, "without an age it is read now"
        node.clock.now_ns += 60_001 * 10**6
        assert (await node.all(max_age_ms=60_000))["vectors"]["search"]["age_ms"] == 0
        assert node.reads() == 3

    run(work)


def test_a_reading_that_did_not_compare_answers_nobody_later(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        await node.all()
        node.count_reads()
        node.flip()
        assert (await node.all())["vectors"]["search"]["vector_root"] != node.scene.target(1).vector_root
        bad = (await node.all(max_age_ms=60_000))["vectors"]["search"]
        assert bad["vector_root"] != node.scene.target(1).vector_root, "the older reading that compared speaks for nobody"
        node.flip()
        assert (await node.all(max_age_ms=60_000))["vectors"]["search"]["vector_root"] == node.scene.target(1).vector_root
        assert node.reads() == 3

    run(work)


def test_a_reading_of_another_content_of_the_slot_answers_nobody(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        await node.all()
        await node.scene.roll(1, 2)
        assert node.scene.station.proven() is None
        seen = (await node.all(max_age_ms=60_000))["vectors"]["search"]
        assert (seen["version"], seen["vector_root"]) == ("2.0.0", node.scene.target(2).vector_root)
        await node.scene.roll(2, 1)
        await node.all()
        await node.scene.roll(1, 2)
        await node.scene.roll(2, 3)
        assert node.scene.station.active == 0 and node.scene.station.proven() is None, "the slot of that reading holds something else now"
        node.scene.close()
        node.scene.take_over()
        assert node.scene.station.proven() is None, "another process read it"
        node.scene.station.note_whole(None)
        assert node.scene.station.proven() is None

    run(work)


def test_questions_that_come_while_the_slot_is_read_share_the_next_reading_and_keep_no_other_thread(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        go, begun, vector = threading.Event(), threading.Event(), node.scene.station.vector
        began: list[int] = []

        def slow(tensor: str) -> Any:
            began.append(1)
            begun.set()
            assert go.wait(10)
            return vector(tensor)

        node.scene.station.vector = slow  # type: ignore[method-assign]
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        first = asyncio.create_task(node.reply(GetVector(1, "search", False, "")))
        assert await asyncio.to_thread(begun.wait, 10), "a reading takes no thread that others use"
        more = [asyncio.create_task(node.reply(GetVector(number, "search", False, ""))) for number in range(2, 42)]
        several = asyncio.create_task(node.all("search", "search"))
        await asyncio.sleep(0.01)
        go.set()
        assert isinstance(await first, Json)
        assert [reply.number for reply in await asyncio.gather(*more)] == list(range(2, 42))
        assert list((await several)["vectors"]) == ["search"] and len(began) == 2

    run(work)


def words_of(reply: Reply) -> Words:
    assert isinstance(reply, Json), reply
    return unpack_blocks(base64.b64decode(msgspec.json.decode(reply.body)["blocks"]))


def test_block_checks_are_those_of_one_tensor_in_memory_or_as_they_were_published(node: Node) -> None:
    async def work() -> None:
        version = node.scene.versions["1.0.0"] = with_blocks(node.scene.versions["1.0.0"])
        in_memory, published = GetVector(1, "search", False, "a"), GetVector(1, "search", False, "a", published=True)
        assert (await node.reply(published)).code == "starting" == (await node.reply(in_memory)).code  # type: ignore[union-attr]
        await node.scene.roll(None, 1)
        right = block_checks(b"1" * 100)
        assert words_of(await node.reply(in_memory)).tolist() == words_of(await node.reply(published)).tolist() == right.tolist()
        node.flip()
        assert words_of(await node.reply(in_memory)).tolist() != right.tolist()
        assert words_of(await node.reply(published)).tolist() == right.tolist()
        assert node.scene.station.whole is None, "one tensor says nothing of the whole slot"
        nothing = await node.reply(GetVector(1, "search", False, "b", published=True))
        assert isinstance(nothing, Fault) and (nothing.status, nothing.code) == (404, "not_found")
        file = block_file.find(version.manifest)
        assert file is not None
        path = node.scene.memory.store.path(file.sha256)
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
        broken = await node.reply(GetVector(1, "search", False, "big", published=True))
        assert isinstance(broken, Fault) and (broken.status, broken.code) == (503, "unreadable")
        path.unlink()
        gone = await node.reply(published)
        assert isinstance(gone, Fault) and (gone.status, gone.code) == (404, "not_found")

    run(work)


def test_of_a_version_without_a_file_of_block_checks_none_were_published(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        reply = await node.reply(GetVector(1, "search", False, "a", published=True))
        assert isinstance(reply, Fault) and (reply.status, reply.code) == (404, "not_found") and "1.0.0" in reply.detail

    run(work)


def test_digests_come_page_by_page_and_are_those_of_the_memory(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        first = await node.ask(GetDigests(1, "search", "", 200, 30.0))
        assert first["sha256"] == {"a": hashlib.sha256(b"1" * 100).hexdigest()} and first["following"] == "a"
        second = await node.ask(GetDigests(1, "search", "a", 200, 30.0))
        assert second["sha256"] == {"big": hashlib.sha256(b"x" * 70_000).hexdigest()} and second["following"] == ""
        seen = (await node.all())["vectors"]["search"]
        for page in (first, second):
            assert {name: page[name] for name in ("checksum", "slot", "epoch")} == {
                name: seen[name] for name in ("checksum", "slot", "epoch")
            }
            assert (page["node"], page["boot_id"], page["deployment"]) == ("n1", "boot-1", "search")
        node.flip()
        assert (await node.ask(GetDigests(1, "search", "", 200, 30.0)))["sha256"] != first["sha256"]

    run(work)


def test_digests_are_refused_where_there_is_nothing_to_read(node: Node) -> None:
    async def work() -> None:
        async def code(call: GetDigests) -> str:
            reply = await node.reply(call)
            assert isinstance(reply, Fault)
            return reply.code

        assert await code(GetDigests(1, "search", "", 1, 30.0)) == "starting"
        assert await code(GetDigests(1, "other", "", 1, 30.0)) == "unknown_deployment"

    run(work)


def test_a_switch_while_digests_are_computed_leaves_them_unsaid(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        station = node.scene.station
        assert station.digests("", 1 << 20, lambda: False) is not None
        block_active = station.block.active
        words = iter([block_active(), (1, block_active()[1] + 1)])
        station.block.active = lambda: next(words)  # type: ignore[method-assign]
        assert station.digests("", 1 << 20, lambda: False) is None

    run(work)


def test_a_call_that_is_cancelled_reads_no_further(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        asked: list[Any] = []
        going = asyncio.Event()
        loop = asyncio.get_running_loop()

        def digests(after: str, limit_bytes: int, given_up: Any) -> None:
            loop.call_soon_threadsafe(going.set)
            while not given_up():
                pass
            asked.append(given_up())

        node.scene.station.digests = digests  # type: ignore[assignment]
        call = asyncio.create_task(node.reply(GetDigests(1, "search", "", 1, 30.0)))
        await going.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(10):
            while not asked:
                await asyncio.sleep(0.005)

    run(work)


def test_the_configuration_is_that_of_the_files_as_they_lie_there(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        published = config_digest(node.scene.versions["1.0.0"].manifest)
        file = node.scene.memory.store.version_dir(node.scene.target(1).checksum) / "config.json"
        before = file.read_bytes()
        for max_age_ms in (None, 60_000):
            file.chmod(0o640)
            file.write_bytes(before[::-1])
            assert (await node.all(max_age_ms=max_age_ms))["vectors"]["search"]["config_digest"] != published
            file.write_bytes(before)
            assert (await node.all(max_age_ms=max_age_ms))["vectors"]["search"]["config_digest"] == published
        file.unlink()
        assert (await node.all())["vectors"]["search"]["config_digest"] != published

    run(work)
