"""Reads the memory of one deployment again and again while it serves, and sees to it that what changed is mended.

A pass reads all blocks in the order of `scrub`, spread over the interval, in a thread that gives way to everybody else and within the
node's budget; it stands back while anybody stages. Then every worker digests the tensors that its module holds outside the slot.
A block that differs is read a second time: right now, it was the reading; wrong again, it is the memory, the node is not ready, and it is
mended. After damage all is read again without waiting, and only then is the node ready again. A worker whose own tensors changed ends, and
the node is ready again once its successor was looked at, or has been waited for long enough.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from consistency.vector import Words
from node_agent import scrub
from node_agent.active_memory import ActiveMemory, Watched
from node_agent.background import give_way
from node_agent.budget import Budget
from node_agent.failure import MAX_TEXT
from node_agent.mending import Damage, Mender
from node_agent.messages import DerivedChecked
from node_agent.observe import Observer
from node_agent.remembered import Remembered
from node_agent.runtime import log
from node_agent.scrub import Finding, FindingKind, Order, Remedy, ScrubLook, Span

LOOK_S: Final = 1.0  # between looks while nothing is due: what serves may have changed, or somebody suspects it
STAND_BACK_S: Final = 0.1
MAX_FINDINGS: Final = 32  # that the status remembers
MAX_REPLACED: Final = 3  # passes in a row that workers are replaced for derived tensors; after that it is not their memory
DOUBT_SHARE: Final = (
    0.1  # of the interval, between passes that failing modules hurry: whoever makes one fail must not make us read for ever
)
RELOAD_S: Final = 60.0  # for a worker that was replaced to load


class Workers(Protocol):
    def failed(self, deployment: str) -> int:
        """Requests that a module failed at, as far as is known without waiting."""

    async def check_derived(self, deployment: str, slot: int, checksum: str, ends: bool) -> list[tuple[int, DerivedChecked]]: ...


@dataclass(frozen=True)
class ScrubMeans:
    """Shared by the deployments of a node."""

    interval_s: float
    budget: Budget
    reading: Executor
    workers: Workers
    observer: Observer
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # nothing is read in the idle thread while a repair is under way
    clock: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time


class _Wrong(NamedTuple):
    span: Span  # one block
    found: Words  # [1, 2]


def idle_thread() -> Executor:
    """One thread that gives way to everybody; it does nothing else."""
    return ThreadPoolExecutor(1, "scrub", initializer=give_way)


class Scrub:
    def __init__(self, memory: ActiveMemory, mender: Mender, remembered: Remembered, means: ScrubMeans) -> None:
        self._memory = memory
        self._mender = mender
        self._remembered = remembered
        self._means = means
        self._name = remembered.name
        self._findings: deque[Finding] = deque(maxlen=MAX_FINDINGS)
        self._damaged: tuple[int, int] | None = None  # slot and epoch that were mended and not read as a whole since
        self._hurries = False  # somebody suspects damage: this pass waits for nothing
        self._failed, self._doubted_at = 0, -means.interval_s  # what modules had failed at when that was a reason to look, and when
        self._replaced = 0  # passes in a row
        self._are_workers_damaged = False
        self._number, self._done, self._total = -1, 0, 0

    def look(self) -> ScrubLook:
        return ScrubLook(self._number, self._done, self._total, tuple(self._findings))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            watched = await asyncio.to_thread(self._memory.watched)
            if watched is None:
                await asyncio.sleep(LOOK_S)
                continue
            if self._damaged != (watched.slot, watched.epoch):
                self._damaged = None
                await self._whole()  # this process verified all of what serves now
            await self._pass(watched)

    # --- one pass

    async def _pass(self, watched: Watched) -> None:
        means = self._means
        self._number = scrub.pass_number(means.wall_s(), means.interval_s)
        order = await asyncio.to_thread(Order, watched.sizes, scrub.seed(watched.record.checksum, self._number))
        self._done, self._total = 0, order.total_bytes
        begun, begun_ms, begun_ns = means.clock(), round(means.wall_s() * 1000), self._memory.now_ns()
        self._hurries = self._memory.suspect.is_set()
        self._memory.suspect.clear()
        self._warn_if_slow()
        for run in order:
            due = begun + scrub.due_s(self._done, self._total, means.interval_s)
            if not await self._until(due, watched) or not await self._look_at(watched, run, order.run_bytes(run)):
                return
        self._memory.note_pass(watched, begun_ms, begun_ns)
        self._damaged, self._hurries = None, False
        await self._whole()
        await self._look_at_workers(watched)
        means.observer.scrub_passed(self._name)
        await self._until(begun + means.interval_s, watched)

    async def _until(self, due: float, watched: Watched) -> bool:
        """Wait for that time, or less where there is damage about. False when something else serves by now."""
        means = self._means
        while self._memory.is_current(watched):
            self._hurry_if_modules_fail()
            left = 0.0 if self._is_urgent else due - means.clock()
            if means.budget.stands_back and not self._is_urgent:
                await asyncio.sleep(STAND_BACK_S)
            elif left <= 0:
                return True
            else:
                await asyncio.sleep(min(left, LOOK_S))
        return False

    def _hurry_if_modules_fail(self) -> None:
        """A module that fails may do so because of its memory: a number that is none, an index that is too large."""
        failed, now = self._means.workers.failed(self._name), self._means.clock()
        self._failed = min(self._failed, failed)  # a worker that began anew has failed at nothing
        if failed > self._failed and now - self._doubted_at >= DOUBT_SHARE * self._means.interval_s:
            self._failed, self._doubted_at = failed, now
            self._memory.suspect.set()

    @property
    def _is_urgent(self) -> bool:
        return self._damaged is not None or self._hurries or self._memory.suspect.is_set()

    async def _look_at(self, watched: Watched, run: Sequence[Span], size: int) -> bool:
        """False when the pass has to begin anew."""
        async with self._means.turn:
            wrong = await asyncio.get_running_loop().run_in_executor(self._means.reading, self._read, watched, run, size)
        if wrong and self._memory.is_current(watched):
            async with self._means.turn:
                if not await self._judge(watched, wrong):
                    return False
        self._done += size
        self._means.observer.scrubbed(self._name, size)
        return True

    def _read(self, watched: Watched, run: Sequence[Span], size: int) -> list[_Wrong]:
        self._means.budget.spend(size)
        found = [(span, self._memory.read(watched, span)) for span in run]
        return [
            _Wrong(Span(span.tensor, span.first + at, 1), sums[at : at + 1])
            for span, sums in found
            for at in scrub.wrong_blocks(watched.expected(span), sums)
        ]

    async def _judge(self, watched: Watched, wrong: Sequence[_Wrong]) -> bool:
        """True when it was the reading alone."""
        twice: list[_Wrong] = []
        for item in wrong:
            again = await asyncio.to_thread(self._memory.read, watched, item.span)
            if np.array_equal(again, watched.expected(item.span)):
                self._note(self._finding(FindingKind.TRANSIENT, watched, item.span, item.found))
            else:
                twice.append(item)
        if twice and self._memory.is_current(watched):
            await self._mend(watched, twice)
        return not twice

    async def _mend(self, watched: Watched, twice: Sequence[_Wrong]) -> None:
        self._damaged = watched.slot, watched.epoch
        self._memory.doubt(watched)
        tensors = list(dict.fromkeys(item.span.tensor for item in twice))
        found: list[Finding] = []

        def note(damage: Damage) -> None:
            spans = [Span(name, block, 1) for name, blocks in damage.items() for block in blocks]
            for span in spans[:MAX_FINDINGS]:
                found.append(self._finding(FindingKind.MEMORY, watched, span, self._memory.read(watched, span)))
            self._say(f"memory of {watched.record.version} is damaged: {found[0].detail}; {len(spans)} blocks in all")
            for finding in found:
                self._note(finding)

        mended = await self._mender.mend(watched, tensors, note)
        if mended.remedy is Remedy.NOTHING:
            if self._memory.is_current(watched):  # right at the third reading
                self._note(self._finding(FindingKind.TRANSIENT, watched, twice[0].span, twice[0].found))
            return
        outcome = "repaired" if mended.remedy is Remedy.REPAIR else "restaged"
        self._findings = deque((each._replace(remedy=outcome) if each in found else each for each in self._findings), MAX_FINDINGS)
        self._means.observer.mended(self._name, outcome)
        log.warning("memory_mended", deployment=self._name, outcome=outcome, tensors=list(tensors), reason=mended.why)

    # --- what workers hold outside the slot

    async def _look_at_workers(self, watched: Watched) -> None:
        ends = self._replaced < MAX_REPLACED
        damaged = [(worker, reply) for worker, reply in await self._ask_workers(watched, ends) if reply.damaged]
        self._are_workers_damaged = bool(damaged)
        self._replaced = self._replaced + 1 if damaged else 0
        for worker, reply in damaged:
            for item in reply.damaged:
                finding = Finding(
                    FindingKind.DERIVED, item.tensor, item.block, item.expected, item.found, f"worker {worker}",
                    watched.record.version, round(self._means.wall_s() * 1000), "replaced" if reply.ends else "",
                )  # fmt: skip
                await asyncio.to_thread(self._say, f"memory of a worker is damaged: {finding.detail}")
                self._note(finding)
            if reply.ends:
                self._means.observer.mended(self._name, "replaced")
        if damaged and ends:
            self._are_workers_damaged = await self._are_damaged_anew(watched, {worker for worker, _ in damaged})
        await self._whole()

    async def _are_damaged_anew(self, watched: Watched, replaced: Set[int]) -> bool:
        """Of workers that were replaced, once all of them have loaded, or should have."""
        deadline = self._means.clock() + RELOAD_S
        while self._memory.is_current(watched) and self._means.clock() < deadline:
            await asyncio.sleep(LOOK_S)
            replies = {worker: reply for worker, reply in await self._ask_workers(watched, False) if worker in replaced}
            if replies.keys() == replaced:
                return any(reply.damaged for reply in replies.values())
        return False

    async def _ask_workers(self, watched: Watched, ends: bool) -> list[tuple[int, DerivedChecked]]:
        return await self._means.workers.check_derived(self._name, watched.slot, watched.record.checksum, ends)

    # --- saying so

    def _finding(self, kind: FindingKind, watched: Watched, span: Span, found: Words) -> Finding:
        expected = scrub.sums_text(watched.expected(span)[0])
        at_ms = round(self._means.wall_s() * 1000)
        return Finding(
            kind, span.tensor, span.first, expected, scrub.sums_text(found[0]), f"slot {watched.slot}", watched.record.version, at_ms
        )

    def _note(self, finding: Finding) -> None:
        self._findings.append(finding)
        self._means.observer.found(self._name, finding.kind.value)
        log.error("finding", deployment=self._name, kind=finding.kind.value, detail=finding.detail, remedy=finding.remedy)

    def _say(self, damage: str) -> None:
        """Durable where the disk takes it: not ready until it is taken back, also by the next control process."""
        self._remembered.keep(damage=damage[:MAX_TEXT])

    async def _whole(self) -> None:
        """Everything is as it was verified, unless workers are not."""
        if self._remembered.record.damage and not self._are_workers_damaged:
            await asyncio.to_thread(self._say, "")

    def _warn_if_slow(self) -> None:
        means = self._means
        needed = scrub.needed_bytes_per_s(self._total, means.interval_s)
        if needed > means.budget.bytes_per_s:
            log.warning(
                "scrub_slower_than_asked", deployment=self._name, interval_s=means.interval_s, needed_bytes_per_s=round(needed),
                budget_bytes_per_s=round(means.budget.bytes_per_s),
            )  # fmt: skip
