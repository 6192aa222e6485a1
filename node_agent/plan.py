"""What a node should do next for one deployment: desired minus observed, as a list of steps. Pure.

Every step may run twice; whoever executes looks again after each one and asks for a new plan, so a crash between any two steps only repeats
work. What must stay true: a step never writes to the active slot; a switch names a slot that is verified, checked by this process and
loaded in every worker; an order below the highest one obeyed is refused; the version that serves comes before the one that a rollout
prepares. A rollout that failed here is attested as failed and then left alone. While an operator pins a version that one serves, whatever
is ordered, and a rollout to another one fails here.
"""

from __future__ import annotations

from typing import NamedTuple

from node_agent.device.port import SlotState
from raftmeta.core.types import DrainOverdue, Phase, SideName, Stage

SLOTS = (0, 1)


class Order(NamedTuple):
    """The fence: orders are obeyed in rising order of (generation, revision) only."""

    generation: int
    revision: int


NO_ORDER = Order(0, 0)


class Target(NamedTuple):
    """One version of the deployment's model."""

    model: str
    label: str
    checksum: str
    vector_root: str


class Change(NamedTuple):
    """A running rollout, as the control plane has it."""

    id: str
    phase: Phase
    to: Target
    attested: Stage | None  # by this node, so far
    is_undo: bool = False  # a roll-back, which waits for nothing that it does not need


class Drain(NamedTuple):
    """How long requests may keep the old slot when it has to be rewritten, and what happens then."""

    limit_s: float = 60.0
    overdue: DrainOverdue = DrainOverdue.WAIT


class Goal(NamedTuple):
    """What the control plane, or without it the pin, wants of this node for one deployment."""

    deployment: str
    side: SideName
    committed: Target | None  # None before the first activation
    order: Order  # of `committed`
    change: Change | None
    offline: bool = False  # made of what this node remembers, not of an order: the fence does not judge it
    drain: Drain = Drain()


class SlotSeen(NamedTuple):
    label: str = ""
    checksum: str = ""
    state: SlotState = SlotState.EMPTY
    checked: bool = False  # this process computed the vector of these bytes
    loaded: bool = False  # every worker has bound and warmed it

    def holds(self, target: Target) -> bool:
        return self.state is SlotState.VERIFIED and (self.label, self.checksum) == (target.label, target.checksum)


class Pinned(NamedTuple):
    """The version that an operator keeps serving here, and why."""

    target: Target
    reason: str


class Seen(NamedTuple):
    """What is true of one deployment on this node."""

    slots: tuple[SlotSeen, SlotSeen]
    active: int | None  # None: nothing serves
    answering: Target | None  # what every worker said it answers with, None when unknown
    prepared: frozenset[str]  # checksums whose bytes are all on this node
    fence: Order
    obeyed: Target | None  # what the highest order obeyed named
    failed_change: str  # id of the rollout that failed here, "" for none
    said: Stage | None  # what was attested for the running rollout and may not be back in the record yet
    pinned: Pinned | None = None
    passed: str | None = None  # rollout whose version was let through by the gate on requests, "" for none; None: there is no gate


class Fetch(NamedTuple):
    target: Target


class StageInto(NamedTuple):
    """Write the version into a slot that does not serve, and verify it there."""

    target: Target
    slot: int


class Verify(NamedTuple):
    """Compute the vector of what a slot holds already; a slot that fails is emptied."""

    target: Target
    slot: int


class Warm(NamedTuple):
    """Every worker binds and warms the slot."""

    target: Target
    slot: int


class AwaitQuiet(NamedTuple):
    """Wait until the deployment is quiet enough for the version of this rollout to become ready."""

    target: Target
    change: str


class SwitchTo(NamedTuple):
    target: Target
    slot: int
    order: Order


class AwaitWorkers(NamedTuple):
    """Every worker says with which version it answers."""

    target: Target


class Attest(NamedTuple):
    change: str
    stage: Stage
    target: Target


class Obey(NamedTuple):
    """Remember a higher order that asks for what serves already."""

    target: Target
    order: Order


class Decline(NamedTuple):
    """Remember that a rollout fails here: another version is pinned."""

    target: Target
    change: str
    pinned: Pinned


Step = Fetch | StageInto | Verify | Warm | AwaitQuiet | SwitchTo | AwaitWorkers | Obey | Attest | Decline


class Plan(NamedTuple):
    steps: tuple[Step, ...]
    refused: str = ""  # why an order is not obeyed, for the operator


_RANK = {None: 0, Stage.PREPARED: 1, Stage.READY: 2, Stage.ACTIVE: 3, Stage.FAILED: 4}


def plan(goal: Goal, seen: Seen) -> Plan:
    """The steps that are left, in order. None left means that the node is where it should be."""
    if seen.pinned is not None:
        return _keep(goal, seen, seen.pinned)
    serve = _serve(goal, seen)
    if serve.refused:
        return serve
    return Plan(serve.steps + _take_part(goal, seen, _active_after(serve, seen)))


def converged(goal: Goal, seen: Seen) -> bool:
    """The committed version is active, verified and checked, and every worker answers with it."""
    if goal.committed is None or seen.active is None:
        return False
    slot = seen.slots[seen.active]
    return slot.holds(goal.committed) and slot.checked and slot.loaded and seen.answering == goal.committed


def is_behind(made: Plan) -> bool:
    """The committed version is not verified on this node yet: more than the switch itself is left to do."""
    before: list[Step] = []
    for step in made.steps:
        if isinstance(step, SwitchTo):
            return any(isinstance(step, Fetch | StageInto | Verify) for step in before)
        before.append(step)
    return False


def _serve(goal: Goal, seen: Seen) -> Plan:
    """Make the committed version serve, and say so."""
    target = goal.committed
    if target is None:
        return Plan(())
    refused = _refusal(goal, target, seen)
    if refused:
        return Plan((), refused)
    if seen.active is not None and seen.slots[seen.active].holds(target):
        obey = goal.order > seen.fence and not goal.offline
        steps = (*_bring_up(target, seen.active, seen), *((Obey(target, goal.order),) if obey else ()))
    else:
        slot = _free_slot(target, seen.active, seen)
        steps = (*_bring_up(target, slot, seen), SwitchTo(target, slot, goal.order))
    if seen.answering != target or any(isinstance(step, SwitchTo | Warm) for step in steps):
        steps = (*steps, AwaitWorkers(target))
    change = goal.change
    if change is not None and change.phase in (Phase.COMMITTING, Phase.ACTIVE) and change.to == target:
        steps += _attest(change, Stage.ACTIVE, seen)
    return Plan(steps)


def _keep(goal: Goal, seen: Seen, pinned: Pinned) -> Plan:
    """Make the pinned version serve, and nothing else. It is no order, so the fence stays where it is."""
    target, change = pinned.target, goal.change
    own = goal._replace(committed=target, change=change if change is not None and change.to == target else None, offline=True)
    serve = _serve(own, seen)
    steps = serve.steps + _take_part(own, seen, _active_after(serve, seen))
    if change is not None and change.to != target and change.phase in (Phase.PREPARING, Phase.SYNCING):
        steps += _attest(change, Stage.FAILED, seen) if seen.failed_change == change.id else (Decline(change.to, change.id, pinned),)
    if goal.committed in (None, target):
        return Plan(steps)
    return Plan(steps, f"{target.label} is pinned here ({pinned.reason}): the order for {goal.committed.label} is not obeyed")


def _refusal(goal: Goal, target: Target, seen: Seen) -> str:
    if goal.offline:
        return ""
    if goal.order < seen.fence:
        return f"the order {tuple(goal.order)} for {target.label} is older than {tuple(seen.fence)}, which this node obeyed"
    if goal.order == seen.fence and seen.obeyed is not None and target != seen.obeyed:
        return f"the order {tuple(goal.order)} named {seen.obeyed.label} before and names {target.label} now, or other bytes"
    return ""


def _take_part(goal: Goal, seen: Seen, active: int | None) -> tuple[Step, ...]:
    """Prepare what a running rollout asks for, beside what serves."""
    change = goal.change
    if change is None or change.phase not in (Phase.PREPARING, Phase.SYNCING):
        return ()
    if seen.failed_change == change.id:
        return _attest(change, Stage.FAILED, seen)
    steps: tuple[Step, ...] = ()
    if change.to.checksum not in seen.prepared:
        steps = (Fetch(change.to),)
    slot = _free_slot(change.to, active, seen)
    is_here = seen.slots[slot].holds(change.to)  # as before a roll-back: nothing to stage, so no time is lost by saying so first
    if not is_here:
        steps += _attest(change, Stage.PREPARED, seen)
    if is_here or change.phase is Phase.SYNCING:
        steps += _bring_up(change.to, slot, seen, fetched=True)
        ready = _attest(change, Stage.READY, seen)
        is_held = seen.passed is not None and seen.passed != change.id and not change.is_undo
        steps += ((AwaitQuiet(change.to, change.id),) if ready and is_held else ()) + ready
    return steps


def _bring_up(target: Target, slot: int, seen: Seen, fetched: bool = False) -> tuple[Step, ...]:
    """The version in this slot: verified, checked, loaded."""
    held = seen.slots[slot]
    steps: tuple[Step, ...] = ()
    if not held.holds(target):
        if target.checksum not in seen.prepared and not fetched:
            steps = (Fetch(target),)
        return (*steps, StageInto(target, slot), Warm(target, slot))
    if not held.checked:
        steps = (Verify(target, slot),)
    if not held.loaded:
        steps = (*steps, Warm(target, slot))
    return steps


def _free_slot(target: Target, active: int | None, seen: Seen) -> int:
    """Where a version goes: a slot that holds it already, else one that does not serve; never the active one."""
    free = [slot for slot in SLOTS if slot != active]
    return next((slot for slot in free if seen.slots[slot].holds(target)), free[0])


def _active_after(serve: Plan, seen: Seen) -> int | None:
    """The slot that serves once these steps are done."""
    return next((step.slot for step in serve.steps if isinstance(step, SwitchTo)), seen.active)


def _attest(change: Change, stage: Stage, seen: Seen) -> tuple[Step, ...]:
    said = max(_RANK[change.attested], _RANK[seen.said])
    return () if said >= _RANK[stage] else (Attest(change.id, stage, change.to),)
