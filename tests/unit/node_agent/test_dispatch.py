"""Which worker gets a request, and what becomes of it when workers come, go and refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from node_agent.dispatch import Dispatcher, Job
from node_agent.ipc import CallFailed, ConnectionLost
from node_agent.messages import BAD_INPUT, NOT_LOADED, NOTHING_SERVES, Fault, Infer, Inferred, Numbered, Reply, Served, SlotServed
from node_agent.serve import ServeError

SERVED = (Served("search", (SlotServed(0, "1.0.0", "c"),), 0),)


class FakeWorker:
    """Answers when told to: every call waits in `calls` until the test settles it."""

    def __init__(self, connected: bool = True, served: tuple[Served, ...] = SERVED) -> None:
        self.connected = connected
        self.served = served
        self.calls: list[asyncio.Future[Reply]] = []
        self.asked: list[Infer] = []

    async def call(self, make: Callable[[int], Numbered], timeout_s: float) -> Reply:
        call = make(len(self.asked))
        assert isinstance(call, Infer)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.asked.append(call)
        self.calls.append(future)
        async with asyncio.timeout(timeout_s):
            return await future

    def answer(self, at: int = 0, label: str = "1.0.0") -> None:
        self.calls.pop(at).set_result(Inferred(0, label, "c", ()))

    def fail(self, error: Exception, at: int = 0) -> None:
        self.calls.pop(at).set_exception(error)


def refused(code: str, status: int = 503) -> CallFailed:
    return CallFailed(Fault(0, status, code, "because"))


def job(deadline_s: float = 10.0, version: str = "") -> Job:
    return Job("search", version, (), (), asyncio.get_running_loop().time() + deadline_s)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))


class Counting(Dispatcher):
    """Counts its replays."""

    def __init__(self, workers: tuple[FakeWorker, ...], limit: int, depth: int) -> None:
        super().__init__(workers, limit, depth, asyncio.get_running_loop().time, self._replayed)
        self.replays = 0

    def _replayed(self) -> None:
        self.replays += 1


def dispatcher(*workers: FakeWorker, limit: int = 10, depth: int = 1) -> Counting:
    return Counting(workers, limit, depth)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.002)


def start(of: Dispatcher, work: Job) -> asyncio.Task[Inferred]:
    return asyncio.create_task(of.infer(work))


def test_the_worker_with_the_fewest_requests_gets_the_next_one() -> None:
    async def work() -> None:
        first, second = FakeWorker(), FakeWorker()
        of = dispatcher(first, second, depth=2)
        tasks = [start(of, job()) for _ in range(3)]
        await settle()
        assert (len(first.asked), len(second.asked)) == (2, 1)
        second.answer()
        tasks.append(start(of, job()))
        await settle()
        assert (len(first.asked), len(second.asked)) == (2, 2)
        for worker in (first, first, second):
            worker.answer()
        await asyncio.gather(*tasks)
        assert (of.queued, sum(of.in_flight)) == (0, 0)

    run(work)


def test_a_worker_that_binds_a_module_gets_what_the_others_have_no_room_for() -> None:
    binding = (*SERVED[:-1], msgspec.structs.replace(SERVED[-1], is_binding=True))

    async def work() -> None:
        first, second = FakeWorker(served=binding), FakeWorker()
        of = dispatcher(first, second, depth=2)
        tasks = [start(of, job()) for _ in range(3)]
        await settle()
        assert (len(first.asked), len(second.asked)) == (1, 2)
        first.served = SERVED  # done, and it has the fewest
        tasks.append(start(of, job()))
        await settle()
        assert (len(first.asked), len(second.asked)) == (2, 2)
        for worker in (first, first, second, second):
            worker.answer()
        await asyncio.gather(*tasks)

    run(work)


def test_requests_wait_in_order_when_every_worker_is_full() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        tasks = [start(of, job(version=str(number))) for number in range(3)]
        await settle()
        assert (len(worker.asked), of.queued) == (1, 2)
        for number in range(3):
            worker.answer()
            await tasks[number]
        assert [call.version for call in worker.asked] == ["0", "1", "2"]

    run(work)


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker, limit=2)
        tasks = [start(of, job()) for _ in range(3)]
        await settle()
        with pytest.raises(ServeError) as full:
            await of.infer(job())
        assert (full.value.status, full.value.retry_after_s) == (503, 1)
        for _ in range(3):
            worker.answer()
            await settle()
        await asyncio.gather(*tasks)

    run(work)


def test_a_lost_request_is_replayed_once_on_another_worker() -> None:
    async def work() -> None:
        first, second = FakeWorker(), FakeWorker(connected=False)
        of = dispatcher(first, second)
        task = start(of, job())
        await settle()
        first.connected, second.connected = False, True
        first.fail(ConnectionLost())
        await settle()
        second.answer(label="2.0.0")
        assert (await task).version == "2.0.0"
        assert of.replays == 1

    run(work)


def test_a_request_waits_for_a_worker_that_comes_back() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        task = start(of, job())
        await settle()
        worker.connected = False
        worker.fail(ConnectionLost())
        await settle()
        assert of.queued == 1
        worker.connected = True
        of.kick()
        await settle()
        worker.answer()
        await task

    run(work)


def test_a_request_lost_twice_ends_and_is_not_tried_a_third_time() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        task = start(of, job())
        for _ in range(2):
            await settle()
            worker.fail(ConnectionLost())
        with pytest.raises(ServeError) as lost:
            await task
        assert lost.value.status == 503
        assert len(worker.asked) == 2

    run(work)


def test_a_replayed_request_keeps_its_place_at_the_head() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        tasks = [start(of, job(version=name)) for name in ("first", "second")]
        await settle()
        worker.fail(ConnectionLost())
        await settle()
        assert [call.version for call in worker.asked] == ["first", "first"]
        worker.answer()
        await settle()
        worker.answer()
        await asyncio.gather(*tasks)

    run(work)


def test_a_worker_that_has_not_loaded_the_slot_yet_is_asked_again_without_using_up_the_replay() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        task = start(of, job())
        for _ in range(3):
            await until(lambda: bool(worker.calls))
            worker.fail(refused(NOT_LOADED))
        await until(lambda: bool(worker.calls))
        worker.answer()
        await task
        assert of.replays == 0

    run(work)


def test_a_request_ends_at_once_with_a_time_to_come_back_when_nothing_on_the_node_can_serve_it() -> None:
    async def work() -> None:
        worker, other = FakeWorker(), FakeWorker()
        task = start(dispatcher(worker, other), job())
        await settle()
        worker.fail(refused(NOTHING_SERVES))
        with pytest.raises(ServeError) as error:
            await task
        assert (error.value.status, error.value.message, error.value.retry_after_s) == (503, "because", 5)
        assert other.asked == []

    run(work)


def test_a_worker_without_the_deployment_is_passed_over() -> None:
    async def work() -> None:
        empty, worker = FakeWorker(served=()), FakeWorker()
        of = dispatcher(empty, worker)
        task = start(of, job())
        await settle()
        worker.answer()
        await task
        assert empty.asked == []

    run(work)


def test_while_one_worker_holds_the_version_nobody_asks_one_that_has_not_loaded_it_yet() -> None:
    async def work() -> None:
        loaded, loading = FakeWorker(), FakeWorker(served=(Served("search", (), 0, is_loading=True),))
        requests = dispatcher(loaded, loading)
        first, second = asyncio.create_task(requests.infer(job())), asyncio.create_task(requests.infer(job()))
        await settle()
        assert (len(loaded.asked), len(loading.asked)) == (1, 0), "the second waits for the one that can answer"
        loaded.answer()
        await until(lambda: len(loaded.asked) == 2)
        loaded.answer()
        assert [(await first).version, (await second).version] == ["1.0.0", "1.0.0"]
        loaded.connected = False
        third = asyncio.create_task(requests.infer(job()))
        await settle()
        assert len(loading.asked) == 1, "with nobody else it may say when it has"
        loading.answer()
        await third

    run(work)


def test_a_pinned_request_goes_to_a_worker_that_holds_the_version_however_busy_it_is() -> None:
    async def work() -> None:
        starting = FakeWorker(served=(Served("search", (SlotServed(0, "1.0.0", "c"),), 0),))
        holding = FakeWorker(served=(Served("search", (SlotServed(0, "1.0.0", "c"), SlotServed(1, "0.9.0", "d")), 0),))
        of = dispatcher(starting, holding)
        tasks = [start(of, job(version="0.9.0")) for _ in range(2)]
        await settle()
        assert (len(starting.asked), len(holding.asked), of.queued) == (0, 1, 1)
        holding.answer()
        await settle()
        holding.answer()
        await asyncio.gather(*tasks)
        nowhere = start(of, job(version="7"))
        await settle()
        assert len(starting.asked) == 1, "any worker may say that it holds no such version"
        starting.answer()
        await nowhere

    run(work)


def test_the_models_refusal_is_passed_on_and_not_replayed() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        task = start(of, job())
        await settle()
        worker.fail(refused(BAD_INPUT, 400))
        with pytest.raises(ServeError) as bad:
            await task
        assert (bad.value.status, bad.value.message) == (400, "because")
        assert len(worker.asked) == 1

    run(work)


@pytest.mark.parametrize("connected", [True, False], ids=["a worker has it", "it waits"])
def test_a_request_ends_by_its_deadline_wherever_it_is(connected: bool) -> None:
    async def work() -> None:
        worker = FakeWorker(connected=connected)
        of = dispatcher(worker)
        with pytest.raises(ServeError) as late:
            await of.infer(job(deadline_s=0.03))
        assert late.value.status == 504
        assert of.queued == 0

    run(work)


def test_a_request_that_timed_out_is_not_replayed_when_its_worker_goes() -> None:
    async def work() -> None:
        worker = FakeWorker()
        of = dispatcher(worker)
        task = start(of, job())
        await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        worker.fail(ConnectionLost())
        await settle()
        assert len(worker.asked) == 1
        assert (of.queued, sum(of.in_flight)) == (0, 0)

    run(work)


def test_a_timer_that_comes_early_by_our_clock_leaves_no_request_of_a_worker_that_was_still_loading_waiting() -> None:
    async def work() -> None:
        loop, worker = asyncio.get_running_loop(), FakeWorker()
        of = Dispatcher((worker,), 10, 1, lambda: loop.time() * 0.5)  # a clock that runs slower than the timers
        task = start(of, job(deadline_s=10.0))
        await settle()
        worker.fail(refused(NOT_LOADED))
        await until(lambda: len(worker.asked) == 2)
        worker.answer()
        await task

    run(work)
