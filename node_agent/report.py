"""What an agent says: attestations, heartbeats, its status. Pure: values in, JSON objects out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from node_agent.device.port import SlotState
from node_agent.journal import ChangeRecord
from node_agent.plan import Attest, Target
from node_agent.scrub import ScrubLook
from node_agent.serving import Holder, SlotLook, VectorFrom
from raftmeta.core.types import SideName, Stage, StageCounters
from raftmeta.nodes import MAX_WHY

MAX_DETAIL = 1000  # characters of a failure


class Look(NamedTuple):
    """One deployment on this node, at one moment."""

    deployment: str
    model: str
    side: SideName
    slots: tuple[SlotLook, ...]  # empty before the first version
    ready: bool
    lag_ms: int
    goal: str  # label that is committed, "" when unknown
    doing: str  # the step being taken
    trouble: str  # why it does not advance
    holders: tuple[Holder, ...] = ()  # who uses a slot that does not serve
    vector_from: VectorFrom = VectorFrom.MEMORY
    pinned: str = ""  # why an operator keeps it where it is, "" when nobody does
    change: ChangeRecord = ChangeRecord()  # the rollout that it works on, or worked on last
    damage: str = ""  # found in the memory that serves, and not mended yet
    scrub: ScrubLook = ScrubLook()
    serving_side: str = ""  # that a fail-over named last, "" while none was heard of


class NodeFacts(NamedTuple):
    node: str
    zone: str
    boot_id: str
    url: str


def attestation(step: Attest, side: SideName, boot_id: str, vector_root: str, change: ChangeRecord) -> dict[str, Any]:
    """The body of an attestation: the fields of commands.Attest without the node."""
    failed = step.stage is Stage.FAILED
    return {
        "rollout_id": step.change,
        "side": side.value,
        "stage": step.stage.value,
        "checksum": step.target.checksum,
        "vector_root": "" if step.stage in (Stage.PREPARED, Stage.FAILED) else vector_root,
        "boot_id": boot_id,
        "counters": counters(change.counters),
        "code": change.failure.failure_class.value if failed else "",
        "detail": change.failure.detail[:MAX_DETAIL] if failed else "",
    }


def counters(value: StageCounters) -> dict[str, int]:
    return msgspec.structs.asdict(value)


def heartbeat(facts: NodeFacts, looks: Sequence[Look], cordoned: str = "") -> dict[str, Any]:
    """NodeStatus. `cordoned`: why an operator took the node out of readiness, "" when nobody did."""
    return {
        **facts._asdict(),
        "slots": [slot for look in looks for slot in _slots(look)],
        "deployments": {look.deployment: _serving(look, cordoned) for look in looks},
    }


def status(
    facts: NodeFacts,
    looks: Sequence[Look],
    control_plane: Mapping[str, Any],
    cordoned: str = "",
    not_tended: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The answer of /raftmeta/v1/status: a heartbeat and what stands in the way. `control_plane`: reachable, reason, silent_s.

    `not_tended`: by deployment that has no look, why it cannot be followed, taken over or given up yet.
    """
    body = heartbeat(facts, looks, cordoned)
    body |= {"control_plane": dict(control_plane), "cordoned": cordoned, "not_tended": dict(not_tended or {})}
    for look in looks:
        more = {"model": look.model, "side": look.side.value, "committed": look.goal, "doing": look.doing, "trouble": look.trouble}
        held = [{"who": holder.who, "seconds": None if holder.seconds is None else round(holder.seconds, 1)} for holder in look.holders]
        body["deployments"][look.deployment] |= {
            **more,
            "holders": held,
            "vector_from": look.vector_from.value,
            "pinned": look.pinned,
            "serving_side": look.serving_side,
            "rollout": look.change.id,
            "phase": look.change.reached.value if look.change.id else "",
            "damage": look.damage,
            "scrub": {**look.scrub._asdict(), "findings": [finding._asdict() for finding in look.scrub.findings]},
        }
    return body


def describe(target: Target) -> str:
    return f"{target.model}/{target.label} ({target.checksum[:12]})"


def _slots(look: Look) -> list[dict[str, Any]]:
    return [
        {
            "deployment": look.deployment,
            "slot": "active" if slot.active else "standby",
            "version": slot.record.version,
            "checksum": slot.record.checksum,
            "state": slot.record.state.value,
        }
        for slot in look.slots
    ]


def _serving(look: Look, cordoned: str) -> dict[str, Any]:
    record = next((slot.record for slot in look.slots if slot.active and slot.record.state is SlotState.VERIFIED), None)
    return {
        "version": "" if record is None else record.version,
        "checksum": "" if record is None else record.checksum,
        "vector_root": "" if record is None else record.vector_root,
        "ready": look.ready and not look.damage and not cordoned,
        "lag_ms": look.lag_ms if record is not None else -1,
        "why": _why(look, cordoned),
    }


def _why(look: Look, cordoned: str) -> str:
    """It is not ready, or does not follow what is decided; "" when it does. Short, and text: a heartbeat has to be taken."""
    told = {"cordoned": cordoned, "damaged": look.damage, "pinned": look.pinned}
    said = next((f"{what}: {why}" for what, why in told.items() if why), look.trouble)
    return said.encode("utf-8", "replace")[:MAX_WHY].decode("utf-8", "ignore")
