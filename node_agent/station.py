"""One deployment's memory on this node, from control's side: arena, slots, switch, and what is known about them.

Knows no rule about when to do what: `plan` decides, tending calls, through `in_process`. All methods block and are called one at a time,
except `vector`, which reads only and may run beside them. `look` says what is true now; that a slot was checked or warmed counts for this
process only, and for the standby slot only within the rollout that asked for it. What the node remembers is written elsewhere.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from consistency.vector import TensorVector, root
from node_agent import digests, staging, staging_plan
from node_agent import layout as layouts
from node_agent.beside_weights import BesideWeights
from node_agent.device import headroom, inventory
from node_agent.device.arena import Arena, ArenaUse
from node_agent.device.control_block import NO_SLOT, ControlBlock
from node_agent.device.cpu import CpuDevice
from node_agent.device.port import EMPTY_RECORD, SLOTS, Device, SlotRecord, SlotState
from node_agent.device.process import kill
from node_agent.device.snapshot import Snapshots
from node_agent.failure import FailureClass
from node_agent.freshness import Freshness
from node_agent.journal import DeploymentRecord
from node_agent.layout import Placement
from node_agent.places import Places
from node_agent.plan import Order, SlotSeen, Target
from node_agent.pour import NoBlobs, Pace, pour
from node_agent.refusal import Refusal
from node_agent.runtime import log
from node_agent.serving import Digests, Evidence, Proven, Reading, SlotsSeen, Staging
from node_agent.slot_checks import Checked, Warmed, Whole, counts
from node_agent.slots import SlotHeld, Switch, SwitchReport
from node_agent.staging import Manner
from node_agent.staging_plan import Origin, Step
from raftmeta.core.manifest import Manifest, pack
from raftmeta.core.types import StageCounters

TURN_S = 60.0  # to write, while a thread that was given up still does
SETTLE_S = 0.05  # a worker that looked at the active word before a switch announces itself in the old slot and withdraws


class Station:
    def __init__(self, record: DeploymentRecord, places: Places) -> None:
        """Takes over what an earlier control left. Raises Refusal when the files in shared memory are not ours to use."""
        self.name = record.name
        self._places = places
        self._arena_path = places.arena_dir / record.arena
        block_path = places.arena_dir / record.control_block
        self.block = ControlBlock.open(block_path) if block_path.exists() else ControlBlock.create(block_path)
        self._snapshots = Snapshots(self._arena_path)
        self._arena: Arena | None = None
        try:
            if self._arena_path.exists():
                self._arena = _open_arena(self._arena_path)
            self._switch = Switch(self.block, lambda slot: self._need_arena().verified(slot))
        except BaseException:
            self.close()  # its locks would keep the next try out
            raise
        self.checked: dict[int, Checked] = {}
        self.warmed: dict[int, Warmed] = {}
        self.whole: Whole | None = None  # the last one of the slot that served then
        self.records = threading.Lock()  # held while the record of the slot that serves changes, for a millisecond at most
        self.in_repair: dict[int, SlotRecord] = {}  # what a slot is said to hold until its repair has ended
        self.suspect = threading.Event()  # somebody found damage in what serves: the scrub looks at all of it
        self.beside_weights = BesideWeights(self.name, self.block, self._switch, self._snapshots, places.clock_ns)
        self._writing = threading.Lock()
        self.freshness = Freshness(places.verify_max_age_ns, places.clock_ns)

    @property
    def record(self) -> DeploymentRecord:
        found = self._places.journal.deployment(self.name)
        assert found is not None, self.name
        return found

    # --- looking

    @property
    def active(self) -> int | None:
        slot = self.block.active()[0]
        return None if slot == NO_SLOT else slot

    @property
    def arena(self) -> Arena | None:
        return self._arena

    @property
    def snapshots(self) -> Snapshots:
        return self._snapshots

    @property
    def switching(self) -> Switch:
        return self._switch

    def slot_record(self, slot: int) -> SlotRecord:
        if self._arena is None:
            return EMPTY_RECORD
        return self.in_repair.get(slot) or self._arena.record(slot)

    def look(self, change: str | None, loaded: Callable[[int, Target], bool]) -> SlotsSeen:
        """What is true now. `loaded`: does every worker hold this version in this slot?

        What was checked and warmed in the standby slot counts within the rollout `change` only; None: whatever it was for.
        """
        with self.records:
            self.beside_weights.mend(self._arena, self.slot_record)
            return self._look(change, loaded)

    def _look(self, change: str | None, loaded: Callable[[int, Target], bool]) -> SlotsSeen:
        word = self.block.active()
        active = None if word[0] == NO_SLOT else word[0]
        slots = []
        for slot in range(SLOTS):
            held = self.slot_record(slot)
            within = None if slot == active else change
            target = Target("", held.version, held.checksum, "")
            warmed = counts(self.warmed.get(slot), held, within) and loaded(slot, target)
            slots.append(SlotSeen(held.version, held.checksum, held.state, counts(self.checked.get(slot), held, within), warmed))
        return SlotsSeen((slots[0], slots[1]), active, word[1])

    def held_by_active(self) -> frozenset[str]:
        """SHA-256 of the tensors in the slot that serves, without those that are known to be damaged."""
        active = self.active
        record = EMPTY_RECORD if active is None else self.slot_record(active)
        if active is None or record.state is SlotState.EMPTY:
            return frozenset()
        snapshot = self._snapshots.load(active, record.snapshot_digest)
        return frozenset() if snapshot is None else frozenset(snapshot.held.values())

    # --- doing

    def has_room(self, manifest: Manifest) -> bool:
        """False when there is no arena yet, or it is too small and nothing serves from it: `make_room` then makes one."""
        need = layouts.plan(manifest.tensors).total_bytes
        return self._arena is not None and (self._arena.slot_bytes >= need or self.active is not None)

    def make_room(self, manifest: Manifest) -> None:
        """A new arena; the workers have let the old one go. Raises Refusal no_headroom with the numbers."""
        with self._turn_to_write():
            self._make_room(layouts.plan(manifest.tensors).total_bytes)

    def _make_room(self, need: int) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self.checked.clear()
        self.warmed.clear()
        self.freshness.clear()
        use = ArenaUse.of(self._places.store.root, self._places.journal.record.node, self.name)
        try:
            size = max(self._places.slot_bytes or need + need // 4, need, 1)
            self._arena = Arena.create(self._arena_path, size, use, self._places.numa_nodes)
        except Refusal as refusal:
            raise inventory.with_idle_arenas(refusal, self._arena_path) from refusal
        if self._arena.notice:
            log.warning("arena_placed_anywhere", deployment=self.name, reason=self._arena.notice)

    def drained(self, slot: int) -> bool:
        """No request uses the slot, and none can enter it. Raises Refusal slot_active."""
        return self._switch.drained(slot)

    def require_drained(self, slot: int) -> None:
        """Raises Refusal slot_active, or slot_busy with who uses the slot. Waits only for who looked at the active word just now."""
        self._switch.wait_drained(slot, time.monotonic() + SETTLE_S)

    def held(self, slot: int) -> tuple[SlotHeld, ...]:
        """Who computes in a slot."""
        return self._switch.held(slot, self._places.clock_ns())

    def end_holder(self, slot: int, worker: int) -> None:
        """Kill a worker that answers nobody and still uses the slot; its supervisor frees its place and starts another."""
        row = self.block.row(worker)
        if row is not None and (row.in_flight[slot] or row.since_ns[slot]):
            kill(row.process)

    def stage(self, work: Staging, given_up: Callable[[], bool] = lambda: False) -> StageCounters:
        """Write and verify what was drained. Raises Refusal; the slot that serves is untouched.

        One that was given up while another one wrote writes nothing any more; one that is writing ends first.
        """
        self._require_activations(work.target)
        with self._turn_to_write():
            if given_up():
                raise Refusal("slot_busy", f"slot {work.slot}", "staging that is still wanted", "staging that was given up")
            device = CpuDevice(self._need_arena())
            self.require_drained(work.slot)
            self.warmed.pop(work.slot, None)
            known = self.freshness.take(work.slot)
            how = Manner(self._pace(), {name: item.vector for name, item in known.items()})
            order = self._stage_order(work.target, work.slot, work.order)
            staged = self._staged(device, order, work.bytes_fetched, how)
            self.freshness.note(work.slot, staged.vectors, known)
            self.checked[work.slot] = self._checked_now(staged.record, work.change)
        return staged.counters

    def _staged(self, device: Device, order: staging.StageOrder, fetched: int, how: Manner) -> staging.Staged:
        budget = self._places.budget
        try:
            with nullcontext() if budget is None else budget.first():
                return staging.stage(device, self._snapshots, order, self._places.store, fetched, how)
        except Refusal as refusal:
            if refusal.kind == "vector_mismatch":
                self.suspect.set()  # some of it may have come from the slot that serves
            raise

    def staging_cost(self, target: Target, slot: int, order: Order) -> StageCounters:
        """What staging would cost now: of a slot that holds the version, nothing but `kept`."""
        made = staging.plan(CpuDevice(self._need_arena()), self._snapshots, self._stage_order(target, slot, order))
        return staging_plan.counters(made.steps, 0, made.tensors_changed)

    def verify(self, target: Target, slot: int, change: str) -> None:
        """Compute the vector of all that the slot holds. A slot that fails is emptied first, so nothing serves from it, then refused."""
        with self._turn_to_write():
            self._verify(target, slot, change)

    def _verify(self, target: Target, slot: int, change: str) -> None:
        arena = self._need_arena()
        record = arena.record(slot)
        snapshot = self._snapshots.load(slot, record.snapshot_digest)
        self.freshness.take(slot)
        vectors: dict[str, TensorVector] = {}
        if snapshot is not None:
            # A roll-back waits for this, so it takes its turn on the processor; the bytes it reads are within the budget.
            pace = Pace(self._places.stage_threads, budget=self._pace().budget)
            vectors = _compute(CpuDevice(arena), slot, snapshot.layout.placements, pace)
        found = "no list of its tensors" if snapshot is None else root({name: vector.entry for name, vector in vectors.items()})
        if found != target.vector_root or record.vector_root != target.vector_root:
            with self.records:
                arena.mark_empty(slot)
            raise Refusal("vector_mismatch", f"memory of slot {slot}, {target.label}", target.vector_root, found, "verify")
        self.freshness.note(slot, vectors, {})
        self.checked[slot] = self._checked_now(record, change)

    def _checked_now(self, record: SlotRecord, change: str) -> Checked:
        return Checked(record, change, self._places.wall_ms(), self._places.clock_ns())

    def note_warm(self, slot: int, change: str, derived: Mapping[str, str]) -> None:
        """`derived`: SHA-256 of what the modules hold outside the slot."""
        self.warmed[slot] = Warmed(self.slot_record(slot), change, derived)

    def forget_warm(self, slot: int) -> None:
        """The workers are about to forget the slot. Raises Refusal slot_active for the one that serves."""
        if slot == self.active:
            raise Refusal("slot_active", f"slot {slot}", "a slot that is not active", "the active slot")
        self.warmed.pop(slot, None)

    def switch(self, target: Target, slot: int) -> SwitchReport:
        """Flip. The slot was checked and warmed by this process, the order is obeyed durably already."""
        record = self._need_arena().verified(slot)
        done = [kind for kind, known in (("checked", self.checked), ("warmed", self.warmed)) if counts(known.get(slot), record, None)]
        if (record.version, record.checksum) != (target.label, target.checksum) or len(done) < 2:
            found = f"{record.version}, {' and '.join(done) or 'neither'}"
            raise Refusal("slot_not_verified", f"slot {slot}", f"{target.label}, checked and warmed by this process", found)
        with self.records:
            return self._switch.switch(slot)

    # --- reading for the checker

    def vector(self, tensor: str = "") -> Reading | None:
        """Computed from the memory that serves, None while nothing does. Again when a switch or restaging came in between.

        `tensor`: of this one alone, which says nothing of the slot as a whole.
        """
        for _ in range(3):
            (slot, epoch), arena = self.block.active(), self._arena
            if slot == NO_SLOT or arena is None:
                return None
            with self.records:  # not in the middle of a repair
                record = arena.record(slot)
            snapshot = self._snapshots.load(slot, record.snapshot_digest)
            if record.state is not SlotState.VERIFIED or snapshot is None:
                return None
            began_ns = self._places.clock_ns()
            places = [place for place in snapshot.layout.placements if tensor in ("", place.name)]
            vectors = _compute(CpuDevice(arena), slot, places, Pace(budget=self._places.budget))
            if self.block.active() == (slot, epoch) and arena.record(slot) == record:
                found = Reading(record, slot, epoch, vectors)
                if not tensor:
                    self._note_reading(found, began_ns)
                return found
        return None

    def _note_reading(self, found: Reading, began_ns: int) -> None:
        slot, record = found.slot, found.record
        is_equal = found.root == record.vector_root
        if not is_equal:
            self.suspect.set()
        with self.records:  # a repair may give the slot another record
            self.note_whole(Whole(slot, record, found.root, began_ns))
            check = self.checked.get(slot)
            if check is not None and check.record == record:
                now = self._checked_now(record, check.change)
                self.checked[slot] = now if is_equal else check._replace(finding=FailureClass.INTEGRITY_MISMATCH.value)

    def note_whole(self, found: Whole | None) -> None:
        """Whoever read a whole slot says what that found; None: what was known of it is no longer so."""
        self.whole = found

    def proven(self) -> Proven | None:
        """The last whole reading, None unless it compared and speaks of the slot that serves as it is now."""
        whole, (slot, epoch) = self.whole, self.block.active()
        if whole is None or self._arena is None or slot != whole.slot:
            return None
        if self._arena.record(slot) != whole.record or whole.root != whole.record.vector_root:
            return None
        return Proven(whole.record, slot, epoch, whole.root, (self._places.clock_ns() - whole.began_ns) // 1_000_000)

    def digests(self, after: str, limit_bytes: int, given_up: Callable[[], bool]) -> Digests | None:
        """Of the slot that serves, from its memory. None while nothing does, when it was given up, or when a switch came in between."""
        (slot, epoch), arena = self.block.active(), self._arena
        if slot == NO_SLOT or arena is None:
            return None
        record = arena.record(slot)
        snapshot = self._snapshots.load(slot, record.snapshot_digest) if record.state is SlotState.VERIFIED else None
        if snapshot is None:
            return None
        page = digests.page_of(snapshot.layout.placements, after, limit_bytes)
        with arena.slot_view(slot) as memory:
            found = digests.compute(memory, page.places, self._places.budget, given_up)
        if found is None or self.block.active() != (slot, epoch) or arena.record(slot) != record:
            return None
        return Digests(record, slot, epoch, found, page.following)

    def evidence(self) -> Evidence | None:
        """None while nothing serves that this process has checked and warmed."""
        with self.records:
            slot, epoch = self.block.active()
            checked, warmed = self.checked.get(slot), self.warmed.get(slot)
            record = EMPTY_RECORD if slot == NO_SLOT else self.slot_record(slot)
        if checked is None or warmed is None or checked.record != record or warmed.record != record:
            return None
        age_ms = (self._places.clock_ns() - checked.at_ns) // 1_000_000
        return Evidence(record, slot, epoch, checked.at_ms, dict(warmed.derived), verified_age_ms=age_ms, finding=checked.finding)

    def close(self) -> None:
        self.block.close()
        if self._arena is not None:
            with suppress(BufferError):
                self._arena.close()
            self._arena = None

    def destroy(self) -> None:
        """The deployment left this node: give its memory back."""
        self.close()
        for path in (self._arena_path, self.block.path):
            path.unlink(missing_ok=True)
        for slot in range(SLOTS):
            self._snapshots.drop_others(slot, "")

    @contextmanager
    def _turn_to_write(self) -> Iterator[None]:
        """A thread whose task was cancelled goes on: nobody else writes to the slots until it has ended."""
        if not self._writing.acquire(timeout=TURN_S):
            found = f"staging that was given up, and still writes after {TURN_S:g} s"
            raise Refusal("slot_busy", f"memory of {self.name}", "nobody who writes to it", found)
        try:
            yield
        finally:
            self._writing.release()

    def _stage_order(self, target: Target, slot: int, order: Order) -> staging.StageOrder:
        manifest = self._places.store.manifest(target.checksum)
        if manifest is None:
            raise Refusal("source_failed", f"manifest of {target.label}", "one in the store", "none", "plan")
        digest = hashlib.sha256(pack(manifest)).hexdigest()
        return staging.StageOrder(target.label, target.checksum, manifest, digest, slot, self.active, order.generation, order.revision)

    def _require_activations(self, target: Target) -> None:
        """Beside the arena every process needs room for what a module allocates while it computes. Raises Refusal no_headroom."""
        seen = max((proof.peak_bytes for proof in self.record.proofs), default=0)
        each = self._places.activation_bytes or seen
        processes = self._places.workers + 1
        if each:
            headroom.require_memory(each * processes, f"modules of {target.label} in {processes} processes of {each} bytes")

    def _pace(self) -> Pace:
        """At full speed while nothing serves; otherwise only what requests leave over."""
        if self.active is None:
            return Pace(self._places.stage_threads)
        return Pace(self._places.stage_threads, idle=True, budget=self._places.budget)

    def _need_arena(self) -> Arena:
        if self._arena is None:
            raise Refusal("slot_not_verified", f"arena {self._arena_path}", "one that holds a version", "none")
        return self._arena


def _open_arena(path: Path) -> Arena | None:
    """None for an arena of an earlier boot or half a file: `make_room` replaces what is ours, and refuses what is not."""
    try:
        return Arena.open(path, readonly=False)
    except Refusal as refusal:
        if refusal.kind != "foreign_arena":
            raise
        return None


def _compute(device: Device, slot: int, places: Sequence[Placement], pace: Pace) -> dict[str, TensorVector]:
    """The vectors of tensors that a slot holds, from its memory."""
    steps = [Step(place, "", Origin.KEPT) for place in places]
    return staging.vectors_of(places, pour(device, slot, None, steps, NoBlobs(), pace))
