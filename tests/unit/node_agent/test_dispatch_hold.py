"""Requests of a deployment that is held: they wait in their place, and nothing that was computed across the beginning is answered."""

from __future__ import annotations

import asyncio

import pytest

from node_agent.dispatch import Dispatcher
from node_agent.ipc import ConnectionLost
from node_agent.messages import Served, SlotServed
from node_agent.serve import ServeError
from tests.unit.node_agent.test_dispatch import FakeWorker, dispatcher, job, refused, run, settle, start, until

BOTH = tuple(Served(name, (SlotServed(0, "1.0.0", "c"),), 0) for name in ("search", "other"))


def test_held_requests_wait_in_order_and_begin_when_they_are_let_go() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker, depth=3)
        assert of.hold("search", 5.0) == (0, 5.0)
        tasks = [start(of, job(version=str(number))) for number in range(3)]
        await settle()
        assert (worker.asked, of.queued) == ([], 3)
        of.let_go("search")
        await settle()
        assert [call.version for call in worker.asked] == ["0", "1", "2"]
        for _ in range(3):
            worker.answer()
        await asyncio.gather(*tasks)

    run(work)


def test_a_hold_that_nobody_renews_ends_by_itself_and_requests_begin() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        of.hold("search", 0.05)
        task = start(of, job())
        await settle()
        assert worker.asked == []
        await until(lambda: len(worker.asked) == 1)
        worker.answer()
        await task

    run(work)


def test_a_timer_that_comes_before_the_lease_is_over_by_our_clock_leaves_no_request_waiting() -> None:
    async def work() -> None:
        worker = FakeWorker()
        loop = asyncio.get_running_loop()
        of = Dispatcher((worker,), 10, 1, lambda: loop.time() * 0.9)  # a clock that runs slower than the timers
        of.hold("search", 0.05)
        task = start(of, job())
        await until(lambda: len(worker.asked) == 1)
        worker.answer()
        await task

    run(work)


def test_other_deployments_go_on_while_one_is_held() -> None:
    async def work() -> None:
        worker = FakeWorker(served=BOTH)
        of = dispatcher(worker)
        of.hold("search", 5.0)
        held = start(of, job())
        other = job()
        other.deployment = "other"
        going = start(of, other)
        await settle()
        assert [call.deployment for call in worker.asked] == ["other"]
        worker.answer()
        await going
        of.let_all_go()
        await settle()
        worker.answer()
        await held

    run(work)


def test_an_answer_that_was_computed_across_the_beginning_of_a_hold_is_asked_again_whenever_it_comes() -> None:
    async def work() -> None:
        first, second = FakeWorker(), FakeWorker()
        of = dispatcher(first, second)
        tasks = [start(of, job()) for _ in range(2)]
        await settle()
        assert of.hold("search", 5.0) == (2, 5.0)
        first.answer(label="of damaged memory")
        await settle()
        assert of.hold("search", 5.0)[0] == 1
        assert of.queued == 1 and not any(task.done() for task in tasks)
        of.let_go("search")
        await settle()
        second.answer(label="of damaged memory")  # after the hold, and begun before it
        await settle()
        assert not any(task.done() for task in tasks)
        await until(lambda: bool(first.calls and second.calls))
        first.answer()
        second.answer()
        assert [result.version for result in await asyncio.gather(*tasks)] == ["1.0.0", "1.0.0"]
        assert of.replays == 0, "no worker was lost"

    run(work)


def test_a_fault_of_what_was_computed_from_damaged_memory_is_no_answer_either() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        task = start(of, job())
        await settle()
        of.hold("search", 5.0)
        worker.fail(refused("engine_failed", 500))
        await settle()
        of.let_go("search")
        await settle()
        worker.answer()
        assert (await task).version == "1.0.0"

    run(work)


def test_a_worker_that_is_lost_during_a_hold_is_a_loss_like_any_other() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        task = start(of, job())
        await settle()
        of.hold("search", 5.0)
        worker.fail(ConnectionLost("gone"))
        await settle()
        assert (of.replays, of.queued) == (1, 1)
        of.let_go("search")
        await settle()
        worker.answer()
        await task

    run(work)


def test_a_held_request_ends_by_its_deadline() -> None:
    async def work() -> None:
        of = dispatcher(FakeWorker())
        of.hold("search", 5.0)
        with pytest.raises(ServeError) as late:
            await of.infer(job(deadline_s=0.05))
        assert late.value.status == 504 and of.queued == 0

    run(work)


@pytest.mark.parametrize("is_held_first", [True, False])
def test_held_requests_take_a_share_of_the_queue_and_leave_the_rest_to_others(is_held_first: bool) -> None:
    async def work() -> None:
        worker = FakeWorker(served=BOTH)
        of = dispatcher(worker, limit=4)
        if is_held_first:
            of.hold("search", 5.0)
        tasks = [start(of, job()) for _ in range(2 if is_held_first else 5)]
        await settle()
        of.hold("search", 5.0)
        with pytest.raises(ServeError, match="being mended") as full:
            await of.infer(job())
        assert (full.value.status, full.value.retry_after_s) == (503, 1)
        if not is_held_first:
            worker.answer()
            await settle()
        other = job()
        other.deployment = "other"
        going = start(of, other)
        await settle()
        assert worker.asked[-1].deployment == "other"
        worker.answer()
        await going
        for task in tasks:
            task.cancel()

    run(work)


def test_a_request_that_nobody_waits_for_any_more_leaves_the_queue() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        first, left = start(of, job()), job()
        waiting = start(of, left)
        await settle()
        left.fail(ServeError(400, "left"))
        await settle()
        assert of.queued == 0 and waiting.done()
        worker.answer()
        await first
        assert len(worker.asked) == 1 and isinstance(waiting.exception(), ServeError)

    run(work)
