"""Executes the plan of one deployment: look, plan, take the first step, look again.

A step that fails for a rollout whose switch is not decided yet is attested as failed, at once when trying again cannot help, after a few
tries otherwise. A step that fails for what is committed is tried for ever, ever more slowly, while the old version goes on serving. A fetch
that nobody wants any more is stopped. Blocking work runs in threads, one step at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from node_agent import failure, report
from node_agent.fetch import Cancelled
from node_agent.plan import (
    Attest,
    Change,
    Decline,
    Fetch,
    Goal,
    Order,
    Pinned,
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
from node_agent.prepared import Prepared
from node_agent.refusal import Refusal
from node_agent.remembered import Remembered
from node_agent.report import Look
from node_agent.runtime import log
from node_agent.scrub import ScrubLook
from node_agent.taking import Means, Serving, Taker
from node_agent.trouble import STEP_FAULTS, Trouble, phase_of, trouble_of
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Phase

DRY_RUN = "dry run"  # instead of the id of a rollout
MAX_TRIES = 5  # of a step for a rollout that is not decided, when another try may help
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
IDLE_S = 1.0  # between looks when nothing is left to do: workers may have come or gone


class Tender:
    def __init__(self, remembered: Remembered, prepared: Prepared, serving: Serving, means: Means) -> None:
        self.remembered = remembered
        self.prepared = prepared
        self.serving = serving
        self._observer = means.observer
        self._taker = Taker(remembered, prepared, serving, means)
        self._goal: Goal | None = None
        self._wake = asyncio.Event()
        self._newest = Order(-1, -1)  # order that was heard
        self._tries = 0
        self._ready = False
        self._step: Step | None = None
        self._taking: asyncio.Task[None] | None = None
        self.idle = False  # the last look found nothing to do for the goal of now
        self.doing = ""
        self.trouble = ""
        self.scrubbed: Callable[[], ScrubLook] = ScrubLook  # by whoever reads the memory again beside this, where anybody does

    def want(self, goal: Goal) -> None:
        """A new goal, or the same again."""
        if goal == self._goal:
            return
        if goal.order > self._newest and not goal.offline:
            self._newest, self._taker.seen_ns = goal.order, time.monotonic_ns()
        waits_otherwise = isinstance(self._step, StageInto) and self._goal is not None and self._goal.drain != goal.drain
        self._goal = goal
        self.idle = False
        self._tries = 0
        self._abandon(lambda step: waits_otherwise or not _wants(goal, step.target))

    def kick(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    async def pin(self, reason: str) -> Target:
        """Go on serving what serves now, whatever is ordered. Raises RaftmetaError starting while nothing verified serves."""
        record = self.remembered.record
        active = next((look.record for look in self.serving.slots() if look.active), None)
        committed = None if self._goal is None else self._goal.committed
        known = [target for target in (record.obeyed, record.pin, committed) if target is not None]
        found = next((each for each in known if active and (each.label, each.checksum) == (active.version, active.checksum)), None)
        if found is None:
            raise RaftmetaError("starting", f"{record.name}: no verified version serves yet that could be pinned")
        await asyncio.to_thread(self.remembered.remember, pinned=Pinned(found, reason))
        log.warning("pinned", deployment=record.name, version=found.label, reason=reason)
        self._abandon(lambda step: step.target != found)
        return found

    async def unpin(self) -> None:
        await asyncio.to_thread(self.remembered.remember, pinned=None)
        log.warning("unpinned", deployment=self.remembered.name)
        self.kick()

    async def abort(self, reason: str) -> str:
        """Fail the running rollout here, so that it ends everywhere. Its id. Raises RaftmetaError without one that is undecided."""
        name, change = self.remembered.name, None if self._goal is None else self._goal.change
        if change is None or change.phase in (Phase.IDLE, Phase.ACTIVE):
            raise RaftmetaError("rollout_not_running", f"{name}: no rollout is running on this node")
        if change.phase is Phase.COMMITTING:
            raise RaftmetaError(
                "wrong_phase", f"{name}: the switch of rollout {change.id} to {change.to.label} is decided; roll back instead"
            )
        why = failure.make("aborted", "plan", name, f"to serve {change.to.label}", f"an operator's word: {reason}")
        await asyncio.to_thread(self.remembered.change_record, change.id)
        await asyncio.to_thread(self.remembered.fail_change, change.id, why)
        self._observer.failed(name, why)
        log.warning("aborted", deployment=name, rollout=change.id, version=change.to.label, reason=reason)
        self._abandon(lambda step: step.target == change.to)
        return change.id

    def _abandon(self, unwanted: Callable[[Step], bool]) -> None:
        """Stop the step being taken, where that leaves nothing half done, and look again."""
        if self._step is not None and unwanted(self._step) and self._taker.abandon(self._step) and self._taking is not None:
            self._taking.cancel()
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
        record, slots = self.remembered.record, self.serving.slots()
        goal = "" if self._goal is None or self._goal.committed is None else self._goal.committed.label
        holders = tuple(holder for slot, look in enumerate(slots) if not look.active for holder in self.serving.holders(slot))
        told = self.serving.abilities.vector_from
        return Look(
            record.name, record.model, record.side, slots, self._ready, record.lag_ms, goal, self.doing, self.trouble, holders, told,
            "" if record.pinned is None else record.pinned.reason,
            record.change, record.damage, self.scrubbed(),
            "" if record.serving_side is None else record.serving_side.value,
        )  # fmt: skip

    def preview(self, target: Target | None = None) -> dict[str, Any]:
        """The steps that are left, for an operator; with `target`, as if a rollout to it had come to syncing. Blocks, changes nothing."""
        goal = self._goal
        if goal is None:
            return {"goal": "", "steps": [], "refused": "the control plane was not heard yet"}
        if target is not None:
            goal = goal._replace(change=Change(DRY_RUN, Phase.SYNCING, target, None))
        made = self._plan_for(goal)
        steps = [{"step": type(step).__name__, "version": step.target.label, **self._cost(step, goal)} for step in made.steps]
        label = goal.committed.label if goal.committed else ""
        return {"goal": label, "rollout": goal.change.id if goal.change else "", "steps": steps, "refused": made.refused}

    def _plan_for(self, goal: Goal) -> Plan:
        return plan(goal, self._see(goal))

    def _cost(self, step: Step, goal: Goal) -> dict[str, Any]:
        """What more there is to say of a step: of fetching and staging as far as what the version consists of is known here."""
        if isinstance(step, Attest):
            return {"stage": step.stage.value}
        if isinstance(step, Decline):
            return {"pinned": step.pinned.target.label, "reason": step.pinned.reason}
        if isinstance(step, Fetch):
            missing = self.prepared.missing_bytes(step.target)
            return {"unknown": "its manifest is not on this node yet"} if missing is None else {"bytes_to_fetch": missing}
        if not isinstance(step, StageInto):
            return {"slot": step.slot} if isinstance(step, Verify | Warm | SwitchTo) else {}
        try:
            return {"slot": step.slot, "counters": report.counters(self.serving.cost(step.target, step.slot, goal.order))}
        except Refusal as refusal:
            return {"slot": step.slot, "unknown": refusal.detail}

    # --- one round

    async def _advance(self, goal: Goal) -> float:
        """Take one step. Gives how long to wait before the next look, 0 for none."""
        made, seen = await asyncio.to_thread(self._plan, goal)
        self._ready = converged(goal, seen) and not made.refused
        behind = is_behind(made)
        if self.remembered.record.behind != behind:
            await asyncio.to_thread(self.remembered.keep, behind=behind)  # a full disk keeps nobody from staging what is here
        self.idle = not made.steps and goal is self._goal
        if not made.steps:
            self.doing = ""
            self._trouble(made.refused)
            return IDLE_S
        step = made.steps[0]
        self._step, self.doing = step, _describe(step)
        self._taking = asyncio.create_task(self._taker.take(step, goal))
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
            self.remembered.change_record(goal.change.id)
        seen = self._see(goal)
        return plan(goal, seen), seen

    def _see(self, goal: Goal) -> Seen:
        """What is true now, for the plan."""
        change, record = goal.change, self.remembered.record
        held = self.serving.look(change.id if change is not None and change.phase in (Phase.PREPARING, Phase.SYNCING) else None)
        targets = [target for target in (goal.committed, change.to if change else None, record.obeyed) if target is not None]
        answering, said = self._taker.answering, self._taker.said
        return Seen(
            slots=held.slots,
            active=held.active,
            answering=answering[0] if answering is not None and answering[1] == held.epoch else None,
            prepared=frozenset(target.checksum for target in targets if self.prepared.covers(target)),
            fence=record.fence,
            obeyed=record.obeyed,
            failed_change=record.change.id if record.change.failure else "",
            said=said[1] if change is not None and said is not None and said[0] == change.id else None,
            pinned=record.pinned,
            passed=self._taker.passed,
        )

    async def _failed(self, step: Step, goal: Goal, trouble: Trouble) -> float:
        self._tries += 1
        self._observer.failed(goal.deployment, trouble.failure)
        self._trouble(f"{self.doing}: {trouble.failure.detail}")
        if goal.change is not None and _ends_change(step, goal) and (not trouble.passing or self._tries >= MAX_TRIES):
            await asyncio.to_thread(self.remembered.fail_change, goal.change.id, trouble.failure)
            self._tries = 0
            return 0.0
        return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._tries - 1, 10)))

    def _trouble(self, text: str) -> None:
        """Logged when it changes, not each time it is met again."""
        if text and text != self.trouble:
            log.warning("deployment_trouble", deployment=self.remembered.name, reason=text)
        self.trouble = text


def _ends_change(step: Step, goal: Goal) -> bool:
    """Does a rollout that is not decided yet depend on this step, and nothing that is committed?

    Memory that rotted ends nothing: the slot was emptied, and the next plan stages it again.
    """
    change = goal.change
    undecided = change is not None and change.phase in (Phase.PREPARING, Phase.SYNCING)
    return change is not None and undecided and not isinstance(step, Attest | Verify) and step.target == change.to != goal.committed


def _wants(goal: Goal, target: Target) -> bool:
    return target == goal.committed or (goal.change is not None and target == goal.change.to)


def _describe(step: Step) -> str:
    if isinstance(step, Attest):
        return f"attest {step.stage.value} for {step.target.label}"
    return f"{type(step).__name__} {step.target.label}"
