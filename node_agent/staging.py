"""Bring a version into the standby slot and prove it there. The active slot is only ever read.

Order matters: the slot is set dirty, with the list of what stays untouched, before its first byte changes; it becomes verified only after
the vector computed from its own memory equals the manifest's, that of kept tensors included, of which only what was computed a moment ago
is not computed again. Whatever fails in between leaves it dirty,
raises a Refusal, and a later try keeps what was known to be whole. The caller has drained the slot (`slots.Switch.wait_drained`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from consistency.vector import TensorVector, Words, entry_of, root
from node_agent import layout as layouts
from node_agent import staging_plan
from node_agent.device.port import Device, SlotRecord, SlotState
from node_agent.device.snapshot import SlotSnapshot, Snapshots
from node_agent.layout import Layout, Placement
from node_agent.pour import BlobSource, Pace, PieceFailed, pour
from node_agent.refusal import Refusal
from node_agent.staging_plan import Held, Origin, Step
from raftmeta.core.manifest import Manifest
from raftmeta.core.types import StageCounters


class StagingError(Refusal):
    """Staging stopped; the slot is dirty (or untouched in phase plan), the active slot is as it was."""


class StageOrder(msgspec.Struct, frozen=True):
    version: str  # label
    checksum: str
    manifest: Manifest
    manifest_digest: str
    slot: int  # the standby slot, drained
    active_slot: int | None  # None while nothing serves
    generation: int
    revision: int


class StagePlan(msgspec.Struct, frozen=True):
    layout: Layout
    steps: tuple[Step, ...]
    tensors_changed: int  # against the active version

    @property
    def from_store(self) -> tuple[tuple[str, int], ...]:
        """(sha256, size) of the blobs that `stage` will read: what must be fetched before."""
        return staging_plan.from_store(self.steps)


class Staged(msgspec.Struct, frozen=True):
    record: SlotRecord
    layout: Layout
    counters: StageCounters
    vectors: dict[str, TensorVector]  # by tensor, from the slot's memory


class Manner(msgspec.Struct, frozen=True):
    """How to stage: at which pace, and what need not be read again."""

    pace: Pace = Pace()
    fresh: Mapping[str, TensorVector] = {}  # that was computed from this slot's memory a moment ago; counts for what is kept


ALONE: Final = Manner()


def plan(device: Device, snapshots: Snapshots, order: StageOrder) -> StagePlan:
    """Where each tensor would come from now. Touches nothing. Raises Refusal no_headroom, bad_layout or slot_active."""
    if order.slot == order.active_slot:
        raise StagingError("slot_active", f"slot {order.slot}", "a slot that is not active", "the active slot", "plan")
    standby = _held(device, snapshots, order.slot)
    active = None if order.active_slot is None else _active_held(device, snapshots, order.active_slot)
    layout = layouts.fit(order.manifest.tensors, None if standby is None else standby.layout, device.slot_bytes)
    wanted = {tensor.name: tensor.sha256 for tensor in order.manifest.tensors}
    return StagePlan(layout, staging_plan.steps(layout, wanted, standby, active), staging_plan.changed(wanted, active))


def stage(
    device: Device, snapshots: Snapshots, order: StageOrder, source: BlobSource, bytes_fetched: int = 0, how: Manner = ALONE
) -> Staged:
    """Write what differs, compute the vector from the slot's memory, set the slot verified. Safe to run again after any failure."""
    made = plan(device, snapshots, order)
    _begin(device, snapshots, order, made.layout, staging_plan.kept(made.steps))
    vectors = _vectors(device, order, made.steps, source, how)
    found = _verify(device, snapshots, order, made, {name: vector.entry for name, vector in vectors.items()})
    wanted = {tensor.name: tensor.sha256 for tensor in order.manifest.tensors}
    digest = snapshots.save(order.slot, SlotSnapshot(made.layout, wanted))
    record = device.finish(order.slot, found, digest)
    snapshots.drop_others(order.slot, digest)
    return Staged(record, made.layout, staging_plan.counters(made.steps, bytes_fetched, made.tensors_changed), vectors)


def _begin(device: Device, snapshots: Snapshots, order: StageOrder, layout: Layout, whole: dict[str, str]) -> None:
    """Set the slot dirty; `whole` names the tensors that nobody writes from here on."""
    digest = snapshots.save(order.slot, SlotSnapshot(layout, whole))
    record = SlotRecord(
        state=SlotState.DIRTY,
        version=order.version,
        checksum=order.checksum,
        manifest_digest=order.manifest_digest,
        layout_digest=layout.digest,
        snapshot_digest=digest,
        generation=order.generation,
        revision=order.revision,
    )
    device.begin(order.slot, record)
    snapshots.drop_others(order.slot, digest)


def _vectors(device: Device, order: StageOrder, steps: Sequence[Step], source: BlobSource, how: Manner) -> dict[str, TensorVector]:
    """Of every tensor, from the slot's memory."""
    fresh = {step.placement.name: how.fresh[step.placement.name] for step in steps if _is_fresh(step, how)}
    poured = [step for step in steps if step.placement.name not in fresh]
    try:
        checks = pour(device, order.slot, order.active_slot, poured, source, how.pace)
    except PieceFailed as failed:
        step = failed.step
        expected, found = f"{step.placement.size_bytes} bytes of {step.sha256}", str(failed.__cause__)
        raise StagingError("source_failed", f"tensor {step.placement.name!r}", expected, found, "fill") from failed.__cause__
    return fresh | vectors_of([step.placement for step in poured], checks)


def _is_fresh(step: Step, how: Manner) -> bool:
    return step.origin is Origin.KEPT and step.placement.name in how.fresh


def vectors_of(places: Sequence[Placement], checks: Sequence[Words]) -> dict[str, TensorVector]:
    return {
        place.name: TensorVector(entry_of(place.dtype, place.shape, place.size_bytes, found), found)
        for place, found in zip(places, checks, strict=True)
    }


def _verify(device: Device, snapshots: Snapshots, order: StageOrder, made: StagePlan, entries: dict[str, str]) -> str:
    """The root, once every entry is equal to the manifest's."""
    expected = {tensor.name: tensor for tensor in order.manifest.tensors}
    wrong = [step for step in made.steps if entries[step.placement.name] != expected[step.placement.name].entry]
    if wrong:
        bad = {step.placement.name for step in wrong}
        whole = {name: tensor.sha256 for name, tensor in expected.items() if name not in bad}
        _begin(device, snapshots, order, made.layout, whole)  # a later try writes the damaged ones again
        first = wrong[0]
        subject = f"tensor {first.placement.name!r} ({first.origin}) and {len(wrong) - 1} more in slot {order.slot}"
        raise StagingError("vector_mismatch", subject, expected[first.placement.name].entry, entries[first.placement.name], "verify")
    found = root(entries)
    if found != order.manifest.vector_root:
        raise StagingError("vector_mismatch", f"vector root of slot {order.slot}", order.manifest.vector_root, found, "verify")
    return found


def _held(device: Device, snapshots: Snapshots, slot: int) -> Held | None:
    """What the slot is known to hold, dirty or verified; None when nothing is known."""
    record = device.record(slot)
    snapshot = snapshots.load(slot, record.snapshot_digest)
    if snapshot is None or snapshot.layout.digest != record.layout_digest:
        return None
    return Held(snapshot.layout, snapshot.held)


def _active_held(device: Device, snapshots: Snapshots, slot: int) -> Held | None:
    """Also of one that is dirty: damage was found in it, and what its list still names is whole."""
    return None if device.record(slot).state is SlotState.EMPTY else _held(device, snapshots, slot)
