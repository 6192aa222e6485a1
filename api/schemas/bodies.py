"""What callers send. Every type forbids unknown fields and leaves its defaults out when encoded (`api.json_body` relies on both)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from raftmeta.core.manifest import Manifest
from raftmeta.core.types import MAX_ANSWER_AGE_MS, DrainOverdue, SideName, Stage, VectorFrom
from raftmeta.nodes import Digest, Name

Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\Z")]
LabelOrNone = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._+-]{0,127})?\Z")]  # "": nothing serves yet
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
MAX_NODES = 1_000  # of one side, as the state limits it
MAX_BATCH = 1_000
MAX_REPORT_BYTES = 64 << 10
TIMEOUT_MS = Meta(ge=1_000, le=30 * 86_400_000)


class Sent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all bodies and their parts."""


class PublishBody(Sent, frozen=True):
    manifest: Manifest


class BatchItem(Sent, frozen=True):
    label: Label
    manifest: Manifest


class BatchBody(Sent, frozen=True):
    items: Annotated[tuple[BatchItem, ...], Meta(min_length=1, max_length=MAX_BATCH)]


class SideBody(Sent, frozen=True):
    zone: Name
    nodes: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_NODES)]  # in any order


class PolicyBody(Sent, frozen=True):
    prepare_timeout_ms: Annotated[int, TIMEOUT_MS] = 3_600_000
    sync_timeout_ms: Annotated[int, TIMEOUT_MS] = 600_000
    drain_timeout_ms: Annotated[int, TIMEOUT_MS] = 60_000  # for requests in the slot that is rewritten next
    drain_overdue: DrainOverdue = DrainOverdue.WAIT


class DeploymentBody(Sent, frozen=True):
    model: Name
    primary: SideBody
    standby: SideBody | None = None
    policy: PolicyBody = PolicyBody()


class ActivateBody(Sent, frozen=True):
    version: Label
    expected_version: LabelOrNone | None = None  # what must serve now; "" for nothing, left out for whatever does


class RollBackBody(Sent, frozen=True):
    expected_version: LabelOrNone | None = None


class AbortBody(Sent, frozen=True):
    detail: Annotated[str, Meta(max_length=1_024)] = ""  # why, for those who read the rollout later


class CountersBody(Sent, frozen=True):
    bytes_total: Count = 0
    bytes_fetched: Count = 0
    bytes_read: Count = 0
    bytes_from_active: Count = 0
    bytes_kept: Count = 0
    tensors_changed: Count = 0
    switch_call_us: Count = 0
    lag_ms: Annotated[int, Meta(ge=-1, le=1 << 53)] = -1


class AttestBody(Sent, frozen=True):
    rollout_id: Name
    side: SideName
    stage: Stage
    checksum: Digest
    boot_id: Name
    vector_root: Digest = ""
    counters: CountersBody = CountersBody()
    code: Annotated[str, Meta(max_length=64)] = ""
    detail: Annotated[str, Meta(max_length=1_024)] = ""


class EvidenceBody(Sent, frozen=True):
    deployment: Name
    generation: Count  # of the order that the node obeyed last
    order_revision: Count
    boot_id: Name
    told_ms: Count  # of the node's monotonic clock
    version: LabelOrNone = ""  # "" when nothing that was verified serves
    checksum: Digest = ""
    vector_root: Digest = ""
    vector_from: VectorFrom = VectorFrom.MEMORY
    derived_digest: Digest = ""
    config_digest: Digest = ""
    tokenizer_digest: Digest = ""
    verified_age_ms: Count = 0  # how long before told_ms, by the same clock
    finding: Annotated[str, Meta(pattern=r"^([a-z][a-z0-9_]{0,63})?\Z")] = ""


class FailOverBody(Sent, frozen=True):
    to: SideName
    expected_serving_side: SideName | None = None  # what must serve now, left out for whichever does
    max_verdict_age_ms: Annotated[int, Meta(ge=0, le=1 << 53)] = 300_000
    force: bool = False  # whatever the last verdict is; overrides no other precondition


class FeatureLevelBody(Sent, frozen=True):
    level: Annotated[int, Meta(ge=1, le=1_000)]


class BasisBody(Sent, frozen=True):
    """What a verdict was computed for."""

    generation: Count
    order_revision: Count
    version: LabelOrNone
    started_revision: Count  # at which the check read the deployment first
    node_count: Count  # nodes whose memory was seen
    age_ms: Annotated[int, Meta(ge=0, le=MAX_ANSWER_AGE_MS)] = 0  # since the oldest reading of memory that it rests on began


class VerdictBody(Sent, frozen=True):
    deployment: Name
    verdict: Annotated[str, Meta(pattern=r"^(consistent|diverged|incomplete)\Z")]
    report: dict[str, Any]
    basis: BasisBody | None = None  # left out: as the report has it
    summary: Annotated[str, Meta(max_length=512)] = ""  # left out: made of the report


class VerdictsBody(Sent, frozen=True):
    items: Annotated[tuple[VerdictBody, ...], Meta(min_length=1, max_length=MAX_BATCH)]
