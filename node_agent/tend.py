"""Executes the plan of one deployment: look, plan, take the first step, look again.

A step that fails for a rollout whose switch is not decided yet is attested as failed, at once when trying again cannot help, after a few
tries otherwise. A step that fails for what is committed is tried for ever, ever more slowly, while the old version goes on serving. A fetch
that nobody wants any more is stopped. Blocking work runs in threads, one step at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from node_agent import report
from node_agent.crew import Crew
from node_agent.fetch import Cancelled
from node_agent.journal import ChangeRecord, Proof
from node_agent.observe import Observer
from node_agent.plan import (
    Attest,
    AwaitWorkers,
    Fetch,
    Goal,
    Obey,
    Order,
    Plan,
    Seen,
    StageInto,
    Step,
    SwitchTo,
    Target,
    Verify,
    Warm,
    converged,
    is_behind,
    plan,
)
from node_agent.refusal import Refusal
from node_agent.report import Look, SlotLook
from node_agent.runtime import log
from node_agent.station import Station
from node_agent.trouble import STEP_FAULTS, Trouble, phase_of, trouble_of
from raftmeta.core.errors import ErrorClass, RaftmetaError
from raftmeta.core.manifest import Manifest
from raftmeta.core.types import Phase, Stage

MAX_TRIES = 5  # of a step for a rollout that is not decided, when another try may help
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
IDLE_S = 1.0  # between looks when nothing is left to do: workers may have come or gone
ACKNOWLEDGE_S = 15.0


class Provider(Protocol):
    """Brings what a version consists of into this node's store."""

    async def fetch(self, target: Target, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
        """Bytes that came from sources. Raises FetchFailed, Cancelled or RaftmetaError."""

    async def manifest(self, target: Target) -> Manifest: ...

    async def ready_files(self, target: Target, cancelled: Callable[[], bool]) -> None:
        """The files that modules are made of are verified now. Raises as `fetch` does, or BlobsRotten."""

    async def discard_rotten(self, target: Target) -> None:
        """Throw out blobs of the version that are no longer what they were. Raises BlobsRotten when there were any."""


class Plane(Protocol):
    """The one call to the control plane that a deployment makes by itself."""

    async def attest(self, node: str, attestation: dict[str, Any]) -> object: ...


@dataclass(frozen=True)
class Means:
    """What tending takes, shared by the deployments of a node."""

    node: str
    boot_id: str
    plane: Plane
    provider: Provider
    crew: Crew
    kernel: str  # what computes on this node
    observer: Observer


class Tender:
    def __init__(self, station: Station, means: Means) -> None:
        self.station = station
        self._means = means
        self._goal: Goal | None = None
        self._wake = asyncio.Event()
        self._seen_ns: tuple[Order, int] = (Order(-1, -1), 0)  # when the newest order was first heard
        self._answering: tuple[Target, int] | None = None  # what every worker said, in which epoch
        self._said: tuple[str, Stage] | None = None  # attested, perhaps not yet in the record
        self._tries = 0
        self._ready = False
        self._cancel = threading.Event()  # set while a fetch runs: stop it
        self._readying = False  # files are being written: `_cancel` stops it, nothing else may
        self._step: Step | None = None
        self._taking: asyncio.Task[None] | None = None
        self.idle = False  # the last look found nothing to do for the goal of now
        self.doing = ""
        self.trouble = ""

    def want(self, goal: Goal) -> None:
        """A new goal, or the same again."""
        if goal == self._goal:
            return
        if goal.order > self._seen_ns[0] and not goal.offline:
            self._seen_ns = goal.order, time.monotonic_ns()
        self._goal = goal
        self.idle = False
        self._tries = 0
        if self._step is not None and not _wants(goal, self._step.target):
            self._cancel.set()
            if isinstance(self._step, Warm | AwaitWorkers) and self._taking is not None and not self._readying:
                self._taking.cancel()  # waits for workers, perhaps long; nothing is left half done
        self._wake.set()

    def kick(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    @property
    def goal(self) -> Goal | None:
        return self._goal

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            goal = self._goal
            wait_s = IDLE_S if goal is None else await self._advance(goal)
            if wait_s:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()

    def look(self) -> Look:
        """For heartbeats and status."""
        station, record, active = self.station, self.station.record, self.station.active
        slots = tuple(SlotLook(station.slot_record(slot), slot == active) for slot in (0, 1))
        goal = "" if self._goal is None or self._goal.committed is None else self._goal.committed.label
        return Look(record.name, record.model, record.side, slots, self._ready, record.lag_ms, goal, self.doing, self.trouble)

    def preview(self) -> dict[str, Any]:
        """The steps that are left, for an operator. Blocks, changes nothing."""
        goal = self._goal
        if goal is None:
            return {"goal": "", "steps": [], "refused": "the control plane was not heard yet"}
        made = self._plan_for(goal)
        steps = [{"step": type(step).__name__, "version": step.target.label, **self._cost(step, goal)} for step in made.steps]
        label = goal.committed.label if goal.committed else ""
        return {"goal": label, "rollout": goal.change.id if goal.change else "", "steps": steps, "refused": made.refused}

    def _plan_for(self, goal: Goal) -> Plan:
        return plan(goal, self._see(goal))

    def _cost(self, step: Step, goal: Goal) -> dict[str, Any]:
        """Of staging, if what it consists of is on this node already."""
        if not isinstance(step, StageInto):
            return {"slot": step.slot} if isinstance(step, Verify | Warm | SwitchTo) else {}
        try:
            return {"slot": step.slot, "counters": report.counters(self.station.staging_cost(step.target, step.slot, goal.order))}
        except Refusal as refusal:
            return {"slot": step.slot, "unknown": refusal.detail}

    # --- one round

    async def _advance(self, goal: Goal) -> float:
        """Take one step. Gives how long to wait before the next look, 0 for none."""
        made, seen = await asyncio.to_thread(self._plan, goal)
        self._ready = converged(goal, seen) and not made.refused
        behind = is_behind(made)
        if self.station.record.behind != behind:
            await asyncio.to_thread(self.station.remember, behind=behind)
        self.idle = not made.steps and goal is self._goal
        if not made.steps:
            self.doing = ""
            self._trouble(made.refused)
            return IDLE_S
        step = made.steps[0]
        self._step, self.doing = step, _describe(step)
        self._taking = asyncio.create_task(self._take(step, goal))
        try:
            await asyncio.wait({self._taking})
            if self._taking.cancelled():
                return 0.0
            self._taking.result()
        except Cancelled:
            return 0.0
        except STEP_FAULTS as cause:
            return await self._failed(step, goal, trouble_of(cause, phase_of(step)))
        finally:
            self._taking.cancel()
            self._step = self._taking = None
        self._tries = 0
        if not made.refused:
            self._trouble("")
        return 0.0

    def _plan(self, goal: Goal) -> tuple[Plan, Seen]:
        if goal.change is not None:
            self.station.change_record(goal.change.id)
        seen = self._see(goal)
        return plan(goal, seen), seen

    def _see(self, goal: Goal) -> Seen:
        seen = self.station.look(goal, lambda slot, target: self._means.crew.loaded(goal.deployment, slot, target))
        answering = self._answering
        if answering is not None and answering[1] == self.station.block.active()[1]:
            seen = seen._replace(answering=answering[0])
        if goal.change is not None and self._said is not None and self._said[0] == goal.change.id:
            seen = seen._replace(said=self._said[1])
        return seen

    async def _failed(self, step: Step, goal: Goal, trouble: Trouble) -> float:
        self._tries += 1
        self._means.observer.failed(goal.deployment, trouble.failure)
        self._trouble(f"{self.doing}: {trouble.failure.detail}")
        if goal.change is not None and _ends_change(step, goal) and (not trouble.passing or self._tries >= MAX_TRIES):
            change = msgspec.structs.replace(self.station.change_record(goal.change.id), failure=trouble.failure)
            await asyncio.to_thread(self.station.remember, change=change)
            self._tries = 0
            return 0.0
        return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._tries - 1, 10)))

    def _trouble(self, text: str) -> None:
        """Logged when it changes, not each time it is met again."""
        if text and text != self.trouble:
            log.warning("deployment_trouble", deployment=self.station.name, reason=text)
        self.trouble = text

    # --- the steps

    async def _take(self, step: Step, goal: Goal) -> None:
        match step:
            case Fetch():
                await self._fetch(step, goal)
            case StageInto():
                await self._stage(step, goal)
            case Verify():
                with self._timed("verify"):
                    await asyncio.to_thread(self.station.verify, step.target, step.slot, _change_id(goal))
            case Warm():
                await self._warm(step, goal)
            case SwitchTo():
                await self._switch(step, goal)
            case AwaitWorkers():
                await self._await_workers(step.target)
            case Obey():
                await asyncio.to_thread(self.station.remember, fence=step.order, obeyed=step.target)
            case Attest():
                await self._attest(step, goal)

    async def _fetch(self, step: Fetch, goal: Goal) -> None:
        self._cancel.clear()
        elsewhere = await asyncio.to_thread(self.station.held_by_active)
        with self._timed("fetch"):
            fetched = await self._means.provider.fetch(step.target, elsewhere, self._cancel.is_set)
        self._means.observer.fetched(goal.deployment, fetched)
        self.station.forget_prepared()
        if goal.change is not None and goal.change.to == step.target:
            change = self.station.change_record(goal.change.id)
            counters = msgspec.structs.replace(change.counters, bytes_fetched=change.counters.bytes_fetched + fetched)
            await asyncio.to_thread(self.station.remember, change=msgspec.structs.replace(change, counters=counters))
        log.info("fetched", deployment=goal.deployment, version=step.target.label, bytes=fetched)

    async def _stage(self, step: StageInto, goal: Goal) -> None:
        manifest = await self._means.provider.manifest(step.target)
        if not await asyncio.to_thread(self.station.has_room, manifest):
            await self._means.crew.release(goal.deployment, -1)
            await asyncio.to_thread(self.station.make_room, manifest)
        await self._means.crew.release(goal.deployment, step.slot)
        change = self._change_record(goal, step.target)
        fetched = 0 if change is None else change.counters.bytes_fetched
        try:
            with self._timed("stage"):
                counters = await asyncio.to_thread(self.station.stage, step.target, step.slot, goal.order, _change_id(goal), fetched)
        except Refusal as refusal:
            if refusal.kind == "vector_mismatch":
                await self._means.provider.discard_rotten(step.target)
                self.station.forget_prepared()
            raise
        self._means.observer.placed(goal.deployment, counters)
        if change is not None:
            await asyncio.to_thread(self.station.remember, change=msgspec.structs.replace(change, counters=counters))
        log.info("staged", deployment=goal.deployment, version=step.target.label, slot=step.slot, **report.counters(counters))

    async def _warm(self, step: Warm, goal: Goal) -> None:
        self._cancel.clear()
        self._readying = True
        try:
            await self._means.provider.ready_files(step.target, self._cancel.is_set)
        finally:
            self._readying = False
        if self._cancel.is_set():
            raise Cancelled
        await self._prove(step, goal)
        with self._timed("warm"):
            await self._means.crew.load(goal.deployment, step.slot, step.target)
        self.station.note_warm(step.slot, _change_id(goal))

    async def _prove(self, step: Warm, goal: Goal) -> None:
        """Once per version and kernel: a roll-back and a restart go on what was seen before."""
        kernel = self._means.kernel
        if self.station.proof(step.target, kernel) is not None:
            return
        with self._timed("probe"):
            found = await self._means.crew.prove(goal.deployment, step.slot, step.target)
        proof = Proof(step.target.checksum, kernel, found.warm_ms, found.peak_bytes, found.derived, found.measured)
        await asyncio.to_thread(self.station.note_proof, proof)
        log.info("proved", deployment=goal.deployment, version=step.target.label, warm_ms=found.warm_ms, probes=len(found.measured))

    async def _switch(self, step: SwitchTo, goal: Goal) -> None:
        with self._timed("switch"):
            done = await asyncio.to_thread(self.station.switch, step.target, step.slot, step.order, self._seen_ns[1])
        self._means.observer.paused(goal.deployment, done.call_us)
        call_us = -int(-done.call_us // 1)
        log.info("switched", deployment=goal.deployment, version=step.target.label, slot=step.slot, epoch=done.epoch, call_us=call_us)
        await self._await_workers(step.target)  # at once: the lag runs until they answer
        change = self._change_record(goal, step.target)
        if change is not None:
            counters = msgspec.structs.replace(change.counters, switch_call_us=max(change.counters.switch_call_us, call_us))
            await asyncio.to_thread(self.station.remember, change=msgspec.structs.replace(change, counters=counters))

    async def _await_workers(self, target: Target) -> None:
        epoch = self.station.block.active()[1]
        was_due = self.station.record.order_seen_ns
        with self._timed("await_workers"):
            await self._means.crew.acknowledged(self.station.name, target, ACKNOWLEDGE_S)
        await asyncio.to_thread(self.station.note_answering, target)
        if was_due:
            self._means.observer.answered(self.station.name, self.station.record.lag_ms)
        self._answering = target, epoch

    async def _attest(self, step: Attest, goal: Goal) -> None:
        change = self.station.change_record(step.change)
        if step.stage in (Stage.READY, Stage.ACTIVE):
            change = await asyncio.to_thread(self._with_costs, step, goal, change)
        body = report.attestation(step, goal.side, self._means.boot_id, step.target.vector_root, change)
        try:
            await self._means.plane.attest(self._means.node, body)
        except RaftmetaError as error:
            if error.info.error_class is ErrorClass.UNAVAILABLE:
                raise
            # the rollout went on or ended without us; the watch tells what is wanted now
            log.warning("attestation_refused", deployment=goal.deployment, stage=step.stage.value, reason=str(error))
        self._said = step.change, step.stage
        log.info("attested", deployment=goal.deployment, stage=step.stage.value, version=step.target.label, code=change.failure.kind)

    def _with_costs(self, step: Attest, goal: Goal, change: ChangeRecord) -> ChangeRecord:
        """Fill in what no step has counted: a version that its slot held already, and the lag."""
        counters = change.counters
        slots = [slot for slot in (0, 1) if self.station.slot_record(slot).checksum == step.target.checksum and slot != self.station.active]
        if not counters.bytes_total and step.stage is Stage.READY and slots:
            kept = self.station.staging_cost(step.target, slots[0], goal.order)
            self._means.observer.placed(goal.deployment, kept)
            counters = msgspec.structs.replace(kept, bytes_fetched=counters.bytes_fetched)
        if step.stage is Stage.ACTIVE:
            counters = msgspec.structs.replace(counters, lag_ms=self.station.record.lag_ms)
        change = msgspec.structs.replace(change, counters=counters)
        self.station.remember(change=change)
        return change

    def _timed(self, step: str) -> AbstractContextManager[None]:
        return self._means.observer.step(self.station.name, step)

    def _change_record(self, goal: Goal, target: Target) -> ChangeRecord | None:
        if goal.change is None or goal.change.to != target:
            return None
        return self.station.change_record(goal.change.id)


def _ends_change(step: Step, goal: Goal) -> bool:
    """Does a rollout that is not decided yet depend on this step, and nothing that is committed?

    Memory that rotted ends nothing: the slot was emptied, and the next plan stages it again.
    """
    change = goal.change
    undecided = change is not None and change.phase in (Phase.PREPARING, Phase.SYNCING)
    return change is not None and undecided and not isinstance(step, Attest | Verify) and step.target == change.to != goal.committed


def _wants(goal: Goal, target: Target) -> bool:
    return target == goal.committed or (goal.change is not None and target == goal.change.to)


def _change_id(goal: Goal) -> str:
    return "" if goal.change is None else goal.change.id


def _describe(step: Step) -> str:
    if isinstance(step, Attest):
        return f"attest {step.stage.value} for {step.target.label}"
    return f"{type(step).__name__} {step.target.label}"
