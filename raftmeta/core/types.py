"""The nouns of the cluster state, as frozen values.

Digests are 64 lower-case hex characters, times are Unix milliseconds stamped by the leader, sizes are bytes. A record is encoded with the
canonical msgpack encoder of `raftmeta.codec` and enters the state hash, so the order of fields is part of the format: fields are appended
with a default, never moved or removed. Nothing here has behaviour beyond derived properties.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False, gc=False):
    """Base of everything that is stored: encoded as an array in field order."""


class Phase(StrEnum):
    """Where a rollout stands. `idle` is a deployment without a running rollout."""

    IDLE = "idle"
    PREPARING = "preparing"  # agents bring the version's bytes into their stores
    SYNCING = "syncing"  # agents stage, verify and warm it in the standby slot
    COMMITTING = "committing"  # the switch is decided; agents flip
    ACTIVE = "active"  # every node attested that it serves it


class RolloutKind(StrEnum):
    ACTIVATE = "activate"
    ROLL_BACK = "rollback"


class RolloutStatus(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class SideName(StrEnum):
    PRIMARY = "primary"
    STANDBY = "standby"


class Stage(StrEnum):
    """How far one node has come with a rollout; only ever forward, `failed` ends it."""

    PREPARED = "prepared"  # every blob is in the store and verified
    READY = "ready"  # staged, vector equal to the manifest's, bound and warmed
    ACTIVE = "active"  # every worker of the node answers with it
    FAILED = "failed"


class ModelRecord(Record, frozen=True):
    name: str
    last_number: int  # the highest version number ever given; numbers are not reused
    version_count: int
    created_revision: int
    created_ms: int


class VersionSummary(Record, frozen=True):
    """What the log keeps decoded of a version, <= 1 KiB. Filled in by whoever validated the manifest."""

    checksum: str  # SHA-256(config digest || weights digest), both as 32 bytes
    config_digest: str
    weights_digest: str
    vector_root: str
    manifest_digest: str  # SHA-256 of the packed manifest bytes
    size_bytes: int  # sum of the sizes of all files
    weights_bytes: int  # sum of the sizes of all tensors
    file_count: int
    tensor_count: int


class VersionRecord(Record, frozen=True):
    model: str
    label: str
    number: int
    summary: VersionSummary
    principal: str
    published_revision: int
    published_ms: int


class Side(Record, frozen=True):
    zone: str
    nodes: tuple[str, ...]  # sorted, without repeats, disjoint between the sides


class DrainOverdue(StrEnum):
    """What a node does with requests that still use the old slot when it has to be rewritten and the time to drain is over."""

    WAIT = "wait"  # goes on waiting, and says who holds the slot
    CANCEL = "cancel"  # ends them: each gets an answer that says so


class FirstPolicy(Record, frozen=True):
    """The fields that a policy began with. It stands for one in bytes while the later fields have their defaults (`canonical`)."""

    prepare_timeout_ms: int
    sync_timeout_ms: int


class Policy(Record, frozen=True):
    prepare_timeout_ms: int = 3_600_000  # preparing longer than this aborts the rollout
    sync_timeout_ms: int = 600_000  # the same for syncing; committing never aborts, it is a decision
    drain_timeout_ms: int = 60_000  # for requests in the old slot before it is rewritten; longer than any request may take
    drain_overdue: DrainOverdue = DrainOverdue.WAIT


class Failover(Record, frozen=True):
    """The last decision which side takes requests, and what it rested on."""

    to: SideName
    principal: str
    forced: bool
    overridden: tuple[str, ...]  # codes of the preconditions that did not hold, of a forced one
    verdict_revision: int  # of the verdict that stood then, 0 when there was none
    revision: int
    decided_ms: int


class Deployment(Record, frozen=True):
    name: str
    model: str
    primary: Side
    standby: Side | None
    policy: Policy
    version: str  # label that serves, "" before the first activation
    previous: str  # label that undo returns to, "" if none
    rollout_id: str  # the running or last rollout, "" if none
    order_revision: int  # revision of the last committed order, a switch or a fail-over; with the generation the agents' fence
    declared_revision: int
    activated_revision: int  # revision at which `version` became active everywhere, or that of a fail-over since: no switch is pending
    activated_ms: int
    serving_side: SideName = SideName.PRIMARY  # that takes requests
    failover: Failover | None = None  # None: there was none yet, and both sides answer whoever asks them


class StageCounters(Record, frozen=True):
    """What one activation cost on one node."""

    bytes_total: int = 0
    bytes_fetched: int = 0  # from the source
    bytes_read: int = 0  # from the local store into the slot
    bytes_from_active: int = 0  # copied from the active slot
    bytes_kept: int = 0  # already in the standby slot
    tensors_changed: int = 0
    switch_call_us: int = 0  # the store and the barrier, longest of the node
    lag_ms: int = -1  # commit seen to active, the node's monotonic clock; -1 before active


class Attestation(Record, frozen=True):
    """An agent's statement: this version, these verified bytes, ready here."""

    node: str
    side: SideName
    stage: Stage
    checksum: str
    vector_root: str  # recomputed by the agent from slot memory; "" at `prepared`
    boot_id: str
    counters: StageCounters
    code: str  # failure class, "" unless stage is failed
    detail: str
    revision: int
    attested_ms: int


class Failure(Record, frozen=True):
    code: str
    node: str  # "" when no single node failed
    detail: str


class Rollout(Record, frozen=True):
    id: str
    deployment: str
    kind: RolloutKind
    model: str
    from_version: str
    to_version: str
    checksum: str
    vector_root: str
    phase: Phase
    status: RolloutStatus
    attestations: tuple[Attestation, ...]  # sorted by node, one per node
    failure: Failure | None
    principal: str
    started_revision: int
    started_ms: int
    phase_revision: int  # revision of the last phase change
    phase_ms: int
    ended_ms: int  # 0 while running
    switched_revision: int = 0  # revision of the switch order of this rollout, 0 before it
    switched_ms: int = 0


MAX_ANSWER_AGE_MS = 31 * 86_400_000  # thirty days that `raftmeta check --max-age` takes, and one that no check takes


class Basis(Record, frozen=True):
    """What a verdict was computed for. Recorded only while the deployment had not moved on from it."""

    generation: int
    order_revision: int
    version: str
    started_revision: int  # at which the check read the deployment first
    node_count: int  # nodes whose memory was seen
    age_ms: int = 0  # since the oldest reading of memory that it rests on began, when it was sent to be recorded


class Verdict(Record, frozen=True):
    """The last result of a consistency check, as its checker reported it."""

    deployment: str
    verdict: str  # consistent | diverged | incomplete
    report: bytes  # JSON, <= 64 KiB
    principal: str
    revision: int
    recorded_ms: int
    basis: Basis | None = None  # None: of a checker that did not say it, below feature level 2
    summary: str = ""  # a line of the report, for when that is no longer kept

    def age_ms(self, now_ms: int) -> int:
        """Of the oldest reading that it rests on, by the cluster's clock; of a checker that did not say it, of the record."""
        return now_ms - self.recorded_ms + (0 if self.basis is None else self.basis.age_ms)


class PastVerdict(Record, frozen=True):
    """A verdict that a later one followed, without its report."""

    verdict: str
    summary: str
    basis: Basis | None
    principal: str
    revision: int
    recorded_ms: int


class VerdictHistory(Record, frozen=True):
    """The verdicts of a deployment before its last one."""

    deployment: str
    dropped_revision: int  # of the newest that is not kept any more, 0 while all are
    items: tuple[PastVerdict, ...]  # the oldest first


class VectorFrom(StrEnum):
    """Where the vector of what serves comes from."""

    MEMORY = "memory"  # computed by the node from the memory that serves
    SERVER = "server"  # attested by a server whose memory nobody else can read


class Evidence(Record, frozen=True):
    """What a node said last of the bytes that it serves with for one deployment, by what it found itself."""

    deployment: str
    node: str
    side: SideName
    zone: str
    generation: int  # of the order that it obeyed last, with `order_revision`
    order_revision: int
    version: str  # "" when nothing that was verified serves; the digests are "" then
    checksum: str
    vector_root: str  # of the memory that serves, as `vector_from` says
    vector_from: VectorFrom
    derived_digest: str  # SHA-256 over the tensors that modules hold outside the slot, "" when there are none
    config_digest: str  # of the version's files beside the weights
    tokenizer_digest: str  # of those among them that make a tokenizer, "" when there are none
    boot_id: str
    told_ms: int  # the node's monotonic clock when it said so; orders what it says within a boot
    verified_age_ms: int  # how long before that its vector was compared last, by the same clock
    finding: str  # class of what the last comparison found wrong, "" when nothing was
    revision: int
    recorded_ms: int


class OutcomeRecord(Record, frozen=True):
    """What a retried command gets instead of being applied again."""

    body_digest: bytes  # first 16 bytes of SHA-256 of the command body
    revision: int
    code: str
    detail: str
    result: bytes  # msgpack of the result value, b"" when there is none
    stamped_ms: int


class Outcome(Record, frozen=True):
    """The result of applying one command. `code` is "ok" or a code of `errors.CODES`."""

    revision: int
    code: str
    detail: str = ""
    result: bytes = b""  # canonical msgpack of a small map (str -> str | int | list), b"" when there is none
    repeated: bool = False  # the key was seen before; nothing was applied


class Limits(Record, frozen=True):
    """Bounds of the state. They are part of it: a default may never be changed, a command behind a feature level may."""

    quota_bytes: int = 2 << 30  # keys, records and manifests together; commands that free or move nothing pass it
    max_models: int = 10_000
    max_versions_per_model: int = 100_000
    max_deployments: int = 1_000
    max_nodes_per_side: int = 1_000
    max_rollouts_per_deployment: int = 50  # the oldest is dropped
    max_outcomes: int = 1_000_000  # the oldest is dropped
    key_age_ms: int = 86_400_000  # a key that carries an older time is refused
    key_ahead_ms: int = 7_200_000  # and one that lies further ahead; twice the clock jump that members must stand
