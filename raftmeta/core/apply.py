"""apply: the one way in which the state changes.

Total: any command, and any bytes, give an outcome, and a refusal changes nothing but the revision and the stored outcome. Deterministic:
the result depends on the state and the bytes alone, and not on how the commands are cut into batches. A command whose key was seen before,
or whose key is refused, has not reached apply: the state stays the same value, revision included, so equal revisions mean equal hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from raftmeta.core import commands as c
from raftmeta.core.errors import OK
from raftmeta.core.events import Event
from raftmeta.core.handlers.attestations import attest
from raftmeta.core.handlers.checks import Refusal
from raftmeta.core.handlers.deployments import declare_deployment
from raftmeta.core.handlers.evidence import record_evidence
from raftmeta.core.handlers.failovers import fail_over
from raftmeta.core.handlers.feature_level import raise_feature_level
from raftmeta.core.handlers.rollouts import abort_rollout, activate, advance_rollout, roll_back
from raftmeta.core.handlers.verdicts import record_check, record_verdict
from raftmeta.core.handlers.versions import delete_version, publish, publish_batch
from raftmeta.core.state import MAX_INT, State, decode_outcome, encode_record
from raftmeta.core.types import Outcome, OutcomeRecord
from raftmeta.core.work import Work

MAX_PRINCIPAL = 256  # characters, of the source too
MAX_STORED_DETAIL = 512  # characters of an outcome's detail
DROPS_PER_COMMAND = 4  # outcomes dropped per command: more than the one that a command adds, so the backlog shrinks

KEY_TIME_DIGITS = 13  # keys of the SDK: Unix milliseconds, hyphen, random text
MAX_REQUEST_ID = 128


class Handler(NamedTuple):
    run: Callable[[Work, Any], bytes | Refusal]
    level: int  # feature level from which the command is understood
    bound_by_quota: bool  # False for what frees, moves or ends something: it must work when nothing else does


HANDLERS: dict[type, Handler] = {
    c.Publish: Handler(publish, 1, True),
    c.PublishBatch: Handler(publish_batch, 1, True),
    c.DeleteVersion: Handler(delete_version, 1, False),
    c.DeclareDeployment: Handler(declare_deployment, 1, True),
    c.Activate: Handler(activate, 1, False),
    c.RollBack: Handler(roll_back, 1, False),
    c.Attest: Handler(attest, 1, False),
    c.AdvanceRollout: Handler(advance_rollout, 1, False),
    c.AbortRollout: Handler(abort_rollout, 1, False),
    c.RecordVerdict: Handler(record_verdict, 1, False),
    c.RaiseFeatureLevel: Handler(raise_feature_level, 1, False),
    c.RecordEvidence: Handler(record_evidence, 2, False),
    c.RecordCheck: Handler(record_check, 2, False),
    c.FailOver: Handler(fail_over, 2, False),
}


_STARTING = (c.Activate, c.RollBack)


class Applied(NamedTuple):
    state: State
    outcome: Outcome
    events: tuple[Event, ...]


class BatchApplied(NamedTuple):
    state: State
    outcomes: tuple[Outcome, ...]  # one for each payload, in order
    events: tuple[Event, ...]


def apply(state: State, command: c.Command) -> Applied:
    """The state after one command. The same as a batch of its encoded bytes."""
    after, outcomes, events = apply_batch(state, (c.encode(command),))
    return Applied(after, outcomes[0], events)


def apply_batch(state: State, payloads: Sequence[bytes]) -> BatchApplied:
    """The state after the encoded commands of one log entry, in order. Undecodable bytes are refused as `bad_request`."""
    work = Work(state)
    outcomes = tuple([_step(work, payload) for payload in payloads])
    if work.revision == state.revision:
        work.outcomes.abandon()
        return BatchApplied(state, outcomes, ())
    return BatchApplied(work.finish(), outcomes, tuple(work.ledger.events))


def known_outcome(state: State, request_id: str, principal: str, body: bytes) -> Outcome | None:
    """What an encoded command would be answered for its key alone, None when no outcome of the key is kept."""
    stored = state.outcomes.get(request_id)
    if stored is None:
        return None
    digest = _body_digest(principal, c.decode_body(msgspec.Raw(body)), msgspec.Raw(body))
    return _repeat(state.revision, stored, digest)


def _step(work: Work, payload: bytes) -> Outcome:
    try:
        envelope = c.open_envelope(payload)
        raw = envelope.body
        body = c.decode_body(raw)
    except (msgspec.MsgspecError, RecursionError) as cause:
        return _unread(work, "bad_request", f"the command cannot be read: {str(cause)[:200]}")
    fault = _envelope_fault(envelope)
    if fault is not None:
        return _unread(work, fault.code, fault.detail)
    handler = HANDLERS[type(body)]
    if envelope.schema != c.SCHEMA or handler.level > work.feature_level:
        detail = f"{type(body).__name__} in schema {envelope.schema} needs more than feature level {work.feature_level}"
        return _unread(work, "unsupported_command", detail)
    digest = _body_digest(envelope.principal, body, raw)
    stored = work.outcomes.get(envelope.request_id)
    if stored is not None:
        return _repeat(work.revision, stored, digest)
    fault = _key_fault(work, envelope)
    if fault is not None:
        return Outcome(work.revision, fault.code, fault.detail)
    return _first(work, envelope, handler, body, digest)


def _first(work: Work, envelope: c.Envelope, handler: Handler, body: c.Body, digest: bytes) -> Outcome:
    """Apply a command that was not seen before, and remember what it was answered."""
    if envelope.stamped_ms > work.cluster_ms:
        work.cluster_ms = envelope.stamped_ms
    work.principal = envelope.principal
    ledger = work.ledger
    ledger.revision += 1
    if handler.bound_by_quota and ledger.unsettled:
        ledger.settle()
    mark = work.mark()
    done = handler.run(work, body)
    if handler.bound_by_quota:
        if ledger.unsettled:
            ledger.settle()
        size_bytes = ledger.size_bytes
        if size_bytes > work.limits.quota_bytes and size_bytes > mark[1]:
            detail = f"the state would have {size_bytes} bytes, the quota is {work.limits.quota_bytes}"
            done = Refusal("quota_exceeded", detail)
    if isinstance(done, Refusal):
        work.undo(mark)
        outcome = Outcome(ledger.revision, done.code, done.detail[:MAX_STORED_DETAIL], done.result)
    else:
        outcome = Outcome(ledger.revision, OK, "", done)
    record = encode_record(OutcomeRecord(digest, outcome.revision, outcome.code, outcome.detail, outcome.result, work.cluster_ms))
    work.outcomes.add(envelope.request_id, record)
    ledger.size_bytes += len(envelope.request_id) + len(record)
    if work.outcomes.count > work.limits.max_outcomes or work.cluster_ms > work.oldest_expires_ms:
        _drop_old_outcomes(work)
    return outcome


def _drop_old_outcomes(work: Work) -> None:
    """Forget in order of insertion what is too old or too much; bounded work per command.

    Keys may run ahead of the clock by `key_ahead_ms`, so an outcome is kept that much longer than a key is accepted: whoever drops out of
    the outcomes by age is refused by the time in the key.
    """
    limits = work.limits
    for _ in range(DROPS_PER_COMMAND):
        key, record = work.outcomes.oldest()
        stamped_ms = decode_outcome(record).stamped_ms
        work.oldest_expires_ms = stamped_ms + limits.key_age_ms + limits.key_ahead_ms
        if work.outcomes.count <= limits.max_outcomes and work.cluster_ms <= work.oldest_expires_ms:
            return
        work.keys_after_ms = max(work.keys_after_ms, min(_key_time(key), stamped_ms))
        work.drop_oldest_outcome(key, record)
    work.oldest_expires_ms = -1


def _repeat(revision: int, stored: bytes, digest: bytes) -> Outcome:
    record = decode_outcome(stored)
    if record.body_digest != digest:
        detail = f"the key was used at revision {record.revision} by another principal or with another body"
        return Outcome(revision, "idempotency_reused", detail)
    return Outcome(record.revision, record.code, record.detail, record.result, True)


def _body_digest(principal: str, body: c.Body, raw: msgspec.Raw) -> bytes:
    """Who asked for what. The id of a rollout is the proposer's choice, so a retry through another member may carry another one."""
    data: bytes | msgspec.Raw = raw
    if isinstance(body, _STARTING):
        data = c.encode_body(msgspec.structs.replace(body, rollout_id=""))
    return sha256(b"".join((f"{len(principal)}:{principal}".encode(), data))).digest()[:16]


def _key_time(request_id: str) -> int:
    """The Unix milliseconds that a key of the SDK carries, -1 for other keys."""
    if request_id[KEY_TIME_DIGITS : KEY_TIME_DIGITS + 1] == "-" and request_id[:KEY_TIME_DIGITS].isdigit():
        return int(request_id[:KEY_TIME_DIGITS])
    return -1


def _unread(work: Work, code: str, detail: str) -> Outcome:
    """Refuse what this build cannot judge: it counts as a command, and leaves no trace that depends on having read it."""
    work.ledger.revision += 1
    return Outcome(work.revision, code, detail)


def _envelope_fault(envelope: c.Envelope) -> Refusal | None:
    key = envelope.request_id
    if not 0 < len(key) <= MAX_REQUEST_ID or not key.isascii() or not key.isprintable() or " " in key:
        return Refusal("bad_field", f"the idempotency key is not 1..{MAX_REQUEST_ID} visible ASCII characters")
    if not 0 < len(envelope.principal) <= MAX_PRINCIPAL or len(envelope.source) > MAX_PRINCIPAL:
        return Refusal("bad_field", f"principal or source is not a text of at most {MAX_PRINCIPAL} characters")
    if not 0 <= envelope.stamped_ms <= MAX_INT:
        return Refusal("bad_field", f"stamped_ms is {envelope.stamped_ms}, expected 0..{MAX_INT}")
    return None


def _key_fault(work: Work, envelope: c.Envelope) -> Refusal | None:
    """Judge the time that a key of the SDK carries, so that a retry is never applied after its outcome was dropped.

    A time far ahead would keep a key acceptable after that, and is refused; it is measured from the later of the two clocks, so that a
    leader whose clock is behind refuses nobody. A cluster clock that a wrong one once moved days ahead refuses nobody either: where client
    and leader agree on an earlier time they are believed, for keys that are newer than all that was dropped by as much as a key may run
    ahead of its stamp.
    """
    key_ms, limits = _key_time(envelope.request_id), work.limits
    if key_ms < 0:
        return None
    now = max(work.cluster_ms, envelope.stamped_ms)
    oldest = max(now - limits.key_age_ms, work.keys_after_ms + 1)
    if key_ms < oldest:
        agreed = max(envelope.stamped_ms - limits.key_age_ms, work.keys_after_ms + 1 + limits.key_ahead_ms)
        if now - envelope.stamped_ms > limits.key_age_ms and agreed <= key_ms <= envelope.stamped_ms + limits.key_ahead_ms:
            return None
        return Refusal("idempotency_expired", f"the key carries the time {key_ms}, outcomes are known from {oldest} on")
    if key_ms > now + limits.key_ahead_ms:
        return Refusal("bad_field", f"the key carries the time {key_ms}, more than {limits.key_ahead_ms} ms ahead of {now}")
    return None
