"""What must hold after every step, whatever happened. Looks only at what changed."""

from __future__ import annotations

import hashlib

from raftmeta.core.state import State
from raftmeta.log.journal import Journal
from raftmeta.log.messages import AnyMessage, AppendEntries, AppendReply, SnapshotReply
from raftmeta.log.progress import MAX_INFLIGHT_MESSAGES
from raftmeta.log.replica import Replica
from raftmeta.log.setup import LEADER


class Violation(AssertionError):
    """An invariant does not hold."""


class Invariants:
    def __init__(self) -> None:
        self.leaders: dict[int, str] = {}  # term -> leader
        self.committed: dict[int, tuple[int, bytes, bytes]] = {}  # index -> (term, digest of the payload, state hash after)
        self._known_in: dict[int, int] = {}  # index -> term of the member that applied it first: not below the term that committed it
        self.last_committed = 0
        self.by_revision: dict[int, bytes] = {}
        self._terms: dict[str, int] = {}
        self._commits: dict[str, int] = {}
        self._under_way: dict[
            tuple[str, str], tuple[int, set[int]]
        ] = {}  # (leader, follower) -> term, where appends began that await an answer
        self._asked_for: dict[tuple[str, int], int] = {}  # (member, incarnation) -> from where it wants entries
        self.leader_changes = 0

    def applied(self, member: str, position: tuple[int, int, int], payload: bytes, state: State | None) -> None:
        """State machine safety: one entry per index, and the same state after it everywhere.

        `position` is index and term of the entry and the member's own term; `state` is None when it was changed behind the member's back.
        """
        index, term, own_term = position
        self._known_in.setdefault(index, own_term)
        known = self.committed.get(index)
        seen = (term, hashlib.sha256(payload).digest(), state.state_hash if state else known[2] if known else b"")
        if known is None or not known[2]:
            known = self.committed[index] = seen
        if known != seen:
            what = "state" if known[:2] == seen[:2] else "entry"
            raise Violation(f"{member} applied another {what} at index {index}: term {term}, known term {known[0]}")
        if index > self.last_committed + 1:
            raise Violation(f"{member} applied index {index}, but nobody applied {self.last_committed + 1} before")
        self.last_committed = max(self.last_committed, index)
        if state is not None:
            self._same_hash(member, state)

    def installed(self, member: str, state: State) -> None:
        self._same_hash(member, state)

    def _same_hash(self, member: str, state: State) -> None:
        known = self.by_revision.setdefault(state.revision, state.state_hash)
        if known != state.state_hash:
            raise Violation(f"{member} has another state hash at revision {state.revision}")

    def role(self, member: str, role: int, term: int, journal: Journal) -> None:
        """Election safety, and leader completeness for what was committed in earlier terms."""
        if role != LEADER:
            return
        self.leader_changes += 1
        if self.leaders.setdefault(term, member) != member:
            raise Violation(f"{member} and {self.leaders[term]} both lead in term {term}")
        for index in range(journal.first_index, self.last_committed + 1):
            held = journal.term_at(index)
            if self._known_in[index] >= term:
                continue  # a late vote may still make a leader of a term that is over
            if held != self.committed[index][0]:
                raise Violation(f"{member} leads in term {term} without the committed entry {index} (has term {held})")

    def stepped(self, member: str, replica: Replica) -> None:
        """Terms and commit indexes only rise."""
        engine = replica.engine
        if engine.term < self._terms.get(member, 0):
            raise Violation(f"{member} went back from term {self._terms[member]} to {engine.term}")
        self._terms[member] = engine.term
        if engine.commit_index < self._commits.get(member, 0):
            raise Violation(f"{member} went back from commit {self._commits[member]} to {engine.commit_index}")
        self._commits[member] = engine.commit_index

    def sent(self, member: str, incarnation: int, peer: str, message: AnyMessage) -> None:
        """A member that refuses asks for what follows its commit index, so while it runs it never asks for something earlier (R14).

        And who does not answer is not sent more than a window holds (R15).
        """
        if isinstance(message, AppendEntries) and message.entries:
            term, under_way = self._under_way.get((member, peer), (0, set()))
            if term != message.term:
                term, under_way = self._under_way[member, peer] = message.term, set()
            under_way.add(message.entries[0].index)  # a probe that is sent again begins where it did
            if len(under_way) > MAX_INFLIGHT_MESSAGES:
                raise Violation(f"{member} sent {peer} more than {MAX_INFLIGHT_MESSAGES} appends without an answer")
        elif isinstance(message, AppendReply) and not message.matched:
            before = self._asked_for.setdefault((member, incarnation), message.next_index)
            if message.next_index < before:
                raise Violation(f"{member} asks for entries from {message.next_index} on, and had asked for those from {before} on before")
            self._asked_for[member, incarnation] = message.next_index

    def heard(self, member: str, peer: str, message: AnyMessage) -> None:
        if isinstance(message, AppendReply | SnapshotReply):
            self._under_way.pop((member, peer), None)

    def linked(self, member: str, peer: str) -> None:
        """On a new link what was under way on the old one is sent again."""
        self._under_way.pop((member, peer), None)

    def disk_replaced(self, member: str) -> None:
        """It cannot know in which term it was, and may promise nothing until the others told it."""
        self._terms.pop(member, None)
        self._commits.pop(member, None)

    def booted(self, member: str, replica: Replica, journal: Journal) -> None:
        """A restart may forget how far the log is committed, never a term it acted in, nor an entry that made a majority."""
        self._commits[member] = replica.engine.commit_index
        if journal.term < self._terms.get(member, 0):
            raise Violation(f"{member} restarted in term {journal.term}, it had acted in {self._terms[member]}")
