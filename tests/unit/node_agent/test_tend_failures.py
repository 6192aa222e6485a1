"""Tending one deployment when something is wrong: what is refused before anything serves from it, what is attested, what is tried again."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent import failure
from node_agent.crew import WorkersLag
from node_agent.device import headroom
from node_agent.device.headroom import Limit
from node_agent.fetch import BlobsRotten, FetchFailed
from node_agent.ipc import CallFailed
from node_agent.journal import Proof
from node_agent.messages import Fault
from node_agent.plan import Change, Target
from node_agent.refusal import Refusal
from node_agent.trouble import trouble_of
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Phase, Stage
from tests.support.small_version import make_version
from tests.support.tending import TendScene as Scene
from tests.support.tending import run


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


FAILURES: list[tuple[str, Exception, str]] = [
    ("fetch", FetchFailed("source_unavailable", "no route"), "source_unavailable"),
    ("fetch", FetchFailed("integrity_mismatch", "other bytes"), "integrity_mismatch"),
    ("fetch", RaftmetaError("quota_exceeded", "full"), "resource_exhausted"),
    ("load", CallFailed(Fault(1, 409, "uncovered_tensor", "x is not bound")), "incompatible_layout"),
    ("load", CallFailed(Fault(1, 409, "warmup_failed", "NaN")), "warmup_failed"),
]


@pytest.mark.parametrize(("where", "error", "code"), FAILURES, ids=[code for _, _, code in FAILURES])
def test_a_refusal_is_attested_and_leaves_the_active_slot_byte_identical(scene: Scene, where: str, error: Exception, code: str) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        assert scene.station._arena is not None
        before = bytes(scene.station._arena.slot_view(0)), scene.station.block.active()
        if where == "fetch":
            scene.provider.refuse = error
        else:
            scene.crew.refuse = error
        change = Change("r-2", Phase.PREPARING, scene.target(2), None)
        await scene.rest(scene.goal(1, change))
        if where == "load":
            await scene.rest(scene.goal(1, change._replace(phase=Phase.SYNCING, attested=Stage.PREPARED)))
        assert (scene.last()["stage"], scene.last()["code"]) == ("failed", code)
        assert scene.last()["detail"]
        failed = [item for item in scene.plane.attested if item["stage"] == "failed"]
        assert len(failed) == 1
        assert (bytes(scene.station._arena.slot_view(0)), scene.station.block.active()) == before
        assert scene.tender.look().ready, "what serves is not affected"

    run(work)


def test_a_version_larger_than_the_slot_is_refused_with_the_numbers(scene: Scene, tmp_path: Path) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.versions["4.0.0"] = make_version(tmp_path / "v4", "4.0.0", {"a": b"4" * 900_000})
        change = Change("r-4", Phase.SYNCING, scene.target(4), Stage.PREPARED)
        await scene.rest(scene.goal(1, change))
        assert scene.last()["code"] == "resource_exhausted"
        assert "900096 bytes" in scene.last()["detail"]
        assert scene.tender.look().ready

    run(work)


def test_blobs_that_rotted_in_the_store_are_fetched_again_and_the_rollout_goes_on(scene: Scene) -> None:
    async def work() -> None:
        version = scene.versions["1.0.0"]
        scene.memory.fetch(version)
        tensor = version.manifest.tensors[0]
        path = scene.memory.store.path(tensor.sha256)
        path.chmod(0o640)
        path.write_bytes(b"?" * 100)
        discard = scene.provider.discard_rotten

        async def discard_for_real(target: Target) -> None:
            scene.provider.rotten = True
            scene.memory.store.discard(tensor.sha256)
            await discard(target)

        scene.provider.discard_rotten = discard_for_real  # type: ignore[method-assign]
        change = Change("r-1", Phase.SYNCING, scene.target(1), Stage.PREPARED)
        await scene.rest(scene.goal(None, change))
        assert scene.last()["stage"] == "ready"
        assert scene.provider.fetched == ["1.0.0"]

    run(work)


def test_an_older_order_is_refused_also_after_a_restart(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        scene.close()
        scene.take_over()
        look = await scene.rest(scene.goal(1, revision=6), lambda look: bool(look.trouble))
        assert "older" in look.trouble
        assert scene.station.active == 1
        assert not look.ready

    run(work)


def test_a_committed_version_that_cannot_be_fetched_is_tried_on_while_the_old_one_serves(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.provider.refuse = FetchFailed("source_unavailable", "no route")
        scene.revision += 3
        look = await scene.rest(scene.goal(2), lambda look: "source_unavailable" in look.trouble)
        assert not look.ready and scene.remembered.record.behind
        assert scene.station.active == 0
        assert [item["stage"] for item in scene.plane.attested][-1] == "active", "nothing is attested for what is decided"
        scene.provider.refuse = None
        await scene.rest(scene.goal(2))
        assert scene.tender.look().ready and not scene.remembered.record.behind

    run(work)


def test_an_unreachable_control_plane_delays_an_attestation_and_a_refusal_ends_it(scene: Scene) -> None:
    async def work() -> None:
        scene.plane.refuse = RaftmetaError("no_quorum", "nobody answers")
        change = Change("r-1", Phase.PREPARING, scene.target(1), None)
        look = await scene.rest(scene.goal(None, change), lambda look: "no_quorum" in look.trouble)
        assert look.doing.startswith("attest")
        scene.plane.refuse = RaftmetaError("rollout_not_running", "it was aborted")
        await scene.rest(scene.goal(None, change))
        assert scene.plane.attested == []

    run(work)


@pytest.mark.parametrize(
    ("cause", "expected", "passing"),
    [
        (Refusal("no_headroom", "slot", "1", "2"), "resource_exhausted", False),
        (Refusal("slot_busy", "slot", "1", "2"), "timeout", True),
        (Refusal("engine_unavailable", "server", "1", "2"), "timeout", True),
        (Refusal("no_second_slot", "slot", "1", "2"), "resource_exhausted", False),
        (Refusal("foreign_arena", "slot", "1", "2"), "internal", False),
        (FetchFailed("source_unavailable", ""), "source_unavailable", False),
        (WorkersLag("late"), "timeout", True),
        (RaftmetaError("no_leader", ""), "source_unavailable", True),
        (RaftmetaError("disk_full", ""), "resource_exhausted", False),
        (RaftmetaError("bad_json", ""), "internal", False),
        (MemoryError(), "resource_exhausted", False),
        (BlobsRotten(""), "integrity_mismatch", True),
        (OSError(errno.EIO, "Input/output error"), "internal", True),
        (OSError(errno.ENOSPC, "No space left on device"), "resource_exhausted", True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "resource_exhausted", True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "resource_exhausted", True),
    ],
)
def test_every_kind_of_trouble_has_a_failure_class(cause: Exception, expected: str, passing: bool) -> None:
    trouble = trouble_of(cause, "fill")
    assert (trouble.failure.failure_class, trouble.passing) == (expected, passing)


def test_a_refusal_in_a_worker_keeps_its_phase_subject_expectation_and_finding() -> None:
    found = failure.make("uncovered_tensor", "bind", "tensors of the version", "each bound", "h.1.weight")
    trouble = trouble_of(CallFailed(Fault(1, 409, found.kind, found.detail, found)), "warm")
    assert trouble.failure == found
    assert found.detail == "uncovered_tensor in bind: tensors of the version: expected each bound, found h.1.weight"


def test_files_are_verified_before_workers_make_modules_of_them(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        assert scene.provider.readied == ["1.0.0"]
        await scene.roll(1, 2)
        assert scene.provider.readied == ["1.0.0", "2.0.0"]
        scene.provider.not_ready = FetchFailed("source_unavailable", "vocab.txt rotted and nobody has it")
        loads = list(scene.crew.loads)
        change = Change("r-9", Phase.SYNCING, scene.target(3), Stage.PREPARED)
        look = await scene.rest(scene.goal(2, change))
        assert (scene.last()["stage"], scene.last()["code"]) == ("failed", "source_unavailable")
        assert scene.crew.loads == loads and look.ready, "what serves goes on"

    run(work)


def test_files_that_a_worker_finds_changed_are_mended_and_tried_again(scene: Scene) -> None:
    async def work() -> None:
        fault = Fault(1, 409, "files_changed", "vocab.txt has other bytes")
        assert trouble_of(CallFailed(fault), "warm").passing
        scene.crew.refuse = CallFailed(fault)
        change = Change("r-1", Phase.SYNCING, scene.target(1), Stage.PREPARED)
        await scene.rest(scene.goal(None, change), lambda look: len(scene.crew.loads) > 1)
        scene.crew.refuse = None
        await scene.rest(scene.goal(None, change))
        assert scene.last()["stage"] == "ready"
        assert len(scene.provider.readied) == len(scene.crew.loads) > 2

    run(work)


def test_a_version_is_tried_once_before_the_workers_make_modules_of_it_and_the_proof_is_kept(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        await scene.roll(2, 1)
        assert scene.crew.proved == ["1.0.0", "2.0.0"], "a roll-back goes on what was seen before"
        scene.close()
        scene.take_over()
        assert scene.remembered.proof(scene.target(1), "kernel 1") is not None
        assert scene.remembered.proof(scene.target(1), "kernel 2") is None
        assert [proof.warm_ms for proof in scene.remembered.record.proofs] == [12, 12]

    run(work)


def test_a_version_that_answers_otherwise_fails_its_rollout_and_reaches_no_worker(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        loads = list(scene.crew.loads)
        found = failure.make("probe_drift", "probe", "probe 'p', output 'y'", "cosine >= 0.999", "0.2")
        scene.crew.drift = CallFailed(Fault(1, 409, found.kind, found.detail, found))
        change = Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)
        look = await scene.rest(scene.goal(1, change))
        assert (scene.last()["stage"], scene.last()["code"]) == ("failed", "probe_drift")
        assert "cosine >= 0.999" in scene.last()["detail"]
        assert scene.crew.loads == loads and look.ready
        assert scene.remembered.record.change.failure == found

    run(work)


def test_proofs_are_bounded(scene: Scene) -> None:
    for number in range(10):
        scene.remembered.note_proof(Proof(str(number), "kernel 1", 1, 1, {}, ()))
    assert [proof.checksum for proof in scene.remembered.record.proofs] == ["6", "7", "8", "9"]


def test_a_version_whose_modules_would_not_fit_beside_the_arena_is_refused_with_the_numbers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        assert scene.remembered.record.proofs[0].peak_bytes == 345
        monkeypatch.setattr(headroom, "find_memory", lambda: iter([Limit("the machine", 689), Limit("control group /a", 690)]))
        change = Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)
        look = await scene.rest(scene.goal(1, change))
        assert scene.last()["code"] == "resource_exhausted" and look.ready
        detail = scene.last()["detail"]
        assert "2 processes of 345 bytes: expected 690 bytes beside the arena, found 689 bytes left in the machine" in detail
        assert "control group" not in detail

    run(work)
