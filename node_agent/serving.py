"""What an engine that serves one deployment says of itself: what it can tell, what its slots hold, who holds one of them. Values only.

An engine of ours computes from memory that this node can read. A server that owns its memory is believed in what it says; whatever only it
can know is marked as such here, so that nobody takes a statement for a measurement.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from consistency.vector import TensorVector, root
from node_agent.device.port import SlotRecord
from node_agent.plan import Order, SlotSeen, Target
from raftmeta.core import types
from raftmeta.core.manifest import Manifest

VectorFrom = types.VectorFrom


class DrainKnown(StrEnum):
    """Who knows that no request uses a slot any more."""

    COUNTED = "counted"  # this node counts them, and names who holds the slot and for how long
    TOLD = "told"  # the server says so, and may not say more


class Abilities(NamedTuple):
    vector_from: VectorFrom
    drain_known: DrainKnown
    slots: int  # versions held at once; with one nothing can be staged beside what serves


class SlotLook(NamedTuple):
    record: SlotRecord
    active: bool


class SlotsSeen(NamedTuple):
    """What is true of the slots at one moment, for the plan."""

    slots: tuple[SlotSeen, SlotSeen]
    active: int | None  # None: nothing serves
    epoch: int  # rises with every switch


class Holder(NamedTuple):
    """Who keeps a slot from being rewritten."""

    who: str  # a worker by its index, or the server, which need not say more
    seconds: float | None  # for how long already; None: not known

    def __str__(self) -> str:
        return self.who if self.seconds is None else f"{self.who} for {self.seconds:.1f} s"


class Staging(NamedTuple):
    """One version on its way into a slot that does not serve."""

    target: Target
    manifest: Manifest
    slot: int
    order: Order
    change: str  # rollout that asked for it, "" for none
    bytes_fetched: int  # for it, so far


class Switched(NamedTuple):
    epoch: int
    call_us: float  # for as long as a request could have waited


class Evidence(NamedTuple):
    """What is known of the slot that serves, without looking at its bytes again."""

    record: SlotRecord
    slot: int
    epoch: int
    verified_at_ms: int  # wall clock, when its vector was compared last
    derived: dict[str, str]  # SHA-256 of each tensor that modules hold outside the slot, the same in every worker
    vector_from: VectorFrom = VectorFrom.MEMORY
    verified_age_ms: int = 0  # the same by the monotonic clock: for how long that has been
    finding: str = ""  # failure class of what a later comparison found wrong, "" when none did


class Proven(NamedTuple):
    """What the last whole reading of the slot that serves found; nothing was written to the slot since."""

    record: SlotRecord
    slot: int
    epoch: int
    root: str
    age_ms: int  # since that reading began, by the monotonic clock of this process


class Digests(NamedTuple):
    """Contents of tensors of the slot that serves, read from its memory."""

    record: SlotRecord
    slot: int
    epoch: int
    sha256: dict[str, str]  # by tensor
    following: str  # the last name here when more follow in order of names, "" at the end


class Reading(NamedTuple):
    """The vector of the slot that served while it was computed, or while the server spoke of it."""

    record: SlotRecord
    slot: int
    epoch: int
    vectors: dict[str, TensorVector]
    vector_from: VectorFrom = VectorFrom.MEMORY

    @property
    def entries(self) -> dict[str, str]:
        return {name: vector.entry for name, vector in self.vectors.items()}

    @property
    def root(self) -> str:
        """From the entries; a server that gives none gives the root of its own record."""
        return self.record.vector_root if self.vector_from is VectorFrom.SERVER else root(self.entries)
