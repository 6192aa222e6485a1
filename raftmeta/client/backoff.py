"""When to try again: exponential back-off with jitter under one total deadline. Pure.

A call costs its first attempt at once; the other members are tried without a pause, and only a full round of failures waits. The wait
doubles from round to round and is drawn between half and all of it, so that clients that failed together do not return together.
"""

from __future__ import annotations

from typing import NamedTuple

from raftmeta.core.errors import CODES, ErrorClass


class RetryPolicy(NamedTuple):
    attempt_timeout_s: float = 10.0  # one request to one member, headers and body
    connect_timeout_s: float = 2.0
    first_wait_s: float = 0.05  # shorter than an election, so a new leader is found soon
    longest_wait_s: float = 1.0
    longest_retry_after_s: float = 5.0  # a server may ask for more; a client with a deadline does not wait longer


# codes of members that ask to be left alone for a while; for the others an election ends sooner than Retry-After's whole seconds
_HEED_RETRY_AFTER = frozenset({"overloaded", "starting", "shutting_down", "too_many_requests"})
RETRIED = frozenset(code for code, info in CODES.items() if info.error_class is ErrorClass.UNAVAILABLE) | {"too_many_requests"}


def wait_s(policy: RetryPolicy, round_number: int, draw: float) -> float:
    """Seconds to wait after round `round_number` (from 0) failed; `draw` is uniform in [0, 1)."""
    full = min(policy.longest_wait_s, policy.first_wait_s * 2.0 ** min(round_number, 30))
    return full * (0.5 + 0.5 * draw)


def asked_wait_s(policy: RetryPolicy, code: str, retry_after: str | None) -> float:
    """What the member's Retry-After adds as a lower bound, 0 when it does not count."""
    if code not in _HEED_RETRY_AFTER or retry_after is None or not retry_after.isascii() or not retry_after.isdigit():
        return 0.0
    return min(float(retry_after[:9]), policy.longest_retry_after_s)
