"""How many connections the API may hold, so that the log never lacks a descriptor for a file.

A process may open as many files as its limit says, connections among them. The soft limit is raised as far as the hard one allows; where
that is not enough for all connections of the configuration there are fewer, and where hardly any would be left the member does not start.
"""

from __future__ import annotations

import structlog

from raftmeta.core.errors import RaftmetaError
from raftmeta.descriptors import raised_limit

RESERVE = 192  # all that is no connection of a stranger: libraries, journal, snapshots, links to eight members, workers; 24 in use of three
MIN_CONNECTIONS = 16

log = structlog.get_logger(__name__)


def connections_allowed(wanted: int, others: int) -> int:
    """At most `wanted`, beside `others` that strangers may hold too. Lifts the soft limit.

    Raises RaftmetaError bad_field when the hard one is too low.
    """
    beside = others + RESERVE
    soft = raised_limit(beside + wanted)
    allowed = min(wanted, soft - beside)
    if allowed < MIN_CONNECTIONS:
        raise RaftmetaError(
            "bad_field",
            f"this process may open {soft} files (RLIMIT_NOFILE), a member with these limits needs at least {beside + MIN_CONNECTIONS}; "
            "raise it with `ulimit -n`, or LimitNOFILE of its systemd unit",
        )
    if allowed < wanted:
        log.warning("fewer_connections", allowed=allowed, configured=wanted, descriptors=soft)
    return allowed
