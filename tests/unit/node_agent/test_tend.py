"""Tending one deployment over real shared memory: what is attested, what is refused, what survives a crash of control."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node_agent import failure
from node_agent.crew import WorkersLag
from node_agent.device import headroom
from node_agent.device.headroom import Limit
from node_agent.fetch import BlobsRotten, FetchFailed
from node_agent.ipc import CallFailed
from node_agent.journal import Proof
from node_agent.messages import Fault
from node_agent.plan import Change, Goal, Order, Target
from node_agent.refusal import Refusal
from node_agent.report import Look
from node_agent.tend import Means, Tender
from node_agent.trouble import trouble_of
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Phase, SideName, Stage
from tests.support.agent_fakes import FakeCrew, FakePlane, FakeProvider
from tests.support.agent_memory import NodeMemory
from tests.support.small_version import make_version


class Scene:
    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.memory = NodeMemory(root / "store", arena_dir)
        big = b"x" * 70_000
        tensors = {1: {"a": b"1" * 100, "big": big}, 2: {"a": b"2" * 100, "big": big}, 3: {"a": b"3" * 100, "big": big}}
        self.versions = {f"{n}.0.0": make_version(root / f"v{n}", f"{n}.0.0", value) for n, value in tensors.items()}
        self.crew = FakeCrew()
        self.provider = FakeProvider(self.memory, self.versions)
        self.plane = FakePlane()
        self.revision = 3
        self.take_over()

    def target(self, number: int) -> Target:
        return self.versions[f"{number}.0.0"].target

    def take_over(self) -> None:
        """A control process begins, as after a crash of the one before."""
        self.station = self.memory.station()
        self.crew.station = self.station
        self.tender = Tender(self.station, Means("n1", "boot-1", self.plane, self.provider, self.crew, "kernel 1"))

    def close(self) -> None:
        self.station.close()

    def goal(self, committed: int | None, change: Change | None = None, revision: int | None = None) -> Goal:
        target = None if committed is None else self.target(committed)
        return Goal("search", SideName.PRIMARY, target, Order(1, self.revision if revision is None else revision), change)

    async def rest(self, goal: Goal, holds: Callable[[Look], bool] | None = None) -> Look:
        """Let the tender work until this holds, by default until nothing is left to do."""
        self.tender.want(goal)
        task = asyncio.create_task(self.tender.run())
        try:
            async with asyncio.timeout(15):
                while True:
                    await asyncio.sleep(0.01)
                    look = self.tender.look()
                    if holds(look) if holds else self.tender.idle:
                        return look
                    if task.done():
                        task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def roll(self, committed: int | None, to: int) -> None:
        """Through all phases, as the control plane would move them."""
        change = Change(f"r-{to}-{self.revision}", Phase.PREPARING, self.target(to), None)
        await self.rest(self.goal(committed, change))
        assert self.last()["stage"] == "prepared"
        await self.rest(self.goal(committed, change._replace(phase=Phase.SYNCING, attested=Stage.PREPARED)))
        assert self.last()["stage"] == "ready", self.tender.trouble
        self.revision += 3
        await self.rest(self.goal(to, change._replace(phase=Phase.COMMITTING, attested=Stage.READY)))
        assert self.last()["stage"] == "active"
        await self.rest(self.goal(to))

    def last(self) -> dict[str, Any]:
        return self.plane.attested[-1]


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, shm)
    yield made
    made.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_first_activation_reports_bytes_and_lag_and_pins_the_version(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        counters = scene.last()["counters"]
        assert counters["bytes_read"] == counters["bytes_total"] == 70_100
        assert counters["bytes_fetched"] > 70_100
        assert counters["lag_ms"] >= 0 and counters["switch_call_us"] > 0
        assert scene.last()["vector_root"] == scene.target(1).vector_root
        record = scene.station.record
        assert (record.pin, record.obeyed, record.fence) == (scene.target(1), scene.target(1), Order(1, 6))
        assert scene.tender.look().ready

    run(work)


def test_an_update_copies_what_is_equal_from_the_active_slot(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        counters = scene.last()["counters"]
        assert (counters["bytes_from_active"], counters["bytes_read"], counters["bytes_kept"]) == (70_000, 100, 0)
        assert counters["tensors_changed"] == 1
        assert counters["bytes_fetched"] < 1000

    run(work)


def test_a_roll_back_copies_nothing_and_proves_the_memory_again(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        loads = len(scene.crew.loads)
        await scene.roll(2, 1)
        counters = scene.last()["counters"]
        assert (counters["bytes_read"], counters["bytes_fetched"], counters["bytes_from_active"]) == (0, 0, 0)
        assert counters["bytes_kept"] == counters["bytes_total"] == 70_100
        assert scene.station.active == 0
        assert scene.crew.loads[loads:] == [(0, "1.0.0")], "the workers were not asked to check their module"
        assert scene.crew.released.count(0) == 1, "the slot was released for staging"

    run(work)


def test_memory_that_rotted_in_the_standby_slot_is_found_before_it_serves_and_staged_again(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        await scene.roll(1, 2)
        assert scene.station._arena is not None
        scene.station._arena._slot(0)[5] ^= 1
        await scene.roll(2, 1)
        counters = scene.last()["counters"]
        assert counters["bytes_kept"] == 0 and counters["bytes_read"] + counters["bytes_from_active"] == 70_100
        assert scene.crew.released.count(0) == 2

    run(work)


def test_memory_that_rotted_in_the_active_slot_stops_serving_and_is_replaced(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        assert scene.station._arena is not None
        scene.station._arena._slot(0)[5] ^= 1
        scene.close()
        scene.take_over()
        await scene.rest(scene.goal(1))
        assert scene.station.slot_record(0).state == "empty"
        assert scene.station.active == 1
        assert scene.station.slot_record(1).version == "1.0.0"
        assert scene.tender.look().ready

    run(work)


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


def test_a_larger_first_version_gets_a_larger_arena_while_nothing_serves(scene: Scene, tmp_path: Path) -> None:
    async def work() -> None:
        change = Change("r-1", Phase.SYNCING, scene.target(1), Stage.PREPARED)
        await scene.rest(scene.goal(None, change))
        scene.versions["4.0.0"] = make_version(tmp_path / "v4", "4.0.0", {"a": b"4" * 900_000})
        await scene.roll(None, 4)
        assert -1 in scene.crew.released

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


def test_a_new_control_takes_over_what_serves_without_a_switch(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        epoch = scene.station.block.active()
        lag_ms = scene.station.record.lag_ms
        scene.close()
        scene.take_over()
        await scene.rest(scene.goal(1))
        assert scene.tender.look().ready
        assert scene.station.block.active() == epoch
        assert scene.station.record.lag_ms == lag_ms
        assert scene.provider.fetched == ["1.0.0"]

    run(work)


def test_control_killed_between_any_two_steps_of_an_update_converges(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        change = Change("r-2", Phase.PREPARING, scene.target(2), None)
        phases = [
            (1, change),
            (1, change._replace(phase=Phase.SYNCING, attested=Stage.PREPARED)),
            (2, change._replace(phase=Phase.COMMITTING, attested=Stage.READY)),
        ]
        for committed, at in phases:
            if at.phase is Phase.COMMITTING:
                scene.revision += 3
            for steps in range(1, 6):  # every control lives for a few steps only
                scene.close()
                scene.take_over()
                scene.tender.want(scene.goal(committed, at))
                goal = scene.tender.goal
                assert goal is not None
                for _ in range(steps):
                    await scene.tender._advance(goal)
        await scene.rest(scene.goal(2))
        assert scene.tender.look().ready
        active = scene.station.active
        assert active is not None and scene.station.slot_record(active).version == "2.0.0"
        counters = [item["counters"] for item in scene.plane.attested if item["stage"] == "active"][-1]
        assert counters["bytes_total"] == 70_100

    run(work)


def test_a_fetch_that_an_abort_made_pointless_is_stopped(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.provider.block = asyncio.Event()
        change = Change("r-2", Phase.PREPARING, scene.target(2), None)
        await scene.rest(scene.goal(1, change), lambda look: look.doing.startswith("Fetch"))
        task = asyncio.create_task(scene.tender.run())
        await asyncio.sleep(0.05)
        scene.tender.want(scene.goal(1))
        async with asyncio.timeout(10):
            while not scene.provider.cancelled:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scene.plane.attested[-1]["stage"] == "active", "an abandoned fetch is no failure"

    run(work)


def test_waiting_for_a_worker_ends_when_nobody_wants_the_version_any_more(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.crew.block = asyncio.Event()
        change = Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)
        scene.tender.want(scene.goal(1, change))
        task = asyncio.create_task(scene.tender.run())
        async with asyncio.timeout(15):
            while not scene.tender.doing.startswith("Warm"):
                await asyncio.sleep(0.01)
            scene.tender.want(scene.goal(1))
            while not scene.tender.idle:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scene.plane.attested[-1]["stage"] == "active"

    run(work)


def test_a_committed_version_that_cannot_be_fetched_is_tried_on_while_the_old_one_serves(scene: Scene) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        scene.provider.refuse = FetchFailed("source_unavailable", "no route")
        scene.revision += 3
        look = await scene.rest(scene.goal(2), lambda look: "source_unavailable" in look.trouble)
        assert not look.ready and scene.station.record.behind
        assert scene.station.active == 0
        assert [item["stage"] for item in scene.plane.attested][-1] == "active", "nothing is attested for what is decided"
        scene.provider.refuse = None
        await scene.rest(scene.goal(2))
        assert scene.tender.look().ready and not scene.station.record.behind

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
        (Refusal("foreign_arena", "slot", "1", "2"), "internal", False),
        (FetchFailed("source_unavailable", ""), "source_unavailable", False),
        (WorkersLag("late"), "timeout", True),
        (RaftmetaError("no_leader", ""), "source_unavailable", True),
        (RaftmetaError("disk_full", ""), "resource_exhausted", False),
        (RaftmetaError("bad_json", ""), "internal", False),
        (MemoryError(), "resource_exhausted", False),
        (BlobsRotten(""), "integrity_mismatch", True),
        (OSError(5, "Input/output error"), "internal", True),
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
        assert scene.station.proof(scene.target(1), "kernel 1") is not None
        assert scene.station.proof(scene.target(1), "kernel 2") is None
        assert [proof.warm_ms for proof in scene.station.record.proofs] == [12, 12]

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
        assert scene.station.record.change.failure == found

    run(work)


def test_proofs_are_bounded(scene: Scene) -> None:
    for number in range(10):
        scene.station.note_proof(Proof(str(number), "kernel 1", 1, 1, {}, ()))
    assert [proof.checksum for proof in scene.station.record.proofs] == ["6", "7", "8", "9"]


def test_a_version_whose_modules_would_not_fit_beside_the_arena_is_refused_with_the_numbers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        await scene.roll(None, 1)
        assert scene.station.record.proofs[0].peak_bytes == 345
        monkeypatch.setattr(headroom, "find_memory", lambda: iter([Limit("the machine", 689), Limit("control group /a", 690)]))
        change = Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)
        look = await scene.rest(scene.goal(1, change))
        assert scene.last()["code"] == "resource_exhausted" and look.ready
        detail = scene.last()["detail"]
        assert "2 processes of 345 bytes: expected 690 bytes beside the arena, found 689 bytes left in the machine" in detail
        assert "control group" not in detail

    run(work)


def test_a_preview_names_the_steps_and_their_costs_and_takes_none(scene: Scene) -> None:
    async def work() -> None:
        assert scene.tender.preview()["refused"]
        await scene.roll(None, 1)
        scene.memory.fetch(scene.versions["2.0.0"])
        fetched, loads, record = list(scene.provider.fetched), list(scene.crew.loads), scene.station.record
        scene.tender.want(scene.goal(1, Change("r-2", Phase.SYNCING, scene.target(2), Stage.PREPARED)))
        shown = scene.tender.preview()
        assert (shown["goal"], shown["rollout"], shown["refused"]) == ("1.0.0", "r-2", "")
        assert [(step["step"], step["version"]) for step in shown["steps"]] == [
            ("StageInto", "2.0.0"),
            ("Warm", "2.0.0"),
            ("Attest", "2.0.0"),
        ]
        counters = shown["steps"][0]["counters"]
        assert counters["bytes_total"] == counters["bytes_read"] + counters["bytes_from_active"] + counters["bytes_kept"] > 0
        assert (scene.provider.fetched, scene.crew.loads, scene.station.record) == (fetched, loads, record)

    run(work)
