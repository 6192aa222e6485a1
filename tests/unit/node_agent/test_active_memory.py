"""A damaged block of the slot that serves is written again while nobody computes in it, or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from consistency.vector import BLOCK_BYTES
from node_agent.active_memory import Fix, Watched
from node_agent.device.port import SlotState
from node_agent.host import Host
from node_agent.loading import Loader
from node_agent.messages import NOT_LOADED, NOTHING_SERVES, VERSION_NOT_HELD, Fault, Infer, Load, Loaded, Tensor
from node_agent.plan import Order
from node_agent.refusal import Refusal
from node_agent.scrub import Span
from node_agent.serving import Staging
from tests.support.agent_memory import NodeMemory
from tests.support.scrub_scene import BAD, GOOD, A, EndsEngine, ScrubScene, said
from tests.support.small_version import make_version

UNTIL_NS = 10**18


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Iterator[ScrubScene]:
    made = ScrubScene(tmp_path, shm)
    yield made
    made.close()


def repair(scene: ScrubScene, watched: Watched, until_ns: int = UNTIL_NS, tensor: str = "a", block: int = 0) -> None:
    without = scene.active.prepare(watched, [tensor])
    scene.active.repair(watched, [Fix(tensor, block, scene.fix(tensor, block))], without, until_ns)


def test_a_block_that_changed_is_named_and_everything_else_is_not(scene: ScrubScene) -> None:
    watched = scene.watched
    assert all(scene.active.damaged(watched, name) == [] for name in watched.places)
    scene.damage(BLOCK_BYTES + 7)
    assert scene.active.damaged(watched, "a") == [1]
    found = scene.active.read(watched, Span("a", 0, 3))
    assert np.flatnonzero((found != watched.vectors["a"].blocks).any(axis=1)).tolist() == [1]
    scene.damage(2 * BLOCK_BYTES + 2)
    assert scene.active.damaged(watched, "a") == [1, 2], "the short last block too"
    assert scene.active.damaged(watched, "s1") == []


def test_a_repaired_block_answers_as_before_and_what_is_known_of_the_slot_stays_known(scene: ScrubScene) -> None:
    scene.damage()
    assert scene.answer() == BAD
    before = scene.watched
    repair(scene, before)
    assert scene.answer() == scene.answer("1.0.0") == GOOD
    after = scene.watched
    assert scene.active.damaged(after, "a") == []
    assert (after.record.repairs, after.record.vector_root) == (1, before.record.vector_root)
    seen = scene.station.look("another rollout", lambda slot, target: True).slots[0]
    assert (seen.state, seen.checked, seen.loaded) == (SlotState.VERIFIED, True, True)
    assert scene.station.evidence() is not None
    assert not scene.active.is_current(before), "who watched the slot before begins anew"
    assert len(list(scene.memory.arena_dir.glob("*.slot0.*.json"))) == 1


def test_a_slot_that_somebody_computes_in_is_not_written_to(scene: ScrubScene) -> None:
    scene.damage()
    watched = scene.watched
    _, ended = scene.compute()
    with pytest.raises(Refusal, match="slot_busy"):
        repair(scene, watched)
    assert scene.active.damaged(watched, "a") == [0] and scene.active.is_current(watched), "nothing was touched"
    assert ended() == BAD
    repair(scene, watched)
    assert scene.answer() == GOOD


def test_a_request_beside_the_gate_keeps_the_slot_from_being_written_to_as_well(scene: ScrubScene) -> None:
    scene.bring_up(2, 1)
    _, ended = scene.compute("2.0.0")  # pinned to the slot that does not serve
    scene.switch(2, 1)
    scene.damage()
    watched = scene.watched
    with pytest.raises(Refusal, match=r"slot_busy.*worker 0 for"):
        scene.active.repair(watched, [], scene.active.prepare(watched, ["a"]), UNTIL_NS)
    assert scene.active.is_current(watched)
    ended()


def test_a_worker_that_comes_after_the_look_at_the_counts_meets_the_record_and_one_before_it_stops_the_repair(scene: ScrubScene) -> None:
    """The second look, behind the record: a request that began between the first and the record is seen."""
    scene.damage()
    watched = scene.watched
    arena = scene.station.arena
    assert arena is not None
    begin = arena.begin_repair
    entered = []

    def slowly(slot: int, digest: str, until_ns: int) -> object:
        entered.append(scene.compute())
        return begin(slot, digest, until_ns)

    arena.begin_repair = slowly  # type: ignore[method-assign, assignment]
    with pytest.raises(Refusal, match="slot_busy"):
        repair(scene, watched)
    arena.begin_repair = begin  # type: ignore[method-assign]
    ((_, ended),) = entered
    assert ended() == BAD, "as a whole, as it was"
    after = scene.watched
    assert after.record.repairs == 1 and scene.active.damaged(after, "a") == [0]
    assert scene.station.look(None, lambda slot, target: True).slots[0].checked
    repair(scene, after)
    assert scene.answer() == GOOD


def test_while_a_block_is_written_nobody_computes_and_the_slot_still_counts_as_served(scene: ScrubScene) -> None:
    scene.damage()
    watched = scene.watched
    met: list[object] = []

    def half(into: memoryview) -> None:
        into[0:1] = b"g"  # the last byte is still damaged: a request now would answer what was never right
        served = scene.host.served()[0]
        met.extend([scene.answer(), scene.answer("1.0.0"), [slot.label for slot in served.slots], served.blocked])
        met.append(scene.station.slot_record(0).state)
        scene.fix("a", 0)(into)

    scene.now_ns = time.monotonic_ns()
    without = scene.active.prepare(watched, ["a"])
    scene.active.repair(watched, [Fix("a", 0, half)], without, scene.now_ns + 60 * 10**9)
    assert met == [NOT_LOADED, NOT_LOADED, ["1.0.0"], "", SlotState.VERIFIED]
    assert scene.answer() == GOOD


def test_a_pause_that_is_over_before_the_write_leaves_everything_as_it_was(scene: ScrubScene) -> None:
    scene.damage()
    watched = scene.watched
    with pytest.raises(Refusal, match=r"slot_busy.*a pause that lasts"):
        repair(scene, watched, until_ns=scene.now_ns)
    assert scene.active.is_current(watched) and scene.answer() == BAD


def test_a_write_that_did_not_end_serves_nobody_once_its_time_is_over(scene: ScrubScene) -> None:
    scene.damage()
    watched = scene.watched

    def fails(into: memoryview) -> None:
        into[0:1] = b"g"
        raise OSError("the disk is gone")

    without = scene.active.prepare(watched, ["a"])
    scene.now_ns = 0
    with pytest.raises(OSError, match="gone"):
        scene.active.repair(watched, [Fix("a", 0, fails)], without, 5)
    assert scene.answer() == NOTHING_SERVES and scene.answer("1.0.0") == VERSION_NOT_HELD
    assert "dirty" in scene.host.served()[0].blocked
    assert scene.active.watched() is None
    seen = scene.station.look(None, lambda slot, target: True)
    assert seen.slots[0].state is SlotState.DIRTY and seen.active == 0, "the plan stages it into the other slot"
    assert len(scene.station.held_by_active()) == 6, "what stayed whole can be copied from it, the damaged tensor cannot"


def test_bytes_that_are_not_right_either_are_not_served(scene: ScrubScene) -> None:
    scene.damage()
    watched = scene.watched
    without = scene.active.prepare(watched, ["a"])
    with pytest.raises(Refusal, match=r"vector_mismatch.*block 0"):
        scene.active.repair(watched, [Fix("a", 0, lambda into: None)], without, 5_000)
    assert scene.answer() == NOTHING_SERVES


def test_a_pinned_answer_computed_across_a_repair_is_asked_again_and_never_given(scene: ScrubScene) -> None:
    scene.bring_up(2, 1)
    scene.switch(2, 1)
    arena = scene.station.arena
    assert arena is not None
    arena._slot(0)[:1] = b"b"  # where `a` begins
    _, ended = scene.compute("1.0.0")  # beside the gate: it read the first byte already
    scene.switch(1, 0)
    scene.station.switching.idle = lambda slot: True  # type: ignore[method-assign]  # the record alone has to tell
    repair(scene, scene.watched)
    assert ended() == NOT_LOADED
    assert scene.answer("1.0.0") == GOOD


def test_another_version_that_serves_by_now_is_left_alone(scene: ScrubScene) -> None:
    scene.damage()
    watched = scene.watched
    scene.bring_up(2, 1)
    scene.switch(2, 1)
    with pytest.raises(Refusal, match="slot_not_verified"):
        repair(scene, watched)
    assert scene.active.condemn(watched, scene.active.prepare(watched, ["a"])) is False
    assert scene.answer() == b"22"


def test_a_condemned_slot_serves_nobody_and_keeps_what_is_whole_for_the_other_one(scene: ScrubScene) -> None:
    scene.damage()
    watched = scene.watched
    assert scene.active.condemn(watched, scene.active.prepare(watched, ["a"]))
    assert scene.answer() == NOTHING_SERVES
    assert scene.active.watched() is None
    assert len(scene.station.held_by_active()) == 6
    scene.bring_up(1, 1)
    scene.switch(1, 1)
    assert scene.answer() == GOOD


def test_a_whole_pass_moves_the_time_of_verification_and_never_back(scene: ScrubScene) -> None:
    watched = scene.watched
    for at_ms, expected in ((5_000, 5_000), (4_000, 5_000), (6_000, 6_000)):
        scene.active.note_pass(watched, at_ms, 0)
        found = scene.station.evidence()
        assert found is not None and found.verified_at_ms == expected
    repair(scene, watched)
    scene.active.note_pass(watched, 9_000, 0)  # of what was repaired since
    found = scene.station.evidence()
    assert found is not None and found.verified_at_ms == 6_000


def test_a_whole_pass_is_a_proof_as_old_as_its_beginning_until_somebody_doubts_it(scene: ScrubScene) -> None:
    assert scene.station.proven() is None
    scene.active.note_pass(scene.watched, 5_000, time.monotonic_ns() - 3_000_000_000)
    found = scene.station.proven()
    assert found is not None and found.root == scene.watched.record.vector_root and 3_000 <= found.age_ms < 60_000
    scene.active.note_pass(scene.watched, 6_000, time.monotonic_ns() - 9_000_000_000)
    again = scene.station.proven()
    assert again is not None and again.age_ms < 9_000, "a younger reading was replaced by an older one"
    scene.active.doubt(scene.watched)
    told = scene.station.evidence()
    assert told is not None and told.finding == "integrity_mismatch"
    assert scene.station.proven() is None


def test_nothing_is_watched_that_this_process_did_not_verify(scene: ScrubScene) -> None:
    scene.station.checked.clear()
    assert scene.active.watched() is None


KILLED = """
import os, signal, sys
from pathlib import Path
from node_agent.active_memory import Fix
from tests.support.scrub_scene import ScrubScene

scene = ScrubScene(Path(sys.argv[1]), Path(sys.argv[2]))
scene.now_ns = 0
scene.damage()
watched = scene.watched

def half(into):
    into[0:1] = b"g"
    os.kill(os.getpid(), signal.SIGKILL)

scene.active.repair(watched, [Fix("a", 0, half)], scene.active.prepare(watched, ["a"]), 1)
"""


def test_a_control_process_that_is_killed_in_the_middle_of_a_write_leaves_a_slot_that_nobody_serves_from(tmp_path: Path, shm: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(shm)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    memory = NodeMemory(tmp_path / "store", shm)
    station = memory.station()
    version = make_version(tmp_path / "again", "1.0.0", {"a": A, **ScrubScene.others()})
    host = Host(1, (memory.root, shm), Loader(memory.store, {"fake": EndsEngine}))
    try:
        assert host.load_all() == []
        refused = host.load(Load(1, "search", 0, "1.0.0", version.target.checksum))
        assert isinstance(refused, Fault) and refused.code == "slot_not_verified"
        assert "dirty" in host.served()[0].blocked
        seen = station.look(None, lambda slot, target: True)
        assert (seen.active, seen.slots[0].state, seen.slots[0].holds(version.target)) == (0, SlotState.DIRTY, False)
        counters = station.stage(Staging(version.target, version.manifest, 1, Order(1, 9), "", 0))
        assert (counters.bytes_read, counters.bytes_from_active) == (len(A), sum(map(len, ScrubScene.others().values()))), (
            "what was being written comes from the store, the rest from what is whole"
        )
        loaded = host.load(Load(1, "search", 1, "1.0.0", version.target.checksum))
        assert isinstance(loaded, Loaded)
        station.note_warm(1, "", {})
        station.switch(version.target, 1)
        assert said(host.infer(Infer(1, "search", "", (Tensor("x", "INT64", (1,), bytes(8)),), ()))) == GOOD
    finally:
        EndsEngine.made.clear()
        host.close()
        station.close()
