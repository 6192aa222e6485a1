"""What the API answers beside records: pages, acknowledgements, the cluster and the fleet."""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas import records
from raftmeta.core.proof import Standing
from raftmeta.core.types import Phase, SideName
from raftmeta.log.port import LogStatus
from raftmeta.nodes import ServingStatus, SlotStatus


def page_of(item: Any, name: str) -> type[msgspec.Struct]:
    """The type of one page of a list."""
    return msgspec.defstruct(name, [("items", tuple[item, ...]), ("next", str | None)], frozen=True, module=__name__)


ModelPage = page_of(records.Model, "ModelPage")
VersionPage = page_of(records.Version, "VersionPage")
VerdictPage = msgspec.defstruct(
    "VerdictPage",
    [("items", tuple[records.Verdict, ...]), ("next", str | None), ("dropped_revision", int)],  # the last: of what is no longer kept
    frozen=True,
    module=__name__,
)


# A deployment, the version that it decided to serve (None before the first activation), and where its rollout stands: `phase` is idle
# without a running one, `target` the version that it is moving to or serves, `waiting_for` the nodes that keep the gate of the phase shut.
Deployment = msgspec.defstruct(
    "Deployment",
    [("serving", records.Version | None), ("phase", Phase), ("target", str), ("waiting_for", tuple[str, ...])],
    bases=(records.Deployment,),
    frozen=True,
    module=__name__,
)
DeploymentPage = page_of(Deployment, "DeploymentPage")
RolloutPage = page_of(records.Rollout, "RolloutPage")


class Served(msgspec.Struct, frozen=True):
    """What a deployment served at a time."""

    version: str  # "" when nothing had been activated yet
    rollout_id: str  # that brought it, "" when it is no longer kept
    since_ms: int | None  # None when that is no longer known
    until_ms: int | None  # None while it serves


class Acknowledged(msgspec.Struct, frozen=True):
    """A change that has no resource of its own to show."""

    revision: int


class Judged(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one item of a batch whose items stand for themselves: of a refused one the code and why."""

    revision: int
    code: str = "ok"
    detail: str = ""


class JudgedItems(msgspec.Struct, frozen=True):
    items: tuple[Judged, ...]  # in the order of the request


class RolloutStarted(msgspec.Struct, frozen=True):
    rollout_id: str
    revision: int


class Versions(msgspec.Struct, frozen=True):
    versions: tuple[records.Version, ...]


# What a node said last, with how old that is and when, by the members' clock, its vector was compared last.
Said = msgspec.defstruct(
    "Said",
    [
        *(
            (f.encode_name, f.type)
            for f in msgspec.structs.fields(records.Evidence)
            if f.name not in ("deployment", "node", "side", "zone")
        ),
        ("age_ms", int),
        ("verified_at_ms", int),
    ],
    frozen=True,
    module=__name__,
)


class NodeProof(msgspec.Struct, frozen=True):
    node: str
    side: SideName
    zone: str
    standing: Standing
    heard_age_ms: int | None  # None when this member never heard of it
    serves_decided: bool  # current, and these are the bytes that the deployment decided
    knows_order: bool  # current, and the last order was obeyed
    evidence: Said | None  # type: ignore[valid-type]


class EvidenceReport(msgspec.Struct, frozen=True):
    """Which bytes serve a deployment where."""

    deployment: str
    model: str
    version: str  # that the deployment decided, "" before the first activation
    checksum: str
    vector_root: str
    generation: int  # of the last order, with `order_revision`
    order_revision: int
    all_serve_decided: bool
    nodes: tuple[NodeProof, ...]


class FailedOver(msgspec.Struct, frozen=True):
    """A fail-over was decided."""

    serving_side: SideName
    order_revision: int  # of the decision, which every agent of both sides obeys
    overridden: tuple[str, ...]  # preconditions that did not hold, of a forced one
    revision: int


class FailoverReason(msgspec.Struct, frozen=True):
    code: str
    detail: str
    nodes: tuple[str, ...]  # that it is about, if it is about nodes
    yields: bool  # whether force overrides it


class FailoverPreview(msgspec.Struct, frozen=True):
    """What would be said to a fail-over now."""

    deployment: str
    serving_side: SideName
    to: SideName
    version: str
    allowed: bool
    allowed_with_force: bool
    reasons: tuple[FailoverReason, ...]


class FeatureLevel(msgspec.Struct, frozen=True):
    feature_level: int
    revision: int


class HeartbeatReply(msgspec.Struct, frozen=True):
    generation: int
    revision: int
    interval_ms: int  # until the next one


class Node(msgspec.Struct, frozen=True):
    node: str
    zone: str
    boot_id: str
    url: str
    slots: tuple[SlotStatus, ...]
    deployments: dict[str, ServingStatus]
    age_ms: int  # since this member heard of it
    missing: bool


NodePage = page_of(Node, "NodePage")

Cluster = msgspec.defstruct(
    "Cluster",
    [
        *((field.encode_name, field.type) for field in msgspec.structs.fields(LogStatus)),
        ("caught_up", bool),  # False: what this member has applied may be behind what was acknowledged, so it answers nothing else
        ("generation", int),
        ("feature_level", int),
        ("state_hash", str),
        ("revision", int),
    ],
    frozen=True,
    module=__name__,
)


class ReadyCheck(msgspec.Struct, frozen=True):
    name: str
    ok: bool
    reason: str


class Ready(msgspec.Struct, frozen=True):
    ready: bool
    checks: tuple[ReadyCheck, ...]


class Live(msgspec.Struct, frozen=True):
    alive: bool
