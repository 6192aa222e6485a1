"""What every engine behind the serving port has to do, held against our own slots and workers and against a server that owns its memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from node_agent.device.port import SlotState
from node_agent.ipc import CallFailed
from node_agent.refusal import Refusal
from node_agent.trouble import trouble_of
from tests.support.serving_subjects import InProcessSubject, OwningSubject, Subject, bring_up, run, serve, work
from tests.support.shm import shm_directory

LIMIT_S = 0.05  # for what does not end; what ends does at once


@pytest.fixture(params=[InProcessSubject, OwningSubject], ids=["in_process", "owning_server"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    with shm_directory() as shm:
        made = request.param(tmp_path, shm)
        yield made
        made.close()


def what_serves(subject: Subject) -> tuple[object, ...]:
    reading = subject.serving.vector()
    assert reading is not None
    return reading.record, reading.slot, reading.epoch, reading.entries, reading.root


def kind_of(cause: Exception) -> str:
    return trouble_of(cause, "warm").failure.kind


def test_what_is_not_serving_says_so(subject: Subject) -> None:
    seen = subject.serving.look(None)
    assert seen.active is None and [slot.state for slot in seen.slots] == [SlotState.EMPTY] * 2
    assert subject.serving.vector() is None and subject.answer() == ""


def test_a_version_is_staged_warmed_and_switched_to(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        assert subject.answer() == "1.0.0 1"
        seen = subject.serving.look(None)
        assert seen.active == 0 and seen.slots[0].holds(subject.versions[1].target)
        assert seen.slots[0].checked and seen.slots[0].loaded
        assert [(look.record.version, look.active) for look in subject.serving.slots()] == [("1.0.0", True), ("", False)]

    run(steps)


def test_staging_does_not_touch_what_serves(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        before = what_serves(subject)
        await bring_up(subject, 2, 1)
        assert subject.answer() == "1.0.0 1" and what_serves(subject) == before

    run(steps)


def test_staging_into_the_slot_that_serves_is_refused_and_changes_nothing(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        before = subject.serving.look(None)
        for verb in (subject.serving.stage(work(subject, 2, 0)), subject.serving.drain(0, LIMIT_S), subject.serving.release(0)):
            with pytest.raises(Refusal, match="slot_active"):
                await verb
        assert subject.serving.look(None) == before and subject.answer() == "1.0.0 1"

    run(steps)


def test_a_version_without_room_is_refused_with_the_numbers_and_what_serves_goes_on(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        with pytest.raises(Refusal, match="no_headroom") as refused:
            await subject.serving.stage(work(subject, 4, 1))
        assert re.search(r"900\d{3} bytes", refused.value.detail)
        assert subject.answer() == "1.0.0 1" and subject.serving.look(None).active == 0

    run(steps)


def test_a_version_that_answers_otherwise_than_its_publisher_saw_is_refused(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await subject.serving.stage(work(subject, 3, 1))
        with pytest.raises((Refusal, CallFailed)) as refused:
            await subject.serving.probe(subject.versions[3].target, 1)
        assert kind_of(refused.value) == "probe_drift"
        assert subject.answer() == "1.0.0 1"

    run(steps)


def test_a_probe_says_what_it_measured_and_by_what(subject: Subject) -> None:
    async def steps() -> None:
        await subject.serving.stage(work(subject, 1, 0))
        proof = await subject.serving.probe(subject.versions[1].target, 0)
        assert (proof.checksum, proof.kernel) == (subject.versions[1].target.checksum, subject.serving.kernel)
        assert [(found.probe, found.holds) for found in proof.measured] == [("first-byte", True)]

    run(steps)


def test_a_switch_names_a_version_that_was_staged(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        with pytest.raises(Refusal, match="slot_not_verified"):
            await subject.serving.switch(subject.versions[2].target, 1)
        await bring_up(subject, 2, 1)
        with pytest.raises(Refusal, match="slot_not_verified"):
            await subject.serving.switch(subject.versions[3].target, 1)
        assert subject.answer() == "1.0.0 1"

    run(steps)


def test_a_switch_names_a_version_that_is_warm(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await subject.serving.stage(work(subject, 2, 1))
        with pytest.raises(Refusal, match="slot_not_verified"):
            await subject.serving.switch(subject.versions[2].target, 1)
        assert subject.answer() == "1.0.0 1" and subject.serving.look(None).active == 0

    run(steps)


def test_what_was_warm_is_not_after_it_was_staged_again(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await bring_up(subject, 2, 1)
        await subject.serving.drain(1, 5.0)
        await subject.serving.stage(work(subject, 2, 1))
        assert not subject.serving.look(None).slots[1].loaded
        with pytest.raises(Refusal, match="slot_not_verified"):
            await subject.serving.switch(subject.versions[2].target, 1)

    run(steps)


def test_memory_that_rotted_is_refused_and_emptied_and_can_be_staged_again(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await bring_up(subject, 2, 1)
        subject.rot(1)
        with pytest.raises(Refusal, match="vector_mismatch"):
            await subject.serving.verify(subject.versions[2].target, 1, "")
        assert subject.serving.look(None).slots[1].state is SlotState.EMPTY
        await serve(subject, 2, 1)
        assert subject.answer() == "2.0.0 2"

    run(steps)


def test_memory_that_rotted_under_what_serves_answers_no_more(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        subject.rot(0)
        with pytest.raises(Refusal, match="vector_mismatch"):
            await subject.serving.verify(subject.versions[1].target, 0, "")
        assert subject.answer() == ""

    run(steps)


def test_a_request_in_the_old_slot_keeps_it_and_is_named_once_the_time_to_drain_is_over(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await bring_up(subject, 2, 1)
        let_go = subject.hold()
        await subject.serving.switch(subject.versions[2].target, 1)
        with pytest.raises(Refusal, match="slot_busy") as refused:
            await subject.serving.drain(0, LIMIT_S)
        holders = subject.serving.holders(0)
        assert len(holders) == 1 and holders[0].who in refused.value.detail
        assert subject.serving.look(None).slots[0].holds(subject.versions[1].target), "the slot was touched"
        assert let_go() == "1.0.0 1"
        await subject.serving.drain(0, 5.0)
        assert subject.serving.holders(0) == ()

    run(steps)


def test_a_request_beside_the_gate_keeps_the_slot_too_and_is_named(tmp_path: Path) -> None:
    async def steps(subject: InProcessSubject) -> None:
        await serve(subject, 1, 0)
        await bring_up(subject, 2, 1)
        let_go = subject.hold("2.0.0")
        with pytest.raises(Refusal, match=r"slot_busy.*worker 0 for \d+\.\d s"):
            await subject.serving.drain(1, LIMIT_S)
        assert [holder.who for holder in subject.serving.holders(1)] == ["worker 0"] and subject.serving.holders(0) == ()
        assert let_go() == "2.0.0 2"
        await subject.serving.drain(1, 5.0)
        assert subject.serving.holders(1) == ()
        with pytest.raises(Refusal, match="slot_not_verified"):
            await subject.serving.switch(subject.versions[2].target, 1)

    with shm_directory() as shm:
        subject = InProcessSubject(tmp_path, shm)
        run(lambda: steps(subject))
        subject.close()


def test_a_worker_that_is_busy_in_the_slot_that_serves_is_waited_for_beyond_the_time_to_drain(tmp_path: Path) -> None:
    async def steps(subject: InProcessSubject) -> None:
        await serve(subject, 1, 0)
        await bring_up(subject, 2, 1)
        let_go = subject.hold()
        draining = asyncio.create_task(subject.serving.drain(1, LIMIT_S))
        await asyncio.wait({draining}, timeout=4 * LIMIT_S)
        assert not draining.done() and subject.serving.holders(1) == ()
        assert let_go() == "1.0.0 1"
        await draining

    with shm_directory() as shm:
        subject = InProcessSubject(tmp_path, shm)
        run(lambda: steps(subject))
        subject.close()


def test_a_slot_that_is_in_use_is_not_rewritten_by_who_did_not_wait(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await bring_up(subject, 2, 1)
        let_go = subject.hold()
        await subject.serving.switch(subject.versions[2].target, 1)
        with pytest.raises(Refusal, match="slot_busy"):
            await subject.serving.stage(work(subject, 3, 0))
        assert let_go() == "1.0.0 1"

    run(steps)


def test_release_forgets(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await bring_up(subject, 2, 1)
        assert subject.answer("2.0.0") == "2.0.0 2"
        await subject.serving.release(1)
        assert subject.answer("2.0.0") == "" and not subject.serving.look(None).slots[1].loaded
        with pytest.raises(Refusal, match="slot_not_verified"):
            await subject.serving.switch(subject.versions[2].target, 1)
        assert subject.answer() == "1.0.0 1"

    run(steps)


def test_the_release_of_a_deployment_ends_its_answers(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await subject.serving.release(None)
        assert subject.answer() == ""

    run(steps)


def test_every_verb_may_run_twice(subject: Subject) -> None:
    async def steps() -> None:
        serving = subject.serving
        for number, slot in ((1, 0), (2, 1)):
            target = subject.versions[number].target
            for _ in range(2):
                await serving.drain(slot, 5.0)
            for _ in range(2):
                await serving.stage(work(subject, number, slot))
            for _ in range(2):
                await serving.verify(target, slot, "")
            first, second = await serving.probe(target, slot), await serving.probe(target, slot)
            assert (first.checksum, first.measured) == (second.checksum, second.measured)
            for _ in range(2):
                await serving.warm(target, slot, "")
            epochs = [(await serving.switch(target, slot)).epoch for _ in range(2)]
            assert epochs == sorted(epochs)
            for _ in range(2):
                await serving.answering(target, 5.0)
            assert subject.answer() == f"{number}.0.0 {number}"
        for _ in range(2):
            await serving.release(0)
        for _ in range(2):
            await serving.release(None)

    run(steps)


def test_what_one_rollout_had_checked_in_a_standby_slot_counts_for_no_other(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        target = subject.versions[2].target
        await subject.serving.stage(work(subject, 2, 1, change="r-1"))
        await subject.serving.warm(target, 1, "r-1")
        for change, counts in (("r-1", True), ("r-2", False), (None, True)):
            seen = subject.serving.look(change)
            assert (seen.slots[1].checked, seen.slots[1].loaded) == (counts, counts)
            assert seen.slots[0].checked and seen.slots[0].loaded, "what serves counts for everything"

    run(steps)


def test_a_successor_finds_what_serves_and_has_checked_nothing_itself(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        await bring_up(subject, 2, 1)
        subject.take_over()
        seen = subject.serving.look(None)
        assert seen.active == 0 and [slot.label for slot in seen.slots] == ["1.0.0", "2.0.0"]
        assert not any(slot.checked for slot in seen.slots)
        with pytest.raises(Refusal, match="slot_not_verified"):
            await subject.serving.switch(subject.versions[2].target, 1)
        assert subject.answer() == "1.0.0 1"

    run(steps)


def test_the_late_end_of_a_staging_that_was_given_up_changes_nothing(subject: Subject) -> None:
    async def steps() -> None:
        await serve(subject, 1, 0)
        go_on = subject.slow_down()
        given_up = asyncio.create_task(subject.serving.stage(work(subject, 3, 1)))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        wanted = asyncio.create_task(subject.serving.stage(work(subject, 2, 1)))
        await asyncio.sleep(0.05)
        assert subject.answer() == "1.0.0 1" and not wanted.done()
        await go_on()
        await wanted
        await go_on()
        assert subject.serving.look(None).slots[1].holds(subject.versions[2].target)
        await subject.serving.warm(subject.versions[2].target, 1, "")
        await subject.serving.switch(subject.versions[2].target, 1)
        assert subject.answer() == "2.0.0 2"

    run(steps)


def test_a_staging_that_was_given_up_before_it_began_writes_nothing(tmp_path: Path) -> None:
    async def steps(subject: InProcessSubject) -> None:
        await serve(subject, 1, 0)
        go_on = subject.slow_down()
        first = asyncio.create_task(subject.serving.stage(work(subject, 2, 1)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(subject.serving.stage(work(subject, 3, 1)))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await go_on()
        await first
        await go_on()
        assert subject.serving.look(None).slots[1].holds(subject.versions[2].target)

    with shm_directory() as shm:
        subject = InProcessSubject(tmp_path, shm)
        run(lambda: steps(subject))
        subject.close()
