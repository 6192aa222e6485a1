"""Which worker gets a request, and when: the front's queue. No HTTP, no model.

One bounded queue in order of arrival; the head goes to the connected worker with the fewest outstanding requests that has the deployment
loaded and room. A request whose worker goes away is put back at the head once; the second loss ends it. Every request has a deadline and
ends by it; it ends at once when a worker says that nothing on the node can serve it. A request is never in two places: it waits, or one
worker has it, or it has an answer. While a deployment is held its requests wait, in their place and with their deadline; what workers
computed for it across the beginning of a hold counts for nothing and is asked again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from node_agent.holds import Holds
from node_agent.ipc import CallFailed, ConnectionLost
from node_agent.messages import NOT_LOADED, NOTHING_SERVES, Infer, Inferred, Numbered, Reply, Served, Tensor
from node_agent.serve import ServeError

MAX_REPLAYS = 1
HELD_SHARE = 0.5  # of the queue, for requests of deployments that are held; those that wait when a hold begins keep their places
NOTHING_SERVES_RETRY_S = 5  # of a client, while the node stages a version again
TIMER_S = 0.001
NOT_LOADED_WAIT_S = 0.05  # a worker that came back binds its slots within seconds; ask again this often


class Worker(Protocol):
    """One serving process, as far as the front sees it."""

    @property
    def connected(self) -> bool: ...

    @property
    def served(self) -> Sequence[Served]:
        """What it said last that it serves."""

    async def call(self, make: Callable[[int], Numbered], timeout_s: float) -> Reply:
        """Raises ConnectionLost, CallFailed or TimeoutError."""


class Job:
    """One request on its way."""

    def __init__(self, deployment: str, version: str, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], deadline: float) -> None:
        self.deployment = deployment
        self.version = version
        self.inputs = inputs
        self.outputs = outputs
        self.deadline = deadline
        self.replays = 0
        self.not_before = 0.0
        self.is_suspect = False  # what a worker computes for it now is not to be answered
        self.done: asyncio.Future[Inferred] = asyncio.get_running_loop().create_future()

    def call(self, number: int) -> Infer:
        return Infer(number, self.deployment, self.version, self.inputs, self.outputs)

    def succeed(self, result: Inferred) -> None:
        if not self.done.done():
            self.done.set_result(result)

    def fail(self, error: ServeError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Dispatcher:
    def __init__(
        self,
        workers: Sequence[Worker],
        queue_limit: int,
        depth: int,
        clock: Callable[[], float] = time.monotonic,
        on_replay: Callable[[], None] = lambda: None,
        on_held: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        self._workers = workers
        self._limit = queue_limit
        self._depth = depth
        self._clock = clock
        self._queue: deque[Job] = deque()
        self._busy = [0] * len(workers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_replay = on_replay
        self._flying: dict[str, set[Job]] = {}  # what workers have, by deployment
        self._holds = Holds(clock, on_held)
        self._timers: dict[str, asyncio.TimerHandle] = {}  # that look whether a hold has ended

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests that each worker has."""
        return tuple(self._busy)

    async def infer(self, job: Job) -> Inferred:
        """The answer. Raises ServeError: 503 when the queue is full or the worker was lost twice, 504 past the deadline."""
        self._require_room(job.deployment)
        self._queue.append(job)
        self.kick()
        try:
            async with asyncio.timeout(max(0.0, job.deadline - self._clock())):
                return await job.done
        except TimeoutError as cause:
            raise ServeError(504, "the deadline of the request passed before a worker answered") from cause
        finally:
            job.done.cancel()
            if job in self._queue:
                self._queue.remove(job)

    def _require_room(self, deployment: str) -> None:
        """Held requests take a share of the queue at most: what waits for a repair keeps no other deployment's idle workers waiting."""
        held = 0 if self._holds.none else sum(self._holds.is_held(job.deployment) for job in self._queue)
        share = max(1, int(self._limit * HELD_SHARE))
        if held >= share and self._holds.is_held(deployment):
            raise ServeError(503, f"{held} requests wait for memory that is being mended, the limit is {share}", retry_after_s=1)
        if len(self._queue) - max(0, held - share) >= self._limit:
            raise ServeError(503, f"the queue holds its limit of {self._limit} requests", retry_after_s=1)

    def hold(self, deployment: str, lease_s: float) -> tuple[int, float]:
        """Keep its requests back, from now on or longer. Gives how many of them workers have, and how long it lasts: 0.0 not any more."""
        lasts_s = self._holds.hold(deployment, lease_s)
        flying = self._flying.get(deployment, set())
        if lasts_s:
            for job in flying:
                job.is_suspect = True
        self._when_over(deployment)
        return len(flying), lasts_s

    def _when_over(self, deployment: str) -> None:
        """Hand out once the hold has ended: a timer may come a little before that by our clock."""
        if (timer := self._timers.pop(deployment, None)) is not None:
            timer.cancel()
        left_s = self._holds.left_s(deployment)
        if left_s:
            loop = asyncio.get_running_loop()
            self._timers[deployment] = loop.call_later(left_s + TIMER_S, self._when_over, deployment)
        else:
            self.kick()

    def is_held(self, deployment: str) -> bool:
        return self._holds.is_held(deployment)

    def let_go(self, deployment: str) -> None:
        self._holds.let_go(deployment)
        self.kick()

    def let_all_go(self) -> None:
        self._holds.let_all_go()
        self.kick()

    def kick(self) -> None:
        """Hand out what can be handed out. Called when a request arrives or ends, when a worker changes, and when a hold ends."""
        now = self._clock()
        self._holds.expire()
        waiting: set[tuple[str, str]] = set()  # what nobody has room for; a long queue asks for few different things
        for job in tuple(self._queue):
            wanted = job.deployment, job.version
            index = self._choose(job) if job.not_before <= now and wanted not in waiting else None
            if index is None and job.not_before <= now:
                waiting.add(wanted)
            if index is not None:
                self._queue.remove(job)
                self._busy[index] += 1
                task = asyncio.create_task(self._run(job, index))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _choose(self, job: Job) -> int | None:
        """The connected worker with the fewest requests that holds what is asked for and has room; nobody while the deployment is held.

        One that binds a module gets what the others have no room for: it computes more slowly meanwhile.

        A worker that began a moment ago has the fewest and holds nothing yet: as long as another one holds the version that answers, or the
        pinned one, requests wait for that one. Where no worker holds it any may say so.
        """
        if self._holds.is_held(job.deployment):
            return None
        serving = [index for index, worker in enumerate(self._workers) if worker.connected and _says(worker, job.deployment)]
        serving = [index for index in serving if _holds(self._workers[index], job)] or serving
        able = [index for index in serving if self._busy[index] < self._depth]
        return min(able, key=lambda index: (_binds(self._workers[index]), self._busy[index]), default=None)

    async def _run(self, job: Job, index: int) -> None:
        flying = self._flying.setdefault(job.deployment, set())
        flying.add(job)
        try:
            await self._ask(job, self._workers[index])
        finally:
            flying.discard(job)
            self._busy[index] -= 1
            self.kick()

    async def _ask(self, job: Job, worker: Worker) -> None:
        """One attempt: the job has an answer after it, or waits again."""
        try:
            reply = await worker.call(job.call, max(0.001, job.deadline - self._clock()))
        except TimeoutError:
            job.fail(ServeError(504, "the deadline of the request passed while a worker had it"))
        except ConnectionLost:
            if job.replays < MAX_REPLAYS:
                job.replays += 1
                self._on_replay()
                self._again(job)
            else:
                job.fail(ServeError(503, "the worker was lost, and the next one too", retry_after_s=1))
        except CallFailed as failure:
            if job.is_suspect:
                self._again(job)
            elif failure.fault.code == NOT_LOADED:
                self._again(job, NOT_LOADED_WAIT_S)
            else:
                retry_s = NOTHING_SERVES_RETRY_S if failure.fault.code == NOTHING_SERVES else 0
                job.fail(ServeError(failure.fault.status, failure.fault.detail, retry_s))
        except ValueError as cause:
            job.fail(ServeError(413, str(cause)))
        else:
            if job.is_suspect:
                self._again(job)
            elif isinstance(reply, Inferred):
                job.succeed(reply)
            else:
                job.fail(ServeError(500, f"the worker answered with {type(reply).__name__}"))

    def _again(self, job: Job, wait_s: float = 0.0) -> None:
        """Back to the head of the queue, unless nobody waits for it any more."""
        if job.done.done():
            return
        job.is_suspect = False
        job.not_before = self._clock() + wait_s
        self._queue.appendleft(job)
        if wait_s:
            self._kick_at(job.not_before)

    def _kick_at(self, at: float) -> None:
        """Not before our clock shows that time: a loop's timer may come a little early, and nothing else may come at all."""
        left_s = at - self._clock()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s + TIMER_S, self._kick_at, at)
        else:
            self.kick()


def _says(worker: Worker, deployment: str) -> list[Served]:
    return [item for item in worker.served if item.deployment == deployment]


def _binds(worker: Worker) -> bool:
    return any(item.is_binding for item in worker.served)


def _holds(worker: Worker, job: Job) -> bool:
    """The pinned version, or of a request that pins none what its slot of now holds."""
    for item in _says(worker, job.deployment):
        if any(slot.label == job.version if job.version else slot.slot == item.active for slot in item.slots):
            return True
    return False
