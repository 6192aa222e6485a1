"""What one worker holds: for each deployment the mapped arena, the gate, and a bound module per slot.

Two threads use it. The computing thread alone enters the gate, runs modules and forgets slots; the loading thread binds and warms a slot
beside it. A request is computed only by a module whose version the slot's record names as verified at that moment, and the label in the
answer is that module's. A request pinned to the version of the other slot takes no place in the gate; its answer counts only if the record
is the same after computing as before. Where no verified slot can be entered, no waiting helps: that is said as a fault of its own, and in
what the worker says it serves, so that the front refuses at once. A slot in which control writes a damaged block again is not entered, and
still counts as served: it is over in a moment, or its record says when to give up.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from node_agent import journal
from node_agent.device.arena import Arena
from node_agent.device.control_block import NO_SLOT, ControlBlock
from node_agent.device.port import EMPTY_RECORD, SlotRecord, SlotState
from node_agent.device.snapshot import Snapshots
from node_agent.engine.port import BadInput, EngineFault, Instance
from node_agent.loading import LOAD_FAULTS, Loader, Wanted, failure_of, refused, require
from node_agent.messages import (
    BAD_INPUT,
    NOT_LOADED,
    NOTHING_SERVES,
    VERSION_NOT_HELD,
    Acknowledge,
    Answering,
    CheckDerived,
    DerivedDamage,
    Done,
    Fault,
    Infer,
    Inferred,
    Load,
    Loaded,
    Release,
    Reply,
    Served,
    SlotServed,
)
from node_agent.refusal import Refusal
from node_agent.runtime import log
from node_agent.slots import WorkerGate

SLOTS = (0, 1)
LOOKS = 3  # at a record whose slot was switched away meanwhile; more switches in a row do not happen


class Bound(NamedTuple):
    """A module ready to answer."""

    label: str
    checksum: str
    layout_digest: str  # one version may lie elsewhere when it comes again: a module of where it lay before reads other tensors
    instance: Instance

    def is_of(self, record: SlotRecord) -> bool:
        return (self.label, self.checksum, self.layout_digest) == (record.version, record.checksum, record.layout_digest)


class _Deployment:
    """One deployment's memory and modules in this worker."""

    def __init__(self, arena_path: Path, block_path: Path, worker: int) -> None:
        self.arena = Arena.open(arena_path)
        self.snapshots = Snapshots(arena_path)
        self.block = ControlBlock.open(block_path)
        self.gate = WorkerGate(self.block, worker)
        self.slots: dict[int, Bound] = {}
        self._releases = [0, 0]  # by slot

    def keep(self, slot: int, bound: Bound, releases: int) -> None:
        """The module of a slot, unless it was released since `releases` were counted. Raises Refusal slot_not_verified then."""
        self.slots[slot] = bound
        if self._releases[slot] != releases:  # counted before it is taken away, so one of both threads takes it away
            self.slots.pop(slot, None)
            raise Refusal("slot_not_verified", f"slot {slot}", f"{bound.label} until it was bound", "it was released meanwhile", "bind")

    def releases(self, slot: int) -> int:
        return self._releases[slot]

    def release(self, slot: int) -> None:
        self._releases[slot] += 1
        self.slots.pop(slot, None)

    def usable(self, slot: int) -> tuple[Bound, SlotRecord] | None:
        """The slot's module and record, if the slot is verified and the module is of that version."""
        found = self.held(slot)
        return found if found is not None and found[1].state is SlotState.VERIFIED else None

    def held(self, slot: int) -> tuple[Bound, SlotRecord] | None:
        """As `usable`, also while a block of the slot is being written again."""
        bound, record = self.slots.get(slot), self.record(slot)
        if bound is None or not bound.is_of(record):
            return None
        return (bound, record) if record.state is SlotState.VERIFIED or _is_in_repair(record) else None

    def record(self, slot: int) -> SlotRecord:
        """One that was just being replaced is read again."""
        for _ in range(LOOKS):
            try:
                record = self.arena.record(slot)
            except ValueError:  # closed by the computing thread in between
                return EMPTY_RECORD
            if record.state is not SlotState.EMPTY:
                break
        return record

    @property
    def active(self) -> int:
        try:
            slot = self.block.active()[0]
        except ValueError:  # closed by the computing thread in between
            return -1
        return -1 if slot == NO_SLOT else slot

    def blocked(self) -> str:
        """Why no worker can enter a verified slot, from what the node's shared memory says now. Empty when one can."""
        try:
            for _ in range(LOOKS):
                word = self.block.active()
                if word[0] == NO_SLOT:
                    return "no slot serves: nothing was verified since the agent started"
                record = self.record(word[0])
                if record.state is SlotState.VERIFIED or _is_in_repair(record):
                    return ""
                if self.block.active() == word:
                    return f"the slot that should serve, {word[0]}, is {record.state.value}, not verified"
        except ValueError:  # closed by the computing thread in between
            pass
        return ""

    def close(self) -> None:
        """Give the row in the control block back. The mapping goes once no module uses it."""
        self.slots.clear()
        self.gate.detach()
        self.block.close()
        with suppress(BufferError):
            self.arena.close()


def _is_in_repair(record: SlotRecord) -> bool:
    """A block is being written again, and should be done in a moment."""
    return record.state is SlotState.DIRTY and time.monotonic_ns() < record.repair_until_ns


class Computing(NamedTuple):
    """The request in the computing thread."""

    call: Infer
    slot: int


class Host:
    def __init__(self, worker: int, places: tuple[Path, Path], loader: Loader) -> None:
        """`places`: the store directory, whose record names the deployments, and the arena directory."""
        self._worker = worker
        self._store_dir, self._arena_dir = places
        self._loader = loader
        self._deployments: dict[str, _Deployment] = {}
        self._computing: Computing | None = None
        self._closed: dict[str, str] = {}  # deployments without memory to serve from, and why
        self._failed: Counter[str] = Counter()  # by deployment
        self._is_loading = False  # what the record and the slots name, at the start
        self.binding = 0  # loads that were asked for and are not done

    # --- computing thread

    def infer(self, call: Infer) -> Reply:
        deployment = self._deployments.get(call.deployment)
        if deployment is None:
            return _not_now(call, self._closed.get(call.deployment, ""), f"{call.deployment} is not loaded in this worker yet")
        try:
            slot = deployment.gate.enter()
        except Refusal as refusal:
            return _not_now(call, deployment.blocked(), refusal.detail)
        try:
            usable = deployment.usable(slot)
            if usable is not None and call.version in ("", usable[0].label):
                return self._run(call, usable[0], slot)
            blocked = deployment.blocked()
        finally:
            deployment.gate.leave(slot)
        if call.version:
            return self._infer_pinned(call, deployment)
        return _not_now(call, blocked, f"slot {slot} of {call.deployment} is not loaded in this worker yet")

    def _infer_pinned(self, call: Infer, deployment: _Deployment) -> Reply:
        for slot in SLOTS:
            usable = deployment.usable(slot)
            if usable is None or usable[0].label != call.version:
                continue
            deployment.gate.begin(slot)
            try:
                reply = self._run(call, usable[0], slot)
            finally:
                deployment.gate.end(slot)
            if deployment.usable(slot) == usable:
                return reply
        if self._is_loading:
            return Fault(call.number, 503, NOT_LOADED, f"{call.deployment}: this worker is still loading what its slots hold")
        if any((found := deployment.held(slot)) is not None and found[0].label == call.version for slot in SLOTS):
            return Fault(call.number, 503, NOT_LOADED, f"{call.deployment}: a block of {call.version} was written again just now")
        usable_now = [found for slot in SLOTS if (found := deployment.usable(slot)) is not None]
        held = ", ".join(sorted(bound.label for bound, _ in usable_now)) or "none"
        return Fault(call.number, 409, VERSION_NOT_HELD, f"no slot of this node holds version {call.version}; held: {held}")

    def _run(self, call: Infer, bound: Bound, slot: int) -> Reply:
        self._computing = Computing(call, slot)
        try:
            outputs = bound.instance.infer(call.inputs, call.outputs)
        except BadInput as fault:
            return Fault(call.number, 400, BAD_INPUT, str(fault))
        except EngineFault as fault:
            self._failed[call.deployment] += 1
            return Fault(call.number, 500, fault.kind, fault.detail)
        finally:
            self._computing = None
        return Inferred(call.number, bound.label, bound.checksum, outputs)

    def acknowledge(self, call: Acknowledge) -> Reply:
        """Which version the next request gets; passing the gate acknowledges the epoch."""
        deployment = self._deployments.get(call.deployment)
        if deployment is None:
            return Fault(call.number, 503, NOT_LOADED, f"{call.deployment} is not loaded in this worker")
        try:
            slot = deployment.gate.enter()
        except Refusal as refusal:
            return Fault(call.number, 503, NOT_LOADED, refusal.detail)
        usable = deployment.usable(slot)
        deployment.gate.leave(slot)
        if usable is None:
            return Fault(call.number, 503, NOT_LOADED, f"slot {slot} of {call.deployment} is not loaded in this worker")
        return Answering(call.number, slot, usable[0].label, usable[0].checksum)

    def release(self, call: Release) -> Reply:
        deployment = self._deployments.get(call.deployment)
        if deployment is not None and call.slot >= 0:
            deployment.release(call.slot)
        elif deployment is not None:
            del self._deployments[call.deployment]
            for slot in SLOTS:
                deployment.release(slot)
            gc.collect()  # modules are full of cycles, and their views keep memory that is about to be replaced
            deployment.close()
            self._note_closed(call.deployment, "no slot serves: the memory of its versions is made anew")
        return Done(call.number)

    def derived_of(self, call: CheckDerived) -> tuple[str, ...] | None:
        """Names of the tensors that the slot's module holds outside it; None without such a module."""
        bound = self._bound(call)
        return None if bound is None else tuple(sorted(bound.instance.derived))

    def check_derived(self, call: CheckDerived, name: str) -> DerivedDamage | None:
        """Digest one of them again. A module of which one changed computes nothing any more, where the call says so."""
        bound = self._bound(call)
        damage = None if bound is None else bound.instance.check_derived(name)
        if damage is not None and call.ends:
            self._deployments[call.deployment].release(call.slot)
        return damage

    def _bound(self, call: CheckDerived) -> Bound | None:
        deployment = self._deployments.get(call.deployment)
        bound = None if deployment is None else deployment.slots.get(call.slot)
        return bound if bound is not None and bound.checksum == call.checksum else None

    def beat(self) -> None:
        for deployment in tuple(self._deployments.values()):
            deployment.gate.beat()

    def close(self) -> None:
        while self._deployments:
            self._deployments.popitem()[1].close()

    # --- loading thread

    def load(self, call: Load) -> Reply:
        started = time.monotonic()
        try:
            bound = self._load(call.deployment, call.slot, call.label, call.checksum)
        except LOAD_FAULTS as cause:
            return refused(call, failure_of(cause, f"{call.deployment} slot {call.slot}"))
        return Loaded(call.number, dict(bound.instance.derived), round((time.monotonic() - started) * 1000))

    def load_all(self) -> list[str]:
        """What the record names and the slots hold, the active slot first: a restarted worker needs nobody. Gives what failed."""
        self._is_loading = True
        try:
            return self._load_all()
        finally:
            self._is_loading = False

    def _load_all(self) -> list[str]:
        record = journal.read(self._store_dir)
        failed: list[str] = []
        for name, kept in sorted(record.deployments.items()) if record else ():
            if kept.leaving:  # nobody answers for it any more, and its memory is about to go
                continue
            try:
                hosted = self._open(name)
                slots = sorted(SLOTS, key=lambda slot: slot != hosted.active)
                held = [(slot, hosted.arena.record(slot)) for slot in slots]
            except (Refusal, OSError) as cause:
                if isinstance(cause, FileNotFoundError):  # anything else is this worker's trouble alone
                    self._note_closed(name, "no slot serves: the memory of its versions is not there")
                failed.append(f"{name}: {cause}")
                continue
            for slot, found in held:
                if found.state is not SlotState.VERIFIED:
                    continue
                reply = self.load(Load(0, name, slot, found.version, found.checksum))
                if isinstance(reply, Fault):
                    failed.append(f"{name} slot {slot}: {reply.detail}")
        return failed

    def computing_in(self, deployment: str, slot: int) -> Infer | None:
        """The request that is computed in this slot right now. Safe in any thread."""
        now = self._computing
        return now.call if now is not None and (now.call.deployment, now.slot) == (deployment, slot) else None

    def served(self) -> tuple[Served, ...]:
        """Safe in any thread: looks at dictionaries that change as a whole."""
        opened = [
            _served(name, deployment, self._is_loading, self._failed[name], self.binding > 0)
            for name, deployment in sorted(self._deployments.copy().items())
        ]
        return (*opened, *(Served(name, (), -1, blocked=why) for name, why in sorted(self._closed.copy().items())))

    def _note_closed(self, name: str, why: str) -> None:
        record = journal.read(self._store_dir)
        known = record.deployments if record else {}
        self._closed = {other: said for other, said in self._closed.items() if other in known} | {name: why}

    def _load(self, name: str, slot: int, label: str, checksum: str) -> Bound:
        deployment = self._open(name)
        wanted = Wanted(name, slot, label, checksum)
        releases, bound = deployment.releases(slot), deployment.slots.get(slot)
        if bound is not None and bound.is_of(require(deployment.arena, wanted)) and self._is_sound(name, bound):
            return bound  # it was warmed when it was bound, and computes with the same bytes: an undo waits for no forward pass
        deployment.slots.pop(slot, None)
        try:
            loaded = self._loader.load(deployment.arena, wanted)
            loaded.instance.warm()
        except ValueError as cause:  # closed by the computing thread in between
            if deployment.releases(slot) == releases:
                raise
            raise Refusal("slot_not_verified", f"slot {slot} of {name}", label, "it was released meanwhile", "bind") from cause
        bound = Bound(label, checksum, loaded.layout_digest, loaded.instance)
        deployment.keep(slot, bound, releases)
        return bound

    def _is_sound(self, name: str, bound: Bound) -> bool:
        """One whose own tensors changed is made again: whoever comes back to this version would be refused for ever."""
        try:
            bound.instance.check()
        except Refusal as damage:
            log.error("derived_damaged", worker=self._worker, deployment=name, version=bound.label, reason=damage.detail)
            return False
        return True

    def _open(self, name: str) -> _Deployment:
        found = self._deployments.get(name)
        if found is not None:
            return found
        record = journal.read(self._store_dir)
        known = None if record is None else record.deployments.get(name)
        if known is None:
            raise Refusal("not_bindable", f"deployment {name}", "one in the node's record", "none")
        found = _Deployment(self._arena_dir / known.arena, self._arena_dir / known.control_block, self._worker)
        self._deployments[name] = found
        self._closed.pop(name, None)
        return found


def _served(name: str, deployment: _Deployment, is_loading: bool, failed: int, is_binding: bool) -> Served:
    slots = {slot: found[0] for slot in SLOTS if (found := deployment.held(slot)) is not None}
    return Served(
        deployment=name,
        slots=tuple(
            SlotServed(slot, item.label, item.checksum, item.instance.inputs, item.instance.outputs) for slot, item in sorted(slots.items())
        ),
        active=deployment.active,
        blocked=deployment.blocked(),
        is_loading=is_loading,
        failed=failed,
        is_binding=is_binding,
    )


def _not_now(call: Infer, blocked: str, waits: str) -> Fault:
    """No answer: for good until a switch when the node is blocked, otherwise until this worker has loaded the slot."""
    if blocked:
        return Fault(call.number, 503, NOTHING_SERVES, f"{call.deployment}: {blocked}")
    return Fault(call.number, 503, NOT_LOADED, waits)
