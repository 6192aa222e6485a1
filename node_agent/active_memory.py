"""What the scrub does to the slot that serves: read its blocks beside requests, and write damaged ones again while nobody computes in it.

Reads need no permission: a difference counts only if the same version still serves from the same slot afterwards. A repair is short and
never meets a reader: the slot's record says dirty, with a list that leaves the damaged tensor out, before its first byte changes; then,
behind a barrier, nobody may be in the slot or beside the gate; whoever enters from then on sees the record and computes nothing. It says
verified again, as a record of its own, once the blocks are right. A control process that dies in between leaves a slot that serves nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np

from consistency.vector import BLOCK_BYTES, TensorVector, Words
from node_agent import scrub
from node_agent.device.arena import Arena
from node_agent.device.control_block import NO_SLOT
from node_agent.device.cpu import CpuDevice
from node_agent.device.port import SlotRecord, SlotState
from node_agent.device.snapshot import SlotSnapshot
from node_agent.failure import FailureClass
from node_agent.layout import Layout, Placement
from node_agent.refusal import Refusal
from node_agent.runtime import log
from node_agent.scrub import Span
from node_agent.slot_checks import Whole
from node_agent.station import Station


class Watched(NamedTuple):
    """What serves, and what this process verified of it."""

    slot: int
    epoch: int
    record: SlotRecord
    layout: Layout
    held: dict[str, str]  # SHA-256 of each tensor
    places: dict[str, Placement]
    vectors: dict[str, TensorVector]

    @property
    def sizes(self) -> dict[str, int]:
        return {name: place.size_bytes for name, place in self.places.items()}

    def expected(self, span: Span) -> Words:
        return self.vectors[span.tensor].blocks[span.first : span.first + span.blocks]


class Fix(NamedTuple):
    """One damaged block and where its bytes come from."""

    tensor: str
    block: int
    read_into: Callable[[memoryview], None]  # fills all of it


class ActiveMemory:
    """Methods block. `clock_ns` is the monotonic clock that all processes of a machine share."""

    def __init__(self, station: Station, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._station = station
        self._clock_ns = clock_ns

    @property
    def suspect(self) -> threading.Event:
        """Set when somebody found damage in what serves: all of it should be looked at now."""
        return self._station.suspect

    def watched(self) -> Watched | None:
        """None while nothing serves that this process has verified."""
        station = self._station
        slot, epoch = station.block.active()
        if slot == NO_SLOT or station.arena is None:
            return None
        record, checked = station.slot_record(slot), station.checked.get(slot)
        if record.state is not SlotState.VERIFIED or checked is None or checked.record != record:
            return None
        snapshot = station.snapshots.load(slot, record.snapshot_digest)
        known = station.freshness.known(slot)
        if snapshot is None:
            return None
        places = {place.name: place for place in snapshot.layout.placements}
        if known.keys() != places.keys():
            return None  # it is being verified again
        return Watched(slot, epoch, record, snapshot.layout, snapshot.held, places, known)

    def is_current(self, watched: Watched) -> bool:
        """The same bytes still serve."""
        station = self._station
        return station.block.active() == (watched.slot, watched.epoch) and station.slot_record(watched.slot) == watched.record

    def as_it_is(self, watched: Watched) -> Watched | None:
        """The same with the record of now: a repair, also one that was put back, gives the slot a new one. None: something else serves."""
        station = self._station
        record = station.slot_record(watched.slot)
        same = msgspec.structs.replace(record, repairs=watched.record.repairs) == watched.record
        return watched._replace(record=record) if same and station.block.active() == (watched.slot, watched.epoch) else None

    def is_repaired(self, watched: Watched, tensors: Sequence[str]) -> bool:
        """There was a repair since, and these tensors are whole."""
        now = self.as_it_is(watched)
        return now is not None and now.record != watched.record and not any(self.damaged(now, tensor) for tensor in tensors)

    def read(self, watched: Watched, span: Span) -> Words:
        """Block checks [blocks, 2] of the memory as it is now."""
        place = watched.places[span.tensor]
        begin = span.first * BLOCK_BYTES
        size = min(place.size_bytes, begin + span.blocks * BLOCK_BYTES) - begin
        return CpuDevice(self._arena()).block_checks(watched.slot, place.offset + begin, size)

    def damaged(self, watched: Watched, tensor: str) -> list[int]:
        """Blocks of the whole tensor that are not what was verified."""
        vector = watched.vectors[tensor]
        return scrub.wrong_blocks(vector.blocks, self.read(watched, Span(tensor, 0, len(vector.blocks))))

    def now_ns(self) -> int:
        return self._clock_ns()

    def note_pass(self, watched: Watched, begun_ms: int, begun_ns: int) -> None:
        """Every byte was found right since then, by the wall clock and by the monotonic one."""
        with self._station.records:
            check = self._station.checked.get(watched.slot)
            if check is not None and check.record == watched.record:
                at_ms, at_ns = max(check.at_ms, begun_ms), max(check.at_ns, begun_ns)
                self._station.checked[watched.slot] = check._replace(at_ms=at_ms, at_ns=at_ns, finding="")
                known = self._station.whole
                if known is None or known.record != watched.record or known.began_ns < begun_ns:
                    self._station.note_whole(Whole(watched.slot, watched.record, watched.record.vector_root, begun_ns))

    def doubt(self, watched: Watched) -> None:
        """Damage was found: no earlier reading of the slot says what it holds now, and the evidence of it says so."""
        with self._station.records:
            check = self._station.checked.get(watched.slot)
            if check is not None and check.record == watched.record:
                self._station.checked[watched.slot] = check._replace(finding=FailureClass.INTEGRITY_MISMATCH.value)
            self._station.note_whole(None)

    def prepare(self, watched: Watched, tensors: Sequence[str]) -> str:
        """The list that a repair or `condemn` gives the slot: all tensors but these. Gives its digest. Takes a while for large versions.

        "" where there is no room for it: then nothing of the slot is believed whole, should it be given up.
        """
        held = {name: digest for name, digest in watched.held.items() if name not in tensors}
        try:
            return self._station.snapshots.save(watched.slot, SlotSnapshot(watched.layout, held))
        except OSError as cause:
            log.error("snapshot_not_written", deployment=self._station.name, slot=watched.slot, reason=str(cause))
            return ""

    def repair(self, watched: Watched, fixes: Sequence[Fix], without: str, until_ns: int) -> None:
        """Write the blocks again. `without`: from `prepare`; `until_ns`: no request may enter before that.

        Raises Refusal: slot_busy when somebody is in the slot or the time is over, slot_not_verified when something else serves by now;
        nothing was written. Raises Refusal vector_mismatch, or what a fix raises, when the blocks are not right afterwards: the slot stays
        dirty and serves nobody.
        """
        station, arena = self._station, self._arena()
        with station.records:
            self._require_current(watched)
            self._require_idle(watched, until_ns)
            station.in_repair[watched.slot] = watched.record
            try:
                arena.begin_repair(watched.slot, without, until_ns)
                try:
                    self._require_idle(watched, until_ns)  # behind the record: who enters from now on leaves again
                except Refusal:
                    self._end(watched, arena)
                    raise
                self._write(watched, fixes)
                station.switching.barrier()
                self._end(watched, arena)
            finally:
                station.in_repair.pop(watched.slot, None)
        self._drop_lists(watched.slot, watched.record.snapshot_digest)

    def condemn(self, watched: Watched, without: str) -> bool:
        """Nobody computes from the slot any more; what `without` lists is still believed whole. False when something else serves by now.

        It asks for no room, neither in memory nor on the disk.
        """
        station = self._station
        with station.records:
            now = self.as_it_is(watched)
            if now is None:
                return False
            record = msgspec.structs.replace(now.record, snapshot_digest=without)
            self._arena().mark_dirty(watched.slot, record)
            station.checked.pop(watched.slot, None)
            station.freshness.take(watched.slot)
        self._drop_lists(watched.slot, without)
        return True

    def _drop_lists(self, slot: int, digest: str) -> None:
        with suppress(OSError):  # they go with the next one
            self._station.snapshots.drop_others(slot, digest)

    def _write(self, watched: Watched, fixes: Sequence[Fix]) -> None:
        device = CpuDevice(self._arena())
        for fix in fixes:
            place, begin = watched.places[fix.tensor], fix.block * BLOCK_BYTES
            size = min(BLOCK_BYTES, place.size_bytes - begin)
            device.fill(watched.slot, place.offset + begin, size, fix.read_into)
        for fix in fixes:
            span = Span(fix.tensor, fix.block, 1)
            found, expected = self.read(watched, span), watched.expected(span)
            if not np.array_equal(found, expected):
                subject = f"tensor {fix.tensor!r} block {fix.block} in slot {watched.slot}, written again"
                raise Refusal("vector_mismatch", subject, scrub.sums_text(expected[0]), scrub.sums_text(found[0]), "verify")

    def _end(self, watched: Watched, arena: Arena) -> None:
        """Verified again, and what this process knows of the slot speaks of its new record."""
        station, slot = self._station, watched.slot
        record = arena.end_repair(slot, watched.record)
        for known in (station.checked, station.warmed):
            entry = known.get(slot)
            if entry is not None and entry.record == watched.record:
                known[slot] = entry._replace(record=record)  # type: ignore[assignment]

    def _require_current(self, watched: Watched) -> None:
        if not self.is_current(watched):
            raise Refusal("slot_not_verified", f"slot {watched.slot}", f"{watched.record.version}, serving as before", "another state")

    def _require_idle(self, watched: Watched, until_ns: int) -> None:
        if not self._station.switching.idle(watched.slot):
            held = ", ".join(map(str, self._station.held(watched.slot))) or "a request that ended just now"
            raise Refusal("slot_busy", f"slot {watched.slot}", "nobody in it while a block is written again", held)
        if self._clock_ns() >= until_ns:
            raise Refusal("slot_busy", f"slot {watched.slot}", "a pause that lasts", "one that ended before the block was written")

    def _arena(self) -> Arena:
        arena = self._station.arena
        if arena is None:
            raise Refusal("slot_not_verified", "the arena", "one that serves", "none")
        return arena
