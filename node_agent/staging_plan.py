"""Which tensor of a version comes from where when it is staged. Pure: what both slots hold in, steps and costs out.

In order of cost: kept (the slot holds the same bytes at the same place already), from the active slot (the same bytes anywhere in it), from
the store. Bytes are the same when their SHA-256 is; what a slot holds is believed only if its snapshot says so, and checked by the vector
afterwards in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from node_agent.layout import Layout, Placement
from raftmeta.core.types import StageCounters


class Origin(StrEnum):
    KEPT = "kept"
    ACTIVE = "active"
    STORE = "store"


class Step(msgspec.Struct, frozen=True):
    placement: Placement
    sha256: str
    origin: Origin
    from_offset: int = 0  # in the active slot, when that is the origin


class Held(msgspec.Struct, frozen=True):
    """What one slot holds: its layout, and the SHA-256 of the tensors that are known to be whole."""

    layout: Layout
    sha256: Mapping[str, str]


def steps(layout: Layout, wanted: Mapping[str, str], standby: Held | None, active: Held | None) -> tuple[Step, ...]:
    """One step per placement of `layout`, in its order. `wanted` gives the SHA-256 of every tensor."""
    here = {} if standby is None else {(p.name, p.offset, p.size_bytes): standby.sha256.get(p.name) for p in standby.layout.placements}
    there = {} if active is None else {active.sha256[p.name]: p for p in active.layout.placements if p.name in active.sha256}
    return tuple(_step(placement, wanted[placement.name], here, there) for placement in layout.placements)


def kept(plan: tuple[Step, ...]) -> dict[str, str]:
    """SHA-256 of the tensors that no step writes."""
    return {step.placement.name: step.sha256 for step in plan if step.origin is Origin.KEPT}


def from_store(plan: tuple[Step, ...]) -> tuple[tuple[str, int], ...]:
    """(sha256, size) of every blob the store must have, each once, in order."""
    needed = ((step.sha256, step.placement.size_bytes) for step in plan if step.origin is Origin.STORE)
    return tuple(dict.fromkeys(needed))


def counters(plan: tuple[Step, ...], bytes_fetched: int, changed: int) -> StageCounters:
    """What the steps cost; `changed` is the number of tensors whose bytes differ from the active version's."""

    def size(origin: Origin) -> int:
        return sum(step.placement.size_bytes for step in plan if step.origin is origin)

    return StageCounters(
        bytes_total=sum(step.placement.size_bytes for step in plan),
        bytes_fetched=bytes_fetched,
        bytes_read=size(Origin.STORE),
        bytes_from_active=size(Origin.ACTIVE),
        bytes_kept=size(Origin.KEPT),
        tensors_changed=changed,
    )


def changed(wanted: Mapping[str, str], active: Held | None) -> int:
    """Tensors that the active version lacks or holds with other bytes."""
    before = {} if active is None else active.sha256
    return sum(before.get(name) != sha256 for name, sha256 in wanted.items())


def _step(placement: Placement, sha256: str, here: Mapping[tuple[str, int, int], str | None], there: Mapping[str, Placement]) -> Step:
    if here.get((placement.name, placement.offset, placement.size_bytes)) == sha256:
        return Step(placement, sha256, Origin.KEPT)
    source = there.get(sha256)
    if source is not None and source.size_bytes == placement.size_bytes:
        return Step(placement, sha256, Origin.ACTIVE, source.offset)
    return Step(placement, sha256, Origin.STORE)
