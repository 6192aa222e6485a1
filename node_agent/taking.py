"""Takes the steps of a plan, one at a time: what each of them asks of the engine, the store, the node's record and the control plane.

Declares what tending needs of each of these. Of the engine that serves it knows the verbs alone: drain, stage, verify, probe, warm, switch,
release, and cancel where a policy asks for it. The fence is written before the switch that it orders. What a step learns and no record
keeps, who answers and what was attested, is kept here for the next look.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from node_agent import failure, report
from node_agent.fetch import Cancelled
from node_agent.journal import ChangeRecord, DeploymentRecord, LoadPhase, Proof
from node_agent.observe import Observer
from node_agent.plan import (
    Attest,
    AwaitQuiet,
    AwaitWorkers,
    Decline,
    Fetch,
    Goal,
    Obey,
    Order,
    StageInto,
    Step,
    SwitchTo,
    Target,
    Verify,
    Warm,
)
from node_agent.prepared import Prepared
from node_agent.quiet import Gate
from node_agent.refusal import Refusal
from node_agent.remembered import Remembered
from node_agent.runtime import log
from node_agent.serving import Abilities, Digests, Evidence, Holder, Proven, Reading, SlotLook, SlotsSeen, Staging, Switched
from node_agent.trouble import STEP_FAULTS
from raftmeta.core.errors import ErrorClass, RaftmetaError
from raftmeta.core.manifest import Manifest
from raftmeta.core.types import DrainOverdue, Stage, StageCounters

if TYPE_CHECKING:
    from node_agent.tend import Tender

ACKNOWLEDGE_S = 15.0
CANCELLED_S = 15.0  # for the places of requests that were ended to be given back: a worker that ended is noticed by its supervisor


class Serving(Protocol):
    """The engine that serves one deployment on this node: our own slots and workers, or a server that owns its memory.

    Slots are places for one version each; a request that pins none gets the active one. Every verb may run twice, and refuses before it
    touches what serves. What a verb left half done, also one that nobody waits for any more, `look` tells. Verbs raise what
    `trouble.STEP_FAULTS` lists, a Refusal wherever the engine itself says no.
    """

    @property
    def abilities(self) -> Abilities: ...

    @property
    def kernel(self) -> str:
        """What computes, as probes record it."""

    def slots(self) -> tuple[SlotLook, ...]:
        """What the slots hold as far as is known without waiting."""

    def look(self, change: str | None) -> SlotsSeen:
        """What is true now. Blocks. In a standby slot only what was checked and warmed for this rollout counts; None: for any."""

    def held(self) -> frozenset[str]:
        """SHA-256 of the tensors that staging can take from what serves, so that nobody fetches them. Blocks."""

    def cost(self, target: Target, slot: int, order: Order) -> StageCounters:
        """What staging would move now. Blocks, changes nothing."""

    def vector(self, tensor: str = "") -> Reading | None:
        """Of what serves, None while nothing does; of one tensor alone if it is named, without it when there is none of that name.
        Blocks; may run beside everything else."""

    def proven(self) -> Proven | None:
        """What `vector` found last, None unless that was the decided content and the slot is as it was then. Reads no memory."""

    def digests(self, after: str, limit_bytes: int, given_up: Callable[[], bool]) -> Digests | None:
        """SHA-256 of the tensors behind this name, up to so many bytes and at least one, None while nothing serves or once it is given
        up. Blocks; may run beside everything else. Only of an engine whose memory this node can read."""

    def evidence(self) -> Evidence | None:
        """What is known of what serves without looking at its bytes again, None while nothing does that was checked and warmed."""

    async def drain(self, slot: int, limit_s: float) -> None:
        """Until no request uses a slot that is not active, and none can begin to. Raises Refusal slot_busy, which names who holds it."""

    def holders(self, slot: int) -> tuple[Holder, ...]:
        """Who uses the slot now, as far as is known without waiting."""

    async def cancel(self, slot: int) -> None:
        """End the requests that use a slot that is not active; none of them gets a result. Raises Refusal slot_busy when it cannot."""

    async def stage(self, work: Staging) -> StageCounters:
        """Bring the version into a drained slot and check it there."""

    async def verify(self, target: Target, slot: int, change: str) -> None:
        """Check what a slot holds. One that fails is emptied, and nothing serves from it any more."""

    async def probe(self, target: Target, slot: int) -> Proof:
        """Try the version where no request is, and hold its answers to its probes against what the publisher saw."""

    async def warm(self, target: Target, slot: int, change: str) -> None:
        """Make the version ready to answer beside what serves."""

    async def switch(self, target: Target, slot: int) -> Switched:
        """Requests from now on get the version. Raises Refusal unless it was checked and warmed in this slot."""

    async def answering(self, target: Target, limit_s: float) -> None:
        """Until every part that answers does so with the version."""

    async def release(self, slot: int | None) -> None:
        """Forget what a slot that is not active is ready to answer; None: the whole deployment, which leaves this node."""

    def close(self) -> None:
        """Let go; what serves goes on, and a successor takes over."""

    def destroy(self) -> None:
        """Give everything back."""


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
    serve: Callable[[DeploymentRecord], Serving]  # takes over what an earlier control left. Raises Refusal or OSError
    observer: Observer
    gate: Gate | None = None  # on the rate of requests; None: there is none
    beside: Callable[[Tender], Callable[[], Coroutine[Any, Any, None]] | None] = lambda tender: None  # work for as long as it is tended


class Taker:
    def __init__(self, remembered: Remembered, prepared: Prepared, serving: Serving, means: Means) -> None:
        self.answering: tuple[Target, int] | None = None  # who answers every request, since which epoch
        self.said: tuple[str, Stage] | None = None  # attested for this rollout, perhaps not yet in the record
        self.seen_ns = 0  # when the newest order was first heard
        self.passed: str | None = None if means.gate is None else ""  # rollout whose version the gate let through
        self._remembered = remembered
        self._prepared = prepared
        self._serving = serving
        self._means = means
        self._cancel = threading.Event()  # set while files are fetched or made ready: stop
        self._writing = False  # into a slot: nothing stops it
        self._readying = False  # files are being written: `_cancel` stops it, nothing else may

    def abandon(self, step: Step) -> bool:
        """Nobody wants the step that is being taken any more. True when its task may be cancelled: nothing is left half done."""
        self._cancel.set()
        return not self._writing and not self._readying and isinstance(step, StageInto | Warm | AwaitQuiet | AwaitWorkers)

    async def take(self, step: Step, goal: Goal) -> None:
        match step:
            case Fetch():
                await self._fetch(step, goal)
            case StageInto():
                await self._stage(step, goal)
            case Verify():
                with self._timed("verify"):
                    await self._serving.verify(step.target, step.slot, _change_id(goal))
                await self._reach(goal, step.target, LoadPhase.UNPACKED)
            case Warm():
                await self._warm(step, goal)
            case SwitchTo():
                await self._switch(step, goal)
            case AwaitWorkers():
                await self._await_answers(step.target, goal)
            case AwaitQuiet():
                await self._await_quiet(step, goal)
            case Obey():
                await asyncio.to_thread(self._remembered.remember, fence=step.order, obeyed=step.target)
            case Decline():
                await self._decline(step, goal)
            case Attest():
                await self._attest(step, goal)

    async def _fetch(self, step: Fetch, goal: Goal) -> None:
        self._cancel.clear()
        elsewhere = await asyncio.to_thread(self._serving.held)
        with self._timed("fetch"):
            fetched = await self._means.provider.fetch(step.target, elsewhere, self._cancel.is_set)
        self._means.observer.fetched(goal.deployment, fetched)
        self._prepared.forget()
        change = self._change_record(goal, step.target)
        if change is not None:
            await self._count(change, lambda counters: msgspec.structs.replace(counters, bytes_fetched=counters.bytes_fetched + fetched))
        await self._reach(goal, step.target, LoadPhase.VERIFIED)
        log.info("fetched", deployment=goal.deployment, version=step.target.label, bytes=fetched)

    async def _stage(self, step: StageInto, goal: Goal) -> None:
        manifest = await self._means.provider.manifest(step.target)
        await self._drain(step.slot, goal)
        change = self._change_record(goal, step.target)
        fetched = 0 if change is None else change.counters.bytes_fetched
        self._writing = True
        try:
            with self._timed("stage"):
                counters = await self._serving.stage(Staging(step.target, manifest, step.slot, goal.order, _change_id(goal), fetched))
        except Refusal as refusal:
            self._prepared.forget()
            if refusal.kind == "vector_mismatch":
                await self._means.provider.discard_rotten(step.target)
            raise
        finally:
            self._writing = False
        self._means.observer.placed(goal.deployment, counters)
        if change is not None:
            await self._count(change, lambda _: counters)
        await self._reach(goal, step.target, LoadPhase.UNPACKED)
        log.info("staged", deployment=goal.deployment, version=step.target.label, slot=step.slot, **report.counters(counters))

    async def _drain(self, slot: int, goal: Goal) -> None:
        """Past the deployment's time to drain: refused, so that the next try waits on, or what holds the slot is ended."""
        try:
            await self._serving.drain(slot, goal.drain.limit_s)
        except Refusal as refusal:
            if refusal.kind != "slot_busy" or goal.drain.overdue is DrainOverdue.WAIT:
                raise
            log.warning("requests_cancelled", deployment=goal.deployment, slot=slot, holders=list(map(str, self._serving.holders(slot))))
            await self._serving.cancel(slot)
            await self._serving.drain(slot, CANCELLED_S)

    async def _end_overdue(self, goal: Goal) -> None:
        """End what has used a slot that does not serve for longer than it may."""
        for slot, look in enumerate(self._serving.slots()):
            holders = () if look.active else self._serving.holders(slot)
            overdue = [str(holder) for holder in holders if holder.seconds is not None and holder.seconds >= goal.drain.limit_s]
            if overdue:
                log.warning("requests_cancelled", deployment=goal.deployment, slot=slot, holders=overdue)
                await self._serving.cancel(slot)

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
        await self._reach(goal, step.target, LoadPhase.MAPPED)
        with self._timed("warm"):
            await self._serving.warm(step.target, step.slot, _change_id(goal))
        await self._reach(goal, step.target, LoadPhase.VALIDATED)

    async def _prove(self, step: Warm, goal: Goal) -> None:
        """Once per version and kernel: a roll-back and a restart go on what was seen before."""
        if self._remembered.proof(step.target, self._serving.kernel) is not None:
            return
        with self._timed("probe"):
            proof = await self._serving.probe(step.target, step.slot)
        await asyncio.to_thread(self._remembered.note_proof, proof)
        log.info("proved", deployment=goal.deployment, version=step.target.label, warm_ms=proof.warm_ms, probes=len(proof.measured))

    async def _switch(self, step: SwitchTo, goal: Goal) -> None:
        await asyncio.to_thread(self._remembered.obey, step.target, step.order, self.seen_ns)
        with self._timed("switch"):
            done = await self._serving.switch(step.target, step.slot)
        self._means.observer.paused(goal.deployment, done.call_us)
        call_us = -int(-done.call_us // 1)
        log.info("switched", deployment=goal.deployment, version=step.target.label, slot=step.slot, epoch=done.epoch, call_us=call_us)
        await self._await_answers(step.target, goal)  # at once: the lag runs until they answer
        change = self._change_record(goal, step.target)
        if change is not None:
            await self._count(
                change, lambda counters: msgspec.structs.replace(counters, switch_call_us=max(counters.switch_call_us, call_us))
            )

    async def _await_answers(self, target: Target, goal: Goal) -> None:
        """A request that does not leave the old slot keeps its worker from answering: the time to drain holds for it too."""
        epoch = (await asyncio.to_thread(self._serving.look, None)).epoch
        was_due = self._remembered.record.order_seen_ns
        cancels = goal.drain.overdue is DrainOverdue.CANCEL
        try:
            with self._timed("await_workers"):
                await self._serving.answering(target, min(ACKNOWLEDGE_S, goal.drain.limit_s) if cancels else ACKNOWLEDGE_S)
        except STEP_FAULTS:
            if cancels:
                await self._end_overdue(goal)
            raise
        await asyncio.to_thread(self._remembered.note_answering, target)
        if was_due:
            self._means.observer.answered(goal.deployment, self._remembered.record.lag_ms)
        self.answering = target, epoch

    async def _await_quiet(self, step: AwaitQuiet, goal: Goal) -> None:
        assert self._means.gate is not None
        with self._timed("await_quiet"):
            await self._means.gate.passed(goal.deployment)
        self.passed = step.change
        log.info("quiet", deployment=goal.deployment, rollout=step.change, version=step.target.label)

    async def _decline(self, step: Decline, goal: Goal) -> None:
        kept = f"{step.pinned.target.label}, pinned: {step.pinned.reason}"
        why = failure.make("pinned", "plan", goal.deployment, f"to serve {step.target.label}", kept)
        self._means.observer.failed(goal.deployment, why)
        await asyncio.to_thread(self._remembered.fail_change, step.change, why)

    async def _attest(self, step: Attest, goal: Goal) -> None:
        change = self._remembered.change_record(step.change)
        if step.stage is Stage.PREPARED:  # also when there was nothing to fetch
            await self._reach(goal, step.target, LoadPhase.VERIFIED)
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
        self.said = step.change, step.stage
        log.info("attested", deployment=goal.deployment, stage=step.stage.value, version=step.target.label, code=change.failure.kind)

    def _with_costs(self, step: Attest, goal: Goal, change: ChangeRecord) -> ChangeRecord:
        """Fill in what no step has counted: a version that its slot held already, and the lag."""
        counters = change.counters
        slots = [at for at, look in enumerate(self._serving.slots()) if look.record.checksum == step.target.checksum and not look.active]
        if not counters.bytes_total and step.stage is Stage.READY and slots:
            kept = self._serving.cost(step.target, slots[0], goal.order)
            self._means.observer.placed(goal.deployment, kept)
            counters = msgspec.structs.replace(kept, bytes_fetched=counters.bytes_fetched)
        if step.stage is Stage.ACTIVE:
            counters = msgspec.structs.replace(counters, lag_ms=self._remembered.record.lag_ms)
        self._remembered.note_cost(change.id, counters)
        return self._remembered.change_record(change.id)

    def _timed(self, step: str) -> AbstractContextManager[None]:
        return self._means.observer.step(self._remembered.name, step)

    async def _count(self, change: ChangeRecord, make: Callable[[StageCounters], StageCounters]) -> None:
        await asyncio.to_thread(self._remembered.count, change.id, make)

    async def _reach(self, goal: Goal, target: Target, phase: LoadPhase) -> None:
        if (change := self._change_record(goal, target)) is not None:
            await asyncio.to_thread(self._remembered.reach, change.id, phase)

    def _change_record(self, goal: Goal, target: Target) -> ChangeRecord | None:
        if goal.change is None or goal.change.to != target:
            return None
        return self._remembered.change_record(goal.change.id)


def _change_id(goal: Goal) -> str:
    return "" if goal.change is None else goal.change.id
