"""What the leader knows of one follower, and how much may be under way to it (R14, R15).

Three states: `probe` sends one append at a time until a match is known; `replicate` streams appends within a window of messages and bytes;
`snapshot` sends chunks, each after the acknowledgement of the one before. Nothing here sends: the engine asks and reports.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from raftmeta.log.snapshots import SnapshotMeta

MAX_INFLIGHT_MESSAGES = 64
MAX_INFLIGHT_BYTES = 8 << 20


class SendState(Enum):
    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


class Progress:
    """One follower in one term of this leader."""

    __slots__ = (
        "acked_round",
        "match",
        "next",
        "offset",
        "probe_at",
        "refusals_from",
        "room",
        "sent",
        "sent_at",
        "sent_bytes",
        "snapshot",
        "state",
        "waiting",
    )

    def __init__(self, next_index: int) -> None:
        self.match = 0
        self.next = self.probe_at = next_index  # first index not sent yet; where the probe began
        self.state = SendState.PROBE
        self.sent: deque[tuple[int, int]] = deque()  # (last index, bytes) of appends under way
        self.sent_bytes = 0
        self.acked_round = 0
        self.refusals_from = 0  # refusals of earlier rounds tell what is known already
        self.waiting = False  # probe or chunk sent, no answer yet
        self.sent_at = 0.0
        self.snapshot: SnapshotMeta | None = None
        self.offset = 0
        self.room = True  # it said that its journal could take another entry

    def may_send(self) -> bool:
        """Whether another append with entries may leave now."""
        if self.state is SendState.REPLICATE:
            return len(self.sent) < MAX_INFLIGHT_MESSAGES and self.sent_bytes < MAX_INFLIGHT_BYTES
        return self.state is SendState.PROBE and not self.waiting

    def on_sent(self, last_index: int, size_bytes: int, now: float) -> None:
        self.next = last_index + 1
        self.sent.append((last_index, size_bytes))
        self.sent_bytes += size_bytes
        self.sent_at = now
        if self.state is SendState.PROBE:
            self.waiting = True

    def on_matched(self, match: int, round_number: int) -> None:
        self.acked_round = max(self.acked_round, round_number)
        self.waiting = False
        if match > self.match:
            self.match = match
        while self.sent and self.sent[0][0] <= self.match:
            self.sent_bytes -= self.sent.popleft()[1]
        if self.state is not SendState.SNAPSHOT:
            self.state = SendState.REPLICATE
            self.next = max(self.next, self.match + 1)

    def on_refused(self, ask_for: int, round_number: int, current_round: int) -> None:
        """R14: go back to what the follower asks for, never below match + 1; refusals that were under way already change nothing."""
        self.acked_round = max(self.acked_round, round_number)
        if self.state is SendState.SNAPSHOT or round_number < self.refusals_from:
            return
        self.probe_from(max(self.match + 1, min(ask_for, self.next)), current_round)

    def probe_lost(self) -> None:
        """No answer came: what was sent counts for nothing, and heartbeats at the same place ask from here on, until one is answered."""
        self.next = self.probe_at
        self.sent.clear()
        self.sent_bytes = 0

    def probe_from(self, index: int, current_round: int) -> None:
        self.state = SendState.PROBE
        self.next = self.probe_at = index
        self.sent.clear()
        self.sent_bytes = 0
        self.waiting = False
        self.snapshot = None
        self.refusals_from = current_round + 1

    def start_snapshot(self, meta: SnapshotMeta) -> None:
        self.state = SendState.SNAPSHOT
        self.snapshot = meta
        self.offset = 0
        self.waiting = False
        self.sent.clear()
        self.sent_bytes = 0
