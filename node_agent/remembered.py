"""What this node remembers of one deployment: the record in its journal, and the changes that tending makes to it.

All of it is durable when a call returns, but for how far a rollout came, which the next change takes along, and for what `keep` is told
while the disk is full. It knows no engine: the fence, the pin and the proofs mean the same whatever serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from node_agent.failure import Failure
from node_agent.journal import LOAD_PHASES, MAX_PROOFS, ChangeRecord, DeploymentRecord, Journal, LoadPhase, Proof
from node_agent.plan import Order, Target
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import SideName, StageCounters


class Remembered:
    def __init__(self, journal: Journal, name: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """The journal has a record of this name until the deployment is given up."""
        self.name = name
        self._journal = journal
        self._clock_ns = clock_ns

    @property
    def record(self) -> DeploymentRecord:
        """Raises RaftmetaError unknown_deployment once it was given up."""
        found = self._journal.deployment(self.name)
        if found is None:
            raise RaftmetaError("unknown_deployment", f"deployment {self.name!r} left this node")
        return found

    def remember(self, **fields: object) -> None:
        self._journal.update(self.name, lambda record: msgspec.structs.replace(record, **fields))

    def keep(self, **fields: object) -> None:
        """The same, but in force also where the disk does not take it now: for what must stop nothing."""
        self._journal.keep(self.name, lambda record: msgspec.structs.replace(record, **fields))

    def change_record(self, change_id: str) -> ChangeRecord:
        """How far this node came with a rollout; a new one starts from nothing."""
        found = self.record.change
        if found.id != change_id:
            found = ChangeRecord(id=change_id)
            self._journal.note(self.name, lambda record: msgspec.structs.replace(record, change=found))
        return found

    def count(self, change_id: str, make: Callable[[StageCounters], StageCounters]) -> None:
        """What the rollout cost here, changed; nothing when the node works on another one by now."""
        self._change(change_id, lambda change: msgspec.structs.replace(change, counters=make(change.counters)))

    def note_cost(self, change_id: str, counters: StageCounters) -> None:
        """What the rollout cost here, for whoever asks: what can be counted again need not be durable."""
        self._note(change_id, lambda change: msgspec.structs.replace(change, counters=counters))

    def fail_change(self, change_id: str, why: Failure) -> None:
        """The rollout failed here. The first reason stays."""
        self._change(change_id, lambda change: change if change.failure else msgspec.structs.replace(change, failure=why))

    def reach(self, change_id: str, phase: LoadPhase) -> None:
        """The rollout's version came so far here; one that came further stays there. After a start it may be less far."""
        at = LOAD_PHASES.index(phase)
        self._note(
            change_id, lambda change: change if LOAD_PHASES.index(change.reached) >= at else msgspec.structs.replace(change, reached=phase)
        )

    def _change(self, change_id: str, make: Callable[[ChangeRecord], ChangeRecord]) -> None:
        self._journal.update(self.name, lambda record: _changed(record, change_id, make))

    def _note(self, change_id: str, make: Callable[[ChangeRecord], ChangeRecord]) -> None:
        self._journal.note(self.name, lambda record: _changed(record, change_id, make))

    def hear_serving_side(self, side: SideName | None, order: Order) -> bool:
        """A fail-over decided that this side takes requests, None: there was none. True when that changed what this node may answer.

        An order below one that was heard changes nothing. That there was no fail-over does so in a later generation alone: what was
        restored may know of none.
        """
        record = self.record
        if order < max(record.serving_order, record.fence):
            return False
        if side is record.serving_side:
            if side is not None and order > record.serving_order:
                self.remember(serving_order=order)  # after a start an order in between would else take the decision back
            return False
        if side is None and order.generation <= record.serving_order.generation:
            return False
        self.remember(serving_side=side, serving_order=order)
        return True

    def obey(self, target: Target, order: Order, seen_ns: int) -> None:
        """Before a switch: from here on orders below this one are refused. `seen_ns`: when it was first heard."""
        if order > self.record.fence:
            self.remember(fence=order, obeyed=target, order_seen_ns=seen_ns, lag_ms=-1)

    def proof(self, target: Target, kernel: str) -> Proof | None:
        """What is known of this version on this node, computed by this kernel."""
        return next((proof for proof in self.record.proofs if (proof.checksum, proof.kernel) == (target.checksum, kernel)), None)

    def note_proof(self, proof: Proof) -> None:
        others = [other for other in self.record.proofs if other.checksum != proof.checksum]
        self.remember(proofs=(*others, proof)[-MAX_PROOFS:])

    def note_answering(self, target: Target) -> None:
        """Every answer comes from the target: it is the pin, and the lag of its order is known."""
        record = self.record
        lag_ms = record.lag_ms
        if record.order_seen_ns and record.obeyed == target:
            passed_ns = self._clock_ns() - record.order_seen_ns
            lag_ms = passed_ns // 1_000_000 if passed_ns >= 0 else -1  # a boot in between starts the clock anew
        self.keep(pin=target, order_seen_ns=0, lag_ms=lag_ms)


def _changed(record: DeploymentRecord, change_id: str, make: Callable[[ChangeRecord], ChangeRecord]) -> DeploymentRecord:
    return record if record.change.id != change_id else msgspec.structs.replace(record, change=make(record.change))
