"""The leader's side of replication: rounds, windows, probes, chunks (R14, R15). Decides what leaves; the engine says when.

The library's own send routine has no window and one index of memory per follower, so it is not used: it learns of acknowledgements,
which is what its commit rule needs, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raftmeta.log.guard import Rules, quorum_value
from raftmeta.log.journal import Journal
from raftmeta.log.messages import AppendEntries, AppendReply, Entry, SnapshotReply
from raftmeta.log.progress import Progress, SendState
from raftmeta.log.setup import Hooks, Timing

MAX_APPEND_BYTES = 1 << 20  # payload bytes of one append message
NEVER = float("inf")


class Leading(NamedTuple):
    """Where the leader stands in this pass."""

    term: int
    commit_index: int
    now: float


class Replication:
    def __init__(self, journal: Journal, hooks: Hooks, timing: Timing, rules: Rules) -> None:
        self._journal, self._hooks, self._timing, self._rules = journal, hooks, timing, rules
        self.followers: dict[str, Progress] = {}
        self.round = 0
        self.round_wanted = False  # a read waits for a round that everyone hears
        self.push_at = NEVER  # when followers are told a commit index that no append carried yet
        self._told_commit = 0

    def begin(self, peers: Iterable[str]) -> None:
        """A new term of this leader: nothing is known of anyone."""
        self.followers = {peer: Progress(self._journal.last_index + 1) for peer in sorted(peers)}

    def set_peers(self, peers: Iterable[str]) -> None:
        self.followers = {peer: self.followers.get(peer) or Progress(self._journal.last_index + 1) for peer in sorted(peers)}

    def confirmed_round(self, quorum: int) -> int:
        """The newest round that a majority answered, the leader included."""
        return quorum_value([self.round, *(progress.acked_round for progress in self.followers.values())], quorum)

    def reconnected(self, peer: str, restarted: bool) -> None:
        """What was under way on the old link may be lost; after a restart, what the peer held may be, too."""
        if restarted:
            self.followers[peer] = Progress(self._journal.last_index + 1)
        progress = self.followers[peer]
        progress.probe_from(progress.match + 1 if progress.match else progress.next, self.round)

    # ------------------------------------------------------------------ acknowledgements

    def on_reply(self, peer: str, progress: Progress, reply: AppendReply | SnapshotReply) -> None:
        if isinstance(reply, SnapshotReply):
            self._on_snapshot_reply(peer, progress, reply)
            return
        progress.room = reply.room
        if reply.matched:
            progress.on_matched(reply.next_index - 1, reply.round)
        else:
            progress.on_refused(reply.next_index, reply.round, self.round)

    def _on_snapshot_reply(self, peer: str, progress: Progress, reply: SnapshotReply) -> None:
        progress.acked_round = max(progress.acked_round, reply.round)
        if progress.state is not SendState.SNAPSHOT or progress.snapshot is None or progress.snapshot.index != reply.index:
            return
        progress.waiting = False
        if reply.installed:
            progress.probe_from(reply.index + 1, self.round)
            return
        progress.offset = min(max(reply.next_offset, 0), progress.snapshot.size_bytes)
        if progress.offset == 0:
            self._hooks.snapshot_refused(peer)

    def without_room(self) -> list[str]:
        """Followers that said that they can take no more entries (D4), by name."""
        return [peer for peer, progress in self.followers.items() if not progress.room]

    def successor(self) -> str | None:
        """A follower that holds everything and has room for more, the first by name (D4)."""
        last_index = self._journal.last_index
        return next((peer for peer, progress in self.followers.items() if progress.room and progress.match == last_index), None)

    # ------------------------------------------------------------------ one pass

    def send_round(self, leading: Leading, reachable: Iterable[str], everyone: bool) -> None:
        """To each reachable follower the entries it may get now; an empty append to the others when `everyone` must hear."""
        if self._told_commit < leading.commit_index and self.push_at == NEVER:
            self.push_at = leading.now + self._timing.heartbeat_s / 50
        everyone = everyone or self.round_wanted or leading.now >= self.push_at
        self.round += 1
        self.round_wanted = False
        for peer in reachable:
            progress = self.followers[peer]
            if not self._send_to(peer, progress, leading) and everyone:
                self._send_heartbeat(peer, progress, leading)
        if everyone:
            self._told_commit = leading.commit_index
            self.push_at = NEVER

    def _send_to(self, peer: str, progress: Progress, leading: Leading) -> bool:
        if progress.state is SendState.SNAPSHOT or progress.next < self._journal.first_index:
            return self._send_chunk(peer, progress, leading.now)
        sent = False
        last_index = self._journal.last_index
        while progress.next <= last_index and (progress.may_send() or not self._rules.window):
            found = self._journal.entries(progress.next, last_index + 1, MAX_APPEND_BYTES)
            entries = tuple([Entry(index, term, payload) for index, term, payload in found])
            self._send_append(peer, progress.next - 1, entries, leading)
            progress.on_sent(entries[-1].index, sum([len(entry.payload) for entry in entries]), leading.now)
            sent = True
        return sent

    def _send_heartbeat(self, peer: str, progress: Progress, leading: Leading) -> None:
        if progress.state is SendState.PROBE and leading.now - progress.sent_at > self._timing.heartbeat_s:
            progress.probe_lost()
        prev = progress.next - 1
        held = progress.state is not SendState.SNAPSHOT and progress.next >= self._journal.first_index
        self._send_append(peer, prev if held else 0, (), leading)  # every log agrees at 0: a mere sign of life

    def _send_chunk(self, peer: str, progress: Progress, now: float) -> bool:
        """One chunk at a time, each after the answer to the one before, or again when that answer does not come."""
        if progress.waiting and now - progress.sent_at <= self._timing.election_min_s:
            return False
        chunk = self._hooks.next_chunk(peer, progress)
        if chunk is None:
            return False
        progress.waiting, progress.sent_at = True, now
        self._hooks.send(peer, chunk)
        return True

    def _send_append(self, peer: str, prev_index: int, entries: tuple[Entry, ...], leading: Leading) -> None:
        prev_term = self._journal.term_at(prev_index) if prev_index >= self._journal.first_index - 1 else 0
        assert prev_term is not None, prev_index
        self._hooks.send(peer, AppendEntries(leading.term, prev_index, prev_term, leading.commit_index, self.round, entries))
