"""Every error code of the product, with what the caller does next.

One table. A code is a promise: it stands in outcomes inside the log, in problem bodies, in metrics and in the documentation, and a golden
file in tests/contract holds the list. Codes are added, never renamed. Nothing here raises; the shells wrap a code in an exception.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ErrorClass(StrEnum):
    """What the caller does next."""

    INVALID = "invalid"  # fix the request
    REJECTED = "rejected"  # re-read the state and decide
    UNAVAILABLE = "unavailable"  # retry later
    CAPACITY = "capacity"  # free something
    INTEGRITY = "integrity"  # page a person


class CodeInfo(NamedTuple):
    error_class: ErrorClass
    status: int  # HTTP status
    title: str  # one short English phrase, stable


_I, _R, _U, _C, _X = (
    ErrorClass.INVALID,
    ErrorClass.REJECTED,
    ErrorClass.UNAVAILABLE,
    ErrorClass.CAPACITY,
    ErrorClass.INTEGRITY,
)

OK = "ok"

CODES: dict[str, CodeInfo] = {
    # invalid
    "bad_request": CodeInfo(_I, 400, "The request could not be read"),
    "bad_json": CodeInfo(_I, 400, "The body is not strict JSON"),
    "bad_name": CodeInfo(_I, 422, "A name is outside its alphabet"),
    "bad_manifest": CodeInfo(_I, 422, "The manifest contradicts itself"),
    "bad_field": CodeInfo(_I, 422, "A field has a value outside its range"),
    "unauthenticated": CodeInfo(_I, 401, "No valid credentials"),
    "forbidden": CodeInfo(_I, 403, "The principal may not do this"),
    "not_found": CodeInfo(_I, 404, "No such resource"),
    "unknown_model": CodeInfo(_I, 404, "No such model"),
    "unknown_version": CodeInfo(_I, 404, "No such version"),
    "unknown_deployment": CodeInfo(_I, 404, "No such deployment"),
    "unknown_rollout": CodeInfo(_I, 404, "No such rollout"),
    "unknown_node": CodeInfo(_I, 404, "The node is not part of this deployment"),
    "method_not_allowed": CodeInfo(_I, 405, "The resource does not take this method"),
    "body_too_large": CodeInfo(_I, 413, "The body exceeds its limit"),
    "unsupported_media_type": CodeInfo(_I, 415, "The body must be application/json"),
    "idempotency_reused": CodeInfo(_I, 422, "The idempotency key was used with another body"),
    "idempotency_expired": CodeInfo(_I, 422, "The idempotency key is older than the retention window"),
    "unsupported_command": CodeInfo(_I, 422, "The command needs a higher feature level"),
    # rejected
    "version_exists": CodeInfo(_R, 409, "The label holds other bytes"),
    "in_use": CodeInfo(_R, 409, "The version is named by a slot, a rollout or an undo"),
    "rollout_in_progress": CodeInfo(_R, 409, "Another rollout of the deployment is running"),
    "rollout_not_running": CodeInfo(_R, 409, "The rollout has ended"),
    "wrong_phase": CodeInfo(_R, 409, "The rollout is in another phase"),
    "gate_not_met": CodeInfo(_R, 409, "The gate of the phase does not hold yet"),
    "expected_version_mismatch": CodeInfo(_R, 412, "The deployment serves another version than expected"),
    "already_active": CodeInfo(_R, 409, "The deployment serves this version already"),
    "nothing_to_roll_back": CodeInfo(_R, 409, "The deployment has no previous version"),
    "deployment_model_fixed": CodeInfo(_R, 409, "A deployment keeps its model while it serves a version"),
    "attestation_mismatch": CodeInfo(_R, 409, "The attested bytes are not the published ones"),
    "stale_attestation": CodeInfo(_R, 409, "The node attested a later stage already"),
    "stale_evidence": CodeInfo(_R, 409, "The node said something later already"),
    "verdict_outdated": CodeInfo(_R, 409, "The deployment moved on since the check began"),
    "nodes_not_covered": CodeInfo(_R, 409, "A consistent verdict speaks of every node"),
    "failover_refused": CodeInfo(_R, 409, "Preconditions of the fail-over do not hold"),
    "side_serves": CodeInfo(_R, 409, "The side that serves cannot be taken away"),
    "compacted": CodeInfo(_R, 410, "The position is older than the retained events"),
    "directory_refused": CodeInfo(_R, 409, "The data directory is another process's, user's or member's"),
    "feature_level_unsupported": CodeInfo(_R, 409, "The feature level cannot be lowered or skipped"),
    # unavailable
    "no_leader": CodeInfo(_U, 503, "No leader is known; an election may be running"),
    "no_quorum": CodeInfo(_U, 503, "A majority of the members did not answer in time"),
    "not_applied": CodeInfo(_U, 503, "The command was not applied; retry with the same key"),
    "unknown_outcome": CodeInfo(_U, 503, "It is not known whether the command was applied; retry with the same key"),
    "stale": CodeInfo(_U, 503, "This member is staler than max_stale_ms allows"),
    "revision_not_reached": CodeInfo(_U, 503, "This member has not applied min_revision yet"),
    "overloaded": CodeInfo(_U, 503, "The member's queue is full"),
    "agent_unreachable": CodeInfo(_U, 503, "No agent answers on this machine"),
    "starting": CodeInfo(_U, 503, "The member is not ready yet"),
    "shutting_down": CodeInfo(_U, 503, "The member is shutting down"),
    # capacity
    "quota_exceeded": CodeInfo(_C, 507, "The state quota is used up"),
    "manifest_too_large": CodeInfo(_C, 507, "The packed manifest exceeds its limit"),
    "disk_full": CodeInfo(_C, 507, "The member has no room for another journal segment"),
    "too_many_watchers": CodeInfo(_C, 429, "The member serves its limit of watches"),
    "too_many_requests": CodeInfo(_C, 429, "The member serves its limit of requests"),
    # integrity
    "internal": CodeInfo(_X, 500, "An unexpected fault; the member reports it"),
    "integrity": CodeInfo(_X, 500, "Stored data failed its check"),
}


class RaftmetaError(Exception):
    """An error with a stable code. `detail` says which thing, what was expected and what was found."""

    def __init__(self, code: str, detail: str, **params: str | int | list[str]) -> None:
        assert code in CODES, code
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.params = params

    @property
    def info(self) -> CodeInfo:
        return CODES[self.code]
