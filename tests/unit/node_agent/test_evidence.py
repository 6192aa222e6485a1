"""What a node tells of its bytes, and when: at each change and now and then, in the order of its clock, and only what it compared."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from api.schemas.bodies import EvidenceBody
from node_agent.beside import Beside
from node_agent.device.port import SlotRecord, SlotState
from node_agent.evidence import AGAIN_MS, REFUSED_MS, SOON_MS, Teller, derived_digest
from node_agent.plan import Order
from node_agent.serving import Evidence, VectorFrom
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest, config_digest, tokenizer_digest
from tests.support.small_version import make_version

RECORD = SlotRecord(SlotState.VERIFIED, "1.0.0", "c" * 64, vector_root="b" * 64)
FOUND = Evidence(RECORD, 0, 1, 0, {"position_ids": "0" * 64}, VectorFrom.MEMORY, verified_age_ms=40)


class Scene:
    """One deployment of a node, and who is told of it."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        self.now_ms = 1_000_000
        self.found: Evidence | None = None
        self.fence = Order(1, 7)
        self.fault: RaftmetaError | None = None
        self.told: list[Mapping[str, Any]] = []
        self._manifest = manifest
        self.directory = Path("/nonexistent")
        self.teller = Teller("n1", "boot-1", Beside(self), lambda: self.now_ms * 1_000_000)
        self.is_here = True
        self.manifest_fault: Exception | None = None

    def manifest(self, checksum: str) -> Manifest | None:
        if self.manifest_fault is not None:
            raise self.manifest_fault
        return self._manifest

    def version_dir(self, checksum: str) -> Path:
        return self.directory

    async def record_evidence(self, node: str, evidence: Mapping[str, Any]) -> None:
        assert node == "n1"
        if self.fault is not None:
            raise self.fault
        self.told.append(evidence)

    def look(self, after_ms: int = 1_000) -> int:
        """One look after a while; how many words were told by it."""
        before = len(self.told)
        self.now_ms += after_ms
        record = SimpleNamespace(name="search", fence=self.fence)
        tended = SimpleNamespace(remembered=SimpleNamespace(record=record), serving=SimpleNamespace(evidence=lambda: self.found))
        asyncio.run(self.teller.tell(self, {"search": tended} if self.is_here else {}))
        return len(self.told) - before


def test_nothing_is_told_before_something_was_compared_and_then_once() -> None:
    scene = Scene()
    assert [scene.look(), scene.look()] == [0, 0]
    scene.found = FOUND
    assert [scene.look(), scene.look(), scene.look()] == [1, 0, 0]
    word = scene.told[0]
    assert msgspec.convert(word, EvidenceBody).checksum == "c" * 64
    assert (word["told_ms"], word["verified_age_ms"], word["boot_id"]) == (scene.now_ms - 2_000, 40, "boot-1")
    assert (word["generation"], word["order_revision"]) == (1, 7)
    assert word["derived_digest"] == derived_digest({"position_ids": "0" * 64}) != derived_digest({"position_ids": "1" * 64})


@pytest.mark.parametrize("change", ["version", "order", "derived", "finding", "nothing serves"])
def test_every_change_is_told_at_the_next_look(change: str) -> None:
    scene = Scene()
    scene.found = FOUND
    scene.look()
    if change == "version":
        scene.found = FOUND._replace(record=msgspec.structs.replace(RECORD, version="2.0.0"))
    elif change == "order":
        scene.fence = Order(1, 8)
    elif change == "derived":
        scene.found = FOUND._replace(derived={})
    elif change == "finding":
        scene.found = FOUND._replace(finding="integrity_mismatch")
    else:
        scene.found = None
    assert [scene.look(), scene.look()] == [1, 0]
    word = msgspec.convert(scene.told[-1], EvidenceBody)
    assert (word.version, word.checksum, word.vector_root) == (
        ("", "", "") if change == "nothing serves" else (word.version, "c" * 64, "b" * 64)
    )
    assert word.told_ms > scene.told[0]["told_ms"]


def test_the_same_is_told_again_only_now_and_then() -> None:
    scene = Scene()
    scene.found = FOUND
    scene.look()
    scene.found = FOUND._replace(verified_age_ms=0)
    assert scene.look(SOON_MS) == 1, "the first word of a boot, behind which one of the boot before it may have come"
    assert scene.look(AGAIN_MS - 1) == 0
    assert scene.look(1) == 1
    assert scene.told[-1]["verified_age_ms"] == 0


def test_a_word_that_reached_nobody_is_told_again_at_the_next_look() -> None:
    scene = Scene()
    scene.found, scene.fault = FOUND, RaftmetaError("no_leader", "an election runs")
    assert scene.look() == 0
    scene.fault = None
    assert scene.look() == 1


def test_a_word_that_is_refused_waits_for_a_minute_and_another_one_does_not() -> None:
    scene = Scene()
    scene.found, scene.fault = FOUND, RaftmetaError("unsupported_command", "feature level 1")
    scene.look()
    scene.fault = None
    assert scene.look(REFUSED_MS - 1) == 0
    assert scene.look(1) == 1
    scene.fault = RaftmetaError("forbidden", "no role")
    scene.found = None
    scene.look()
    scene.found, scene.fault = FOUND, None
    assert scene.look() == 1


def test_two_words_never_have_one_time() -> None:
    scene = Scene()
    scene.found = FOUND
    scene.look()
    scene.found = None
    assert [scene.look(0), scene.look(1)] == [0, 1]


def test_a_deployment_that_left_and_came_back_is_told_anew() -> None:
    scene = Scene()
    scene.found = FOUND
    scene.look()
    scene.is_here = False
    scene.look()
    scene.is_here = True
    assert scene.look() == 1


def test_what_a_version_carries_beside_its_weights_is_told_by_digest(tmp_path: Path) -> None:
    manifest = make_version(tmp_path / "v", "1.0.0", {"a": b"x" * 8}).manifest
    (tmp_path / "v" / "w.safetensors").unlink()
    scene = Scene(manifest)
    scene.directory = tmp_path / "v"
    scene.found = FOUND
    scene.look()
    assert scene.told[0]["config_digest"] == config_digest(manifest)
    assert scene.told[0]["tokenizer_digest"] == tokenizer_digest(manifest)
    content = (tmp_path / "v" / "config.json").read_bytes()
    (tmp_path / "v" / "config.json").write_bytes(content[::-1])
    assert scene.look() == 1, "other bytes of the same size"
    changed = scene.told[-1]["config_digest"]
    (tmp_path / "v" / "extra.json").write_bytes(b"{}")
    assert scene.look() == 1
    assert len({config_digest(manifest), changed, scene.told[-1]["config_digest"]}) == 3
    (tmp_path / "v" / "extra.json").unlink()
    (tmp_path / "v" / "config.json").write_bytes(content)
    assert scene.look() == 1 and scene.told[-1]["config_digest"] == config_digest(manifest)


@pytest.mark.parametrize("fault", [OSError("no disk"), RaftmetaError("integrity", "damaged")])
def test_a_manifest_that_cannot_be_read_keeps_the_word_back_and_ends_nothing(fault: Exception) -> None:
    scene = Scene()
    scene.found, scene.manifest_fault = FOUND, fault
    assert scene.look() == 0
    scene.manifest_fault = None
    assert scene.look() == 1


def test_a_deployment_that_leaves_while_another_one_is_told_is_not_asked() -> None:
    scene = Scene()
    tended: dict[str, Any] = {}

    def gone() -> Evidence:
        raise AssertionError("asked")

    def first() -> Evidence:
        del tended["b"]
        return FOUND

    record = SimpleNamespace(name="a", fence=Order(1, 7))
    for name, found in (("a", first), ("b", gone)):
        tended[name] = SimpleNamespace(remembered=SimpleNamespace(record=record), serving=SimpleNamespace(evidence=found))
    asyncio.run(scene.teller.tell(scene, tended))
    assert len(scene.told) == 1


def test_the_teller_goes_on_until_it_is_cancelled() -> None:
    scene = Scene()
    looked = 0

    def tended() -> dict[str, Any]:
        nonlocal looked
        looked += 1
        return {}

    async def work() -> None:
        async with asyncio.timeout(10):
            task = asyncio.create_task(scene.teller.run(scene, tended, look_s=0.001))
            while looked < 3:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(work())
