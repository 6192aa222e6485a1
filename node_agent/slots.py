"""The switch: which slot new requests enter, and when the other one may be rewritten.

A worker announces itself in the count of the slot it read from the active word, then reads that word again; changed, it withdraws and
retries. Control stores the active word, then issues the barrier, then looks at the counts. Either the worker's announcement is seen by
control or the new active word is seen by the worker; without the barrier neither need happen. A slot is reusable at zero in flight, after
a second barrier that orders the last reads of the workers before the first write of control. Nothing here waits without a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from node_agent.device.control_block import (
    ACTIVE,
    MAX_WORKERS,
    NO_SLOT,
    SLOTS,
    ControlBlock,
    count_index,
    pack_active,
    since_index,
    unpack_active,
)
from node_agent.refusal import Refusal

MAX_RETRIES = 1000  # each is a switch that came between two loads; the call itself takes longer than the gap
_POLL_S = (0.0, 0.000_05, 0.000_2, 0.001, 0.002)  # waits between looks at the counts, the last one repeated


class SwitchReport(msgspec.Struct, frozen=True):
    slot: int
    epoch: int  # rises by one per switch
    call_us: float  # the store and the barrier


class SlotHeld(NamedTuple):
    """A worker that computes in a slot."""

    worker: int
    counted: bool  # in the gate: the slot may not be rewritten. Otherwise beside it, and its answer will not count
    seconds: float

    def __str__(self) -> str:
        return f"worker {self.worker} for {self.seconds:.1f} s"


class Switch:
    """Control's side. One per control block, held by a lock until the block is closed."""

    def __init__(
        self,
        control_block: ControlBlock,
        require: Callable[[int], object] | None = None,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        """`require` raises unless the slot may serve (control passes Arena.verified); `barrier` replaces the block's own in a test."""
        control_block.lock_control()
        self._block = control_block
        self._words = control_block.words
        self._require = require
        if unpack_active(self._words[ACTIVE])[0] not in (*range(SLOTS), NO_SLOT):
            control_block.serve_nothing()
        self._active = self._words[ACTIVE]  # what this process, the only one that may, has written or found there
        self._barrier = control_block.barrier if barrier is None else barrier

    def switch(self, to_slot: int) -> SwitchReport:
        """Requests that start from now on enter `to_slot`. What is in flight stays where it is."""
        if not 0 <= to_slot < SLOTS:
            raise ValueError(f"slot {to_slot} is outside 0..{SLOTS - 1}")
        if self._require is not None:
            self._require(to_slot)
        epoch = unpack_active(self._active)[1] + 1
        word = pack_active(to_slot, epoch)
        begun = time.perf_counter_ns()
        self._active = self._words[ACTIVE] = word
        self._barrier()
        return SwitchReport(to_slot, epoch, (time.perf_counter_ns() - begun) / 1000)

    def mend(self) -> bool:
        """Write the active word again when somebody else did. True when it was so. Not beside `switch`."""
        if self._words[ACTIVE] == self._active:
            return False
        self._words[ACTIVE] = self._active
        self._barrier()
        return True

    def waiting(self, epoch: int) -> tuple[int, ...]:
        """Attached workers that have not acknowledged this epoch."""
        return tuple(row.index for row in self._block.attached() if row.acknowledged < epoch)

    def acknowledged(self, epoch: int) -> bool:
        """Every attached worker starts its requests in this epoch's slot or a later one's; never true without workers."""
        rows = self._block.attached()
        return bool(rows) and all(row.acknowledged >= epoch for row in rows)

    def in_flight(self, slot: int) -> int:
        """A worker names itself before it counts, so after the barrier of a switch none is left out for want of a name."""
        return sum(self._words[count_index(worker, slot)] for worker in range(MAX_WORKERS) if not self._block.is_empty(worker))

    def held(self, slot: int, now_ns: int) -> tuple[SlotHeld, ...]:
        """Who computes in the slot, in the gate or beside it. `now_ns`: of the monotonic clock."""
        rows = [row for row in self._block.attached() if row.in_flight[slot] or row.since_ns[slot]]
        return tuple(
            SlotHeld(row.index, bool(row.in_flight[slot]), max(0, now_ns - row.since_ns[slot]) / 1e9 if row.since_ns[slot] else 0.0)
            for row in rows
        )

    def idle(self, slot: int) -> bool:
        """No worker computes in the slot, in the gate or beside it. Whoever enters from now on sees what was written before this call."""
        self._barrier()
        return not self.in_flight(slot) and not any(row.since_ns[slot] for row in self._block.attached())

    def barrier(self) -> None:
        """What this process wrote before is seen by every worker before what it writes after."""
        self._barrier()

    def drained(self, slot: int) -> bool:
        """True when no request uses the slot and none can start in it before the next switch: it may be rewritten."""
        if self._block.active()[0] == slot:
            raise Refusal("slot_active", f"slot {slot}", "a slot that is not active", "the active slot")
        if self.in_flight(slot):
            return False
        self._barrier()  # the reads of a worker that left come before our first write
        return True

    def wait_drained(
        self, slot: int, deadline: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Return once the slot may be rewritten. Raises Refusal slot_busy when `clock()` passes `deadline`."""
        look = 0
        while not self.drained(slot):
            if clock() >= deadline:
                busy = [str(item) for item in self.held(slot, time.monotonic_ns()) if item.counted]
                raise Refusal("slot_busy", f"slot {slot}", "nothing in flight", f"{self.in_flight(slot)} in {', '.join(busy)}")
            sleep(_POLL_S[min(look, len(_POLL_S) - 1)])
            look += 1


class WorkerGate:
    """A worker's side: one per worker process, used by the one thread that runs its model."""

    def __init__(self, control_block: ControlBlock, worker_index: int) -> None:
        control_block.attach(worker_index)
        self._block = control_block
        self._words = control_block.words
        self._index = worker_index
        self._counts = count_index(worker_index, 0)
        self._since = since_index(worker_index, 0)
        self._epoch = 0

    def enter(self) -> int:
        """The slot to use until `leave`. Raises Refusal nothing_serves before the first switch."""
        words, counts = self._words, self._counts
        word = words[ACTIVE]
        for _ in range(MAX_RETRIES):
            slot = word & 0xFF
            if slot >= SLOTS:  # NO_SLOT, or a word that is damaged: control writes it again
                raise Refusal("nothing_serves", "active slot", "a verified slot", "none yet" if slot == NO_SLOT else f"slot {slot}")
            words[counts + slot] += 1
            again = words[ACTIVE]
            if again == word:
                if word >> 8 != self._epoch:
                    self._acknowledge(word >> 8)
                self.begin(slot)
                return slot
            words[counts + slot] -= 1
            word = again
        raise Refusal("slot_busy", f"worker {self._index}", f"a stable active word within {MAX_RETRIES} looks", "a switch at each")

    def leave(self, slot: int) -> None:
        """The request that `enter` gave this slot is done with its memory."""
        if not self._words[self._counts + slot]:
            raise ValueError(f"worker {self._index} leaves slot {slot}, which it has not entered")
        self.end(slot)
        self._words[self._counts + slot] -= 1

    def begin(self, slot: int) -> None:
        """Say that this worker computes in the slot from now on. Beside the gate it keeps nobody from rewriting the slot."""
        self._words[self._since + slot] = time.monotonic_ns()

    def end(self, slot: int) -> None:
        self._words[self._since + slot] = 0

    def acknowledge(self) -> int:
        """For an idle worker: later starts are in the slot that is active now, or a later one. Returns the epoch."""
        epoch = unpack_active(self._words[ACTIVE])[1]
        if epoch != self._epoch:
            self._acknowledge(epoch)
        return epoch

    def beat(self) -> None:
        self._block.beat(self._index, time.monotonic_ns())

    def detach(self) -> None:
        """At a clean end, with nothing in flight."""
        self._block.detach(self._index)

    def _acknowledge(self, epoch: int) -> None:
        self._epoch = epoch
        self._block.acknowledge(self._index, epoch)
