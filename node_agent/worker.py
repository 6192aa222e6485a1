"""The worker process: one model instance per slot, one computing thread, one loading thread, one socket.

Requests are computed in order of arrival by the computing thread; everything that must not meet a request half way (acknowledging a
switch, forgetting a slot) goes through the same thread. Whatever changes in what it serves is pushed to everyone connected, also when
nobody told it: it looks at the shared memory by itself, because whoever takes a slot away may die before saying so. It needs neither
control nor the front to come back after a crash: the node's record and the arena say what to load.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from node_agent import metric_table
from node_agent.host import Host
from node_agent.ipc import Server
from node_agent.memory import private_bytes
from node_agent.messages import (
    NOT_LOADED,
    NOTHING_SERVES,
    REQUEST_CANCELLED,
    Acknowledge,
    Cancel,
    CheckDerived,
    DerivedChecked,
    Done,
    Fault,
    GetMetrics,
    Infer,
    Inferred,
    Load,
    Metrics,
    Numbered,
    Release,
    Reply,
    WorkerState,
)
from node_agent.metrics import Meter
from node_agent.runtime import Runtime, log

BEAT_S = 1.0
EXIT_CANCELLED = 75  # EX_TEMPFAIL: the supervisor starts another worker
EXIT_DAMAGED = 76  # its own memory changed; the supervisor starts another worker
ANSWER_S = 1.0  # for the answer of a cancelled request to be written, before its worker ends
WATCH_S = 0.1  # between looks at the slots' records; each takes some tens of microseconds


class Worker:
    def __init__(self, index: int, host: Host, meter: Meter, leave: Callable[[int], object] = os._exit) -> None:
        """`leave` ends the process at once, whatever its threads do."""
        self._index = index
        self._host = host
        self._compute = ThreadPoolExecutor(1, "compute")
        self._loading = ThreadPoolExecutor(1, "load")
        self._meter = meter
        self._server = Server(self._answer, self._state)
        self._announced: WorkerState | None = None
        self._leave = leave
        self._leaving: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Future[Reply]] = {}  # answers that requests wait for, by the identity of the call

    async def run(self, runtime: Runtime) -> None:
        loop = asyncio.get_running_loop()
        await self._server.start(runtime.worker_socket(self._index))
        for fault in await loop.run_in_executor(self._loading, self._host.load_all):
            log.warning("slot_not_loaded", worker=self._index, reason=fault)
        self._announce()
        watching = asyncio.create_task(self._watch())
        log.info("worker_serves", worker=self._index, deployments=[item.deployment for item in self._host.served()])
        while not runtime.stopping.is_set():
            await loop.run_in_executor(self._compute, self._host.beat)
            try:
                async with asyncio.timeout(BEAT_S):
                    await runtime.stopping.wait()
            except TimeoutError:
                pass
        watching.cancel()
        await self._server.stop()
        self._loading.shutdown(cancel_futures=True)
        await loop.run_in_executor(self._compute, self._host.close)
        self._compute.shutdown()

    async def _answer(self, call: Numbered) -> Reply:
        match call:
            case Infer():
                return await self._infer(call)
            case Load():
                return await self._bind(call)
            case Acknowledge():
                return await self._then_announce(self._compute, lambda: self._host.acknowledge(call))
            case Cancel():
                return await self._cancel(call)
            case Release():
                return await self._then_announce(self._compute, lambda: self._host.release(call))
            case CheckDerived():
                return await self._check_derived(call)
            case GetMetrics():
                self._meter.set(metric_table.WORKER_BYTES, private_bytes(), str(self._index))
                return Metrics(call.number, self._meter.gauges())
            case _:
                return Fault(call.number, 400, "bad_request", f"a worker does not answer {type(call).__name__}")

    async def _bind(self, call: Load) -> Reply:
        """Said before it begins, so that requests go to others meanwhile: making a module keeps the interpreter from computing."""
        self._host.binding += 1
        self._announce()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._loading, self._host.load, call)
        finally:
            self._host.binding -= 1
            self._announce()

    async def _infer(self, call: Infer) -> Reply:
        labels = (str(self._index), call.deployment)
        with self._meter.timed(metric_table.COMPUTE_SECONDS, *labels):
            reply = await self._computed(call)
        outcome = "ok" if isinstance(reply, Inferred) else reply.code if isinstance(reply, Fault) else "other"
        self._meter.count(metric_table.WORKER_REQUESTS, *labels, outcome)
        if outcome == NOTHING_SERVES:
            self._announce_change()  # before the answer: whoever asks for readiness after it hears the same
        return reply

    async def _computed(self, call: Infer) -> Reply:
        """What the computing thread answers, unless the request is ended before: then its result is for nobody."""
        ended = self._open[id(call)] = asyncio.get_running_loop().create_future()
        work = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(self._compute, self._host.infer, call))
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else work.result()
        finally:
            work.cancel()  # nobody waits for it any more: not begun yet, it never will
            del self._open[id(call)]

    async def _cancel(self, call: Cancel) -> Reply:
        """End the request that computes in the slot, tell who asked for it, and end: a thread in a forward pass cannot be stopped."""
        held = self._host.computing_in(call.deployment, call.slot)
        ended = None if held is None else self._open.get(id(held))
        if held is None or ended is None:
            return Done(call.number)
        detail = f"{call.deployment}: the request still used slot {call.slot} when the time to drain was over; the slot is rewritten"
        ended.set_result(Fault(held.number, 503, REQUEST_CANCELLED, detail))
        log.warning("request_cancelled", worker=self._index, deployment=call.deployment, slot=call.slot)
        await self._server.answered(held, ANSWER_S)
        self._leave(EXIT_CANCELLED)
        return Done(call.number)

    async def _check_derived(self, call: CheckDerived) -> Reply:
        """Tensor by tensor in the computing thread, so that no request waits for more than one of them."""
        loop = asyncio.get_running_loop()
        names = await loop.run_in_executor(self._compute, self._host.derived_of, call)
        if names is None:
            return Fault(call.number, 503, NOT_LOADED, f"{call.deployment}: slot {call.slot} is not loaded in this worker")
        found = [await loop.run_in_executor(self._compute, self._host.check_derived, call, name) for name in names]
        damaged = tuple(item for item in found if item is not None)
        ends = bool(damaged) and call.ends
        if ends:
            log.error("derived_damaged", worker=self._index, deployment=call.deployment, tensors=[item.tensor for item in damaged])
            self._announce()
            self._leaving = asyncio.create_task(self._leave_after(call))
        return DerivedChecked(call.number, damaged, ends)

    async def _leave_after(self, call: Numbered) -> None:
        await self._server.answered(call, ANSWER_S)
        self._leave(EXIT_DAMAGED)

    async def _then_announce(self, pool: ThreadPoolExecutor, work: Callable[[], Reply]) -> Reply:
        reply = await asyncio.get_running_loop().run_in_executor(pool, work)
        self._announce()
        return reply

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._announce_change()

    def _announce_change(self) -> None:
        if self._state() != self._announced:
            self._announce()

    def _announce(self) -> None:
        self._announced = self._state()
        self._server.push(self._announced)

    def _state(self) -> WorkerState:
        return WorkerState(self._index, os.getpid(), self._host.served())
