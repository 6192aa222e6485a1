"""What changed, for the watch: one event per record and command, in the order of the changes.

All events of one command carry its revision (a batch of publications has one revision per item). An event holds the record as it was after
the command, so that a watcher needs no read of its own.
"""

from __future__ import annotations

import msgspec

from raftmeta.core.types import Deployment, Evidence, ModelRecord, Rollout, Verdict, VerdictHistory, VersionRecord

Value = ModelRecord | VersionRecord | Deployment | Rollout | Verdict | Evidence | VerdictHistory  # the last one has no events

KINDS = ("model", "version", "deployment", "rollout", "verdict", "evidence")
PUT = "put"
DELETE = "delete"


class Event(msgspec.Struct, frozen=True, gc=False):
    revision: int
    kind: str  # one of KINDS
    key: str  # the key of the record in its map of the state
    op: str  # PUT or DELETE
    value: Value | None  # the record after the command, None when it was deleted
