"""Everything that may enter the log.

A command is one envelope and one body. The envelope carries what differs between replicas, stamped before proposing: who, which request,
when. Bodies are a closed tagged union; a change of meaning is a new body with a new tag behind a feature level, never a flag. Tags and
field order are for ever. A body carries its precondition; `apply` judges it against the state and never raises.
"""

from __future__ import annotations

from typing import Any

import msgspec

from raftmeta.core.canonical import with_first_policy
from raftmeta.core.types import Basis, Phase, Policy, Record, Side, SideName, Stage, StageCounters, VectorFrom, VersionSummary

SCHEMA = 1  # schema number of the envelopes this build writes


class Publish(Record, frozen=True, tag=1):
    """Create a version. Equal checksum under the same label is a success that changes nothing; another is `version_exists`."""

    model: str
    label: str
    summary: VersionSummary
    manifest: bytes  # packed, opaque to apply; at most 1 MiB


class PublishBatch(Record, frozen=True, tag=2):
    """1..1000 publications, all or nothing, one revision each."""

    items: tuple[Publish, ...]


class DeleteVersion(Record, frozen=True, tag=3):
    model: str
    label: str


class DeclareDeployment(Record, frozen=True, tag=4):
    name: str
    model: str
    primary: Side
    standby: Side | None
    policy: Policy


class Activate(Record, frozen=True, tag=5):
    deployment: str
    version: str
    expected_version: str | None  # None: whatever serves now; "" : nothing serves yet
    rollout_id: str  # chosen by the proposer


class RollBack(Record, frozen=True, tag=6):
    deployment: str
    expected_version: str | None
    rollout_id: str


class Attest(Record, frozen=True, tag=7):
    rollout_id: str
    node: str
    side: SideName
    stage: Stage
    checksum: str
    vector_root: str
    boot_id: str
    counters: StageCounters
    code: str
    detail: str


class AdvanceRollout(Record, frozen=True, tag=8):
    """The controller's: move on when the gate of `from_phase` holds."""

    rollout_id: str
    from_phase: Phase


class AbortRollout(Record, frozen=True, tag=9):
    """The controller's or an operator's; refused once the switch is decided."""

    rollout_id: str
    code: str
    node: str
    detail: str


class RecordVerdict(Record, frozen=True, tag=10):
    deployment: str
    verdict: str
    report: bytes


class RaiseFeatureLevel(Record, frozen=True, tag=11):
    level: int


class RecordEvidence(Record, frozen=True, tag=12):
    """A node's: which bytes it serves with now. What it said before of the deployment is replaced."""

    deployment: str
    node: str
    generation: int  # of the order that it obeyed last
    order_revision: int
    version: str  # "" when nothing that was verified serves
    checksum: str
    vector_root: str
    vector_from: VectorFrom
    derived_digest: str
    config_digest: str
    tokenizer_digest: str
    boot_id: str
    told_ms: int
    verified_age_ms: int
    finding: str


class RecordCheck(Record, frozen=True, tag=13):
    """A checker's verdict, and what it was computed for. Refused once the deployment has moved on from that."""

    deployment: str
    verdict: str
    summary: str
    report: bytes
    basis: Basis


class FailOver(Record, frozen=True, tag=14):
    """The other side takes requests from here on. All preconditions are judged, and a refusal lists those that do not hold."""

    deployment: str
    to: SideName
    expected_serving_side: SideName | None  # None: whichever serves
    max_verdict_age_ms: int
    force: bool  # whatever the last verdict is; overrides no other precondition


Body = (
    Publish
    | PublishBatch
    | DeleteVersion
    | DeclareDeployment
    | Activate
    | RollBack
    | Attest
    | AdvanceRollout
    | AbortRollout
    | RecordVerdict
    | RaiseFeatureLevel
    | RecordEvidence
    | RecordCheck
    | FailOver
)


class Command(Record, frozen=True):
    schema: int
    request_id: str  # idempotency key, 1..128 visible ASCII characters
    principal: str  # authenticated name of the caller
    source: str  # the member that took the request
    stamped_ms: int  # the leader's wall clock when it proposed
    body: Body


class Envelope(Record, frozen=True):
    """A command whose body is still in the bytes of the log."""

    schema: int
    request_id: str
    principal: str
    source: str
    stamped_ms: int
    body: msgspec.Raw


def encode(command: Command) -> bytes:
    """Canonical bytes of a command; the same value gives the same bytes in every process."""
    body = _plain(command.body)
    return _encoder.encode(command if body is command.body else msgspec.structs.replace(command, body=body))


def decode(data: bytes) -> Command:
    """The command of these bytes. Raises msgspec.DecodeError or ValidationError, nothing else."""
    return _decoder.decode(data)


def open_envelope(data: bytes) -> Envelope:
    """The envelope alone. Raises as `decode` does; the body may still be no command."""
    return _envelope_decoder.decode(data)


def decode_body(data: bytes | msgspec.Raw) -> Body:
    """The body of these bytes. Raises as `decode` does."""
    return _body_decoder.decode(data)


def encode_body(body: Body) -> bytes:
    """Canonical bytes of a body, the same as inside its command."""
    return _encoder.encode(_plain(body))


def _plain(body: Body) -> Any:
    return with_first_policy(body) if type(body) is DeclareDeployment else body


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Command)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_body_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)
