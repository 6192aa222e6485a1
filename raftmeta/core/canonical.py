"""The bytes of records and commands that gained fields: without them while they have their defaults.

A state that nobody used the new fields in has the bytes and the hash that earlier builds gave it, so snapshots, hashes and keys of
commands outlive the update. The decoder fills the defaults in. A record is an array in field order, so a tuple of its first fields is what
an earlier build wrote. Values are told by their type; everything else is encoded as it is. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from raftmeta.core.types import Deployment, FirstPolicy, Policy, SideName, Verdict

_DEFAULTS = Policy()
_LATER = tuple(name for name in Policy.__struct_fields__ if name not in FirstPolicy.__struct_fields__)
FIRST_OF_DEPLOYMENT = 12  # fields
FIRST_OF_VERDICT = 6


def has_first_policy(policy: Policy) -> bool:
    """Whether the policy says nothing in the fields that it gained."""
    return all(getattr(policy, name) == getattr(_DEFAULTS, name) for name in _LATER)


def with_first_policy(value: Any) -> Any:
    """What stands for a record with a `policy` in its bytes."""
    policy = value.policy
    if not has_first_policy(policy):
        return value
    return msgspec.structs.replace(value, policy=FirstPolicy(policy.prepare_timeout_ms, policy.sync_timeout_ms))


def _first_of_deployment(deployment: Deployment) -> Any:
    plain = with_first_policy(deployment)
    if deployment.failover is not None:
        return plain
    assert deployment.serving_side is SideName.PRIMARY, deployment
    return tuple(getattr(plain, name) for name in Deployment.__struct_fields__[:FIRST_OF_DEPLOYMENT])


def _first_of_verdict(verdict: Verdict) -> Any:
    if verdict.basis is None and not verdict.summary:
        return msgspec.structs.astuple(verdict)[:FIRST_OF_VERDICT]
    return verdict


CANONICAL: dict[type, Callable[[Any], Any]] = {
    Deployment: _first_of_deployment,
    Verdict: _first_of_verdict,
}  # what is encoded in place of a record
