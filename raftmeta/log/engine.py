"""One member's part in the log: judges what arrives, says what leaves, and tells its replica what is committed.

Around the library's algorithm (wall.py) stand our rules: what is received is judged first (guard.py) and reaches the library only in a
shape that it handles safely. Elections are in leadership.py, what a leader sends in replication.py; here they meet, with appends, replies
and membership. The engine knows no clock but its port, no network, no state machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from raftmeta.durable import DiskFull
from raftmeta.log import configuration as cfg
from raftmeta.log.configuration import Configuration
from raftmeta.log.guard import LogBounds, Verdict, is_chunk, is_plausible, plan_append, well_formed
from raftmeta.log.journal import Journal
from raftmeta.log.leadership import Elections, Handover
from raftmeta.log.messages import (
    AnyMessage,
    AppendEntries,
    AppendReply,
    Entry,
    OfTerm,
    PreVote,
    PreVoteReply,
    RequestVote,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
)
from raftmeta.log.payloads import payload_fault
from raftmeta.log.replication import Leading, Replication
from raftmeta.log.setup import FOLLOWER, LEADER, OP_NOOP, Halted, Hooks, Setup
from raftmeta.log.wall import Wall

TICK_SLACK_S = 1e-6  # the library compares with "later than", so a tick exactly at its deadline would do nothing


class Engine(Wall):
    def __init__(self, setup: Setup, journal: Journal, hooks: Hooks) -> None:
        self.replication = Replication(journal, hooks, setup.timing, setup.rules)
        self._elections = Elections(self, journal, hooks, setup)
        self._handover = Handover(self.replication, hooks, setup)
        self._incarnations: dict[str, int] = {}
        self._ticked_at = float("-inf")
        self._noop_index = 0
        self.violations = 0  # messages that no member of this cluster sends; they change nothing
        self._bootstrap = setup.bootstrap
        self.joining = setup.joining and setup.rules.wiped_waits
        self.standing_by = False  # a majority has another state than this member: its log is as good as any, its state serves nobody
        self._caught_up_at: int | None = None  # a leader's commit index of its own term, matched here
        super().__init__(setup, journal, hooks)
        self._announced = self.configuration

    # ------------------------------------------------------------------ what the replica sees

    @property
    def last_index(self) -> int:
        return self._journal.last_index

    def configuration_at(self, index: int) -> Configuration:
        return self._memberships.at(index)

    @property
    def match_indexes(self) -> dict[str, int]:
        return {peer: progress.match for peer, progress in self.replication.followers.items()} if self.role == LEADER else {}

    @property
    def may_serve_reads(self) -> bool:
        """C1: only after an entry of the current term is applied."""
        return self.role == LEADER and (self.applied_index >= self._noop_index or not self._rules.read_after_noop)

    @property
    def confirmed_round(self) -> int:
        """The newest round that a majority answered, this member included; 0 while it does not lead."""
        if self.role != LEADER:
            return 0
        return self.replication.confirmed_round(self.configuration.quorum)

    def has_caught_up(self) -> bool:
        """Whether a member that started with nothing may vote now (hard_state.py)."""
        everything_here = self._caught_up_at is not None and self.applied_index >= self._caught_up_at
        return self.joining and (everything_here or self._elections.may_found())

    @property
    def founders_unheard(self) -> tuple[str, ...]:
        """Whom a first start still waits for. From any thread."""
        return self._elections.unheard() if self.joining and self._journal.last_index == 0 else ()

    # ------------------------------------------------------------------ what the replica does

    def next_deadline(self) -> float:
        """Monotonic time at which a tick is due although nothing arrives."""
        if self.role == LEADER:
            due = min(self._round_due, self.replication.push_at)
            return self._ports.clock() if self._work_left() else due + TICK_SLACK_S
        if self.applied_index < self.commit_index:
            return self._ports.clock()
        if not self._elections.is_eligible():
            return float("inf")
        return max(self.election_due, self._elections.pre_vote.next_due()) + TICK_SLACK_S

    def _work_left(self) -> bool:
        behind = self.applied_index < self.commit_index
        alone = self.configuration.quorum == 1 and self.commit_index < self._journal.synced_index
        return behind or alone or self.replication.round_wanted

    def begin_step(self) -> None:
        """R9: a leader that slept through an election timeout steps down before it reads what arrived meanwhile."""
        now = self._ports.clock()
        late = now - self._ticked_at > self._timing.election_min_s
        if self.role == LEADER and late and self._rules.check_quorum and self.configuration.quorum > 1:
            self._step_down()
        self._ticked_at = now

    def connected(self, peer: str, incarnation: int) -> None:
        """A link is up. Another incarnation of the peer may have lost what the earlier one acknowledged: nothing is known of it."""
        self._link_opened(peer)
        restarted = self._incarnations.get(peer, incarnation) != incarnation
        self._incarnations[peer] = incarnation
        self._elections.link_opened(peer, restarted)
        if self.role == LEADER and peer in self.replication.followers:
            if restarted:
                self._forget_match(peer)
            self.replication.reconnected(peer, restarted)

    def disconnected(self, peer: str) -> None:
        self._link_closed(peer)
        self._elections.link_closed(peer)

    def change_configuration(self, new: Configuration) -> str | None:
        """R4: append a membership entry; a reason when it may not be now."""
        if self.role != LEADER:
            return "this member does not lead"
        if self._rules.one_change_at_a_time:
            if self.commit_index < self._noop_index or self.commit_index < self._memberships.current_index:
                return "an earlier change is not committed yet"
            if not cfg.differs_by_one(self.configuration, new):
                return "one member at a time"
        self._append(self._memberships.payload(new))
        self._refresh_configuration()
        return None

    def transfer(self, target: str) -> bool:
        """Ask `target` to stand as soon as it holds everything (R17)."""
        return self.role == LEADER and self._handover.begin(target, self.last_index)

    def stand_by(self) -> None:
        """Lead no more, nor stand, until `standing_by` is taken back."""
        self.standing_by = True
        if self.role != FOLLOWER:
            self._step_down()

    def installed(self, index: int, term: int, configuration: Configuration) -> None:
        """A verified snapshot replaced the state; the log goes on after it (R3: commit moves only here and on a matched append)."""
        if index <= self.applied_index:
            raise Halted(f"snapshot {index} is not newer than the applied entry {self.applied_index}")
        if index <= self.commit_index and self._journal.term_at(index) not in (None, term):
            raise Halted(f"entry {index} is committed here in term {self._journal.term_at(index)}, the leader's snapshot has term {term}")
        if self._journal.term_at(index) == term:
            self._journal.compact_through(index)
        else:
            self._journal.reset(index, term)
        self._moved_to(index)
        self._memberships.replaced(index, configuration, self.last_index)
        self._refresh_configuration()

    # ------------------------------------------------------------------ inbox

    def receive(self, peer: str, message: AnyMessage) -> None:
        """One message of an authenticated peer. Raises Halted."""
        if not isinstance(message, OfTerm) or (self._rules.bound_terms and not is_plausible(message.term, self.term, self.joining)):
            self.violations += 1
            return
        match message:
            case AppendEntries():
                self._on_append(peer, message)
            case AppendReply() | SnapshotReply():
                self._on_reply(peer, message)
            case RequestVote():
                self._elections.on_request_vote(peer, message)
            case VoteReply():
                if self._current(message.term) and message.granted:
                    self._elections.on_vote_granted(peer, message.term)
            case PreVote():
                self._elections.on_pre_vote(peer, message)
            case PreVoteReply():
                if message.empty:
                    self._elections.on_empty(peer)
                if self._current(message.term, at_least=True) and message.granted:
                    self._elections.on_pre_vote_granted(peer, message.asked_term)
            case SnapshotChunk():
                self._on_chunk(peer, message)
            case TimeoutNow():
                self._elections.on_timeout_now(peer, message)
        self._refresh_configuration()

    def _current(self, term: int, at_least: bool = False) -> bool:
        """R2, R16: of a reply; a higher term is adopted, a lower one is dropped."""
        if term > self.term:
            self._adopt(term)
            return False
        return term == self.term or not self._rules.drop_stale_terms or (at_least and term <= self.term)

    def _adopt(self, term: int) -> None:
        led = self.role == LEADER
        self._enter_term(term)
        if led and self._rules.answer_stale:  # R16: lead on in a higher term, so that the member that is ahead can follow
            self._stand_at_once()

    def _on_append(self, peer: str, message: AppendEntries) -> None:
        if message.term < self.term:
            if self._rules.answer_stale:
                self._hooks.send(peer, AppendReply(self.term, False, self.commit_index + 1, message.round))
            return
        if not well_formed(message) or self._leads_in(message.term):
            self.violations += 1
            return
        bounds = LogBounds(self._log.base_index, self.last_index, self.commit_index)
        plan = plan_append(message, bounds, self._journal.term_at, self._rules)
        if plan.verdict is Verdict.HALT:
            raise Halted(plan.detail)
        if plan.verdict is Verdict.REFUSE:
            self._follow(peer, message.term)
            self._hooks.send(peer, AppendReply(self.term, False, plan.matched_index + 1, message.round))
            return
        fault = self._fault_in(plan.entries)
        if fault:
            self._refuse(peer, fault)
            return
        entries = self._that_fit(plan.entries)
        matched = plan.matched_index if len(entries) == len(plan.entries) else plan.prev_index + len(entries)
        self._ack = (matched, message.round)
        commit = min(message.commit_index, matched) if self._rules.match_before_commit else message.commit_index
        self._elections.heard()
        safe = {
            "type": "append_entries",
            "term": message.term,
            "commit_index": commit,
            "entries": [(entry.payload, entry.index, entry.term) for entry in entries],
            "prevLogIdx": plan.prev_index,
            "prevLogTerm": plan.prev_term,
        }
        if self.joining and message.commit_index <= matched and self._term_there(message.commit_index, entries) == message.term:
            self._caught_up_at = message.commit_index
        with contextlib.suppress(DiskFull):  # no room even to cut: nothing changed, nothing is acknowledged
            self.give(peer, safe)

    def _leads_in(self, term: int) -> bool:
        """Whoever else says that it leads in that term is wrong, and is not followed."""
        return self.role == LEADER and term == self.term

    def _fault_in(self, entries: Sequence[Entry]) -> str:
        if not self._rules.read_before_append:
            return ""
        return next((f"entry {entry.index}: {fault}" for entry in entries if (fault := payload_fault(entry.payload))), "")

    def _refuse(self, peer: str, detail: str) -> None:
        self.violations += 1
        self._hooks.refused(peer, detail)

    def _term_there(self, index: int, entries: list[Entry]) -> int | None:
        """Term of the entry at `index`, once these entries are appended."""
        return next((entry.term for entry in entries if entry.index == index), None) or self._journal.term_at(index)

    def _that_fit(self, entries: Sequence[Entry]) -> list[Entry]:
        """D4: the leading entries that there is room for; the rest is asked for again. A leader's first entry may use the reserve."""
        fitting: list[Entry] = []
        size = 0
        for entry in entries:
            size += len(entry.payload) + 64
            fits = self._journal.has_reserve if entry.payload[0] == OP_NOOP else self._journal.has_room
            if not fits(size):
                self._hooks.without_room(size)
                break
            fitting.append(entry)
        return fitting

    def _follow(self, peer: str, term: int) -> None:
        """The library's handling of a heartbeat that moves nothing."""
        self._elections.heard()
        self.give(peer, {"type": "append_entries", "term": term, "commit_index": self.commit_index})

    def _on_reply(self, peer: str, reply: AppendReply | SnapshotReply) -> None:
        progress = self.replication.followers.get(peer)
        if not self._current(reply.term) or self.role != LEADER or progress is None:
            return
        if reply.round > self.replication.round:  # it would confirm reads that are still to come
            self.violations += 1
            return
        matched, next_index = isinstance(reply, AppendReply) and reply.matched, 1
        if isinstance(reply, AppendReply):
            next_index = reply.next_index
            if not 1 <= next_index <= self.last_index + 1:
                self.violations += 1
                return
        self.give(peer, {"type": "next_node_idx", "reset": False, "next_node_idx": next_index, "success": matched})
        self.replication.on_reply(peer, progress, reply)

    def _on_chunk(self, peer: str, chunk: SnapshotChunk) -> None:
        if chunk.term < self.term:
            if self._rules.answer_stale:
                self._hooks.send(peer, AppendReply(self.term, False, self.commit_index + 1, chunk.round))
            return
        if not is_chunk(chunk) or self._leads_in(chunk.term):
            self.violations += 1
            return
        self._follow(peer, chunk.term)
        reply = self._hooks.on_chunk(peer, chunk)
        if reply is not None:
            self._hooks.send(peer, reply)

    # ------------------------------------------------------------------ what the library asks

    def _may_stand(self, by_transfer: bool) -> bool:
        return self._elections.may_stand(by_transfer)

    def _become_leader(self) -> None:
        self.replication.begin(self.configuration.peers_of(self._id))
        self._noop_index = self.last_index + 1
        self._elections.pre_vote.reset()
        super()._become_leader()
        if self._bootstrap:
            self._append(self._memberships.payload(self.configuration))
            self._bootstrap = False

    def _role_changed(self, role: int) -> None:
        self._handover.end()
        self._hooks.on_role(role)

    def _lead(self) -> None:
        held = self._ports.clock() < self._handover.hold_until
        while not held and self.last_index - self.commit_index < self._timing.max_uncommitted:
            payload = self._hooks.next_payload()
            if payload is None:
                break
            self._append(payload)
        if self._handover.successor:
            self._handover.step(self.term, self.last_index, self.applied_index)
        self._send_round(everyone=False)

    def _send_round(self, everyone: bool) -> None:
        reachable = [peer for peer in self.replication.followers if self._node(peer) in self._linked]
        self.replication.send_round(Leading(self.term, self.commit_index, self._ports.clock()), reachable, everyone)

    # ------------------------------------------------------------------ its own log

    def _append(self, payload: bytes) -> int:
        index = self.last_index + 1
        self._log.add(payload, index, self.term)
        return index

    def _refresh_configuration(self) -> None:
        """R13, R18: tell the library when the configuration in force is another one than before."""
        if self.configuration is self._announced:
            return
        self._announced = self.configuration
        peers = self.configuration.peers_of(self._id)
        self._set_peers(peers)
        if self.role == LEADER:
            self.replication.set_peers(peers)
        self._hooks.on_configuration(self.configuration)
