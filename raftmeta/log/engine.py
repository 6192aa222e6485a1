"""PySyncObj behind a wall: the only file that imports it.

The library keeps what it does well: counting votes, the commit rule, changing terms, appending. Around it stand our rules (guard.py): what
is received is judged first and reaches the library only in a shape that it handles safely; what it wants to send goes through `Hooks` and
leaves after the journal's sync. Methods named `_SyncObj__x` replace the library's private ones, since its calls go through `self`.
docs/adr/engine-behind-a-wall.md lists every method of the library: inherited, wrapped, replaced, and why. The engine knows no clock but its
port, no network, no state machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pysyncobj.syncobj
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node

from raftmeta.durable import DiskFull
from raftmeta.log import configuration as cfg
from raftmeta.log.configuration import Configuration
from raftmeta.log.election import PreVoteRound, Voters, is_sticky
from raftmeta.log.guard import LogBounds, Verdict, plan_append, up_to_date, well_formed
from raftmeta.log.journal import Journal
from raftmeta.log.logview import LightEntry, LogView
from raftmeta.log.memberships import Memberships
from raftmeta.log.messages import (
    AnyMessage,
    AppendEntries,
    AppendReply,
    Entry,
    PreVote,
    PreVoteReply,
    RequestVote,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
)
from raftmeta.log.replication import Leading, Replication
from raftmeta.log.setup import Halted, Hooks, Setup

FOLLOWER, CANDIDATE, LEADER = 0, 1, 2  # the library's numbers
ROLE_NAMES = ("follower", "candidate", "leader")
MAX_APPLY_BYTES = 4 << 20  # payload bytes applied in one tick
LEADER_ROOM_BYTES = 4096  # a leader must be able to write its first entry
TICK_SLACK_S = 1e-6  # the library compares with "later than", so a tick exactly at its deadline would do nothing


class Peer(Node):  # type: ignore[misc]
    """R20: hashes the same in every process, so that sets of peers are walked in the same order everywhere."""

    def __init__(self, member_id: str) -> None:
        super().__init__(member_id)
        self._hash = int.from_bytes(member_id.encode()[-7:], "big")

    def __hash__(self) -> int:
        return self._hash


class Engine(SyncObj):  # type: ignore[misc]
    def __init__(self, setup: Setup, journal: Journal, hooks: Hooks) -> None:
        self._id, self._timing, self._ports, self._rules = setup.member_id, setup.timing, setup.ports, setup.rules
        self._journal, self._hooks = journal, hooks
        self._memberships = Memberships(setup.configurations)
        self._announced = self.configuration
        self._log = LogView(journal, self._memberships.appended, self._memberships.deleted_from)
        self.replication = Replication(journal, hooks, setup.timing, setup.rules)
        self._nodes: dict[str, Peer] = {}
        self._incarnations: dict[str, int] = {}
        self._pre_vote, self._voters = PreVoteRound(self._timing.heartbeat_s), Voters()
        self._counting = False
        self._heard_at = self._ticked_at = float("-inf")
        self._before_loss: tuple[float, float] | None = None  # when the leader was heard and the election was due, before its link closed
        self._noop_index = 0
        self._ack: tuple[int, int] = (0, 0)
        self._standing_by_transfer = False
        self._hold_until = float("-inf")  # new proposals wait while leadership moves (R17)
        self._successor = ""  # whom to ask to stand once it holds everything
        self.violations = 0  # messages of peers that contradict themselves
        self._bootstrap = setup.bootstrap
        self.joining = setup.joining and self._rules.wiped_waits
        self._caught_up_at: int | None = None  # a leader's commit index of its own term, matched here
        conf = SyncObjConf(
            autoTick=False,
            appendEntriesPeriod=self._timing.heartbeat_s,
            raftMinTimeout=self._timing.election_min_s,
            raftMaxTimeout=self._timing.election_max_s,
            leaderFallbackTimeout=self._timing.election_min_s if self._rules.check_quorum else 30.0,
            connectionTimeout=self._timing.election_max_s * 2,
        )
        peers = [self._node(peer) for peer in self.configuration.peers_of(self._id)]
        super().__init__(self._node(self._id), peers, conf=conf, transport=_Adapter(self), nodeClass=Peer)
        self._poller = _NullPoller()
        self._SyncObj__raftLastApplied = self._SyncObj__raftCommitIndex = setup.applied_index
        if self.configuration.ids == (self._id,):
            self._SyncObj__raftElectionDeadline = self._ports.clock()  # nobody else could lead: a single member is ready at once

    # ------------------------------------------------------------------ what the replica sees

    @property
    def role(self) -> int:
        return int(self._SyncObj__raftState)

    @property
    def term(self) -> int:
        return int(self._SyncObj__raftCurrentTerm)

    @property
    def leader_id(self) -> str:
        leader = self._SyncObj__raftLeader
        return "" if leader is None else str(leader.id)

    @property
    def commit_index(self) -> int:
        return int(self._SyncObj__raftCommitIndex)

    @property
    def applied_index(self) -> int:
        return int(self._SyncObj__raftLastApplied)

    @property
    def last_index(self) -> int:
        return self._journal.last_index

    @property
    def configuration(self) -> Configuration:
        return self._memberships.current

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

    def next_deadline(self) -> float:
        """Monotonic time at which a tick is due although nothing arrives."""
        if self.role == LEADER:
            due = min(float(self._SyncObj__newAppendEntriesTime), self.replication.push_at)
            return self._ports.clock() if self._work_left() else due + TICK_SLACK_S
        if self.applied_index < self.commit_index:
            return self._ports.clock()
        if self._id not in self.configuration.ids:
            return float("inf")
        return max(float(self._SyncObj__raftElectionDeadline), self._pre_vote.next_due()) + TICK_SLACK_S

    def begin_step(self) -> None:
        """R9: a leader that slept through an election timeout steps down before it reads what arrived meanwhile."""
        now = self._ports.clock()
        late = now - self._ticked_at > self._timing.election_min_s
        if self.role == LEADER and late and self._rules.check_quorum and self.configuration.quorum > 1:
            self._step_down()
        self._ticked_at = now

    def tick(self) -> None:
        """One tick of the library: elections, the commit rule, applying, sending. Raises Halted."""
        self._counting = self.role == LEADER and self._rules.count_self_synced
        self.doTick(0.0)
        self._counting = False

    def connected(self, peer: str, incarnation: int) -> None:
        """A link is up. Another incarnation of the peer may have lost what the earlier one acknowledged: nothing is known of it."""
        self._SyncObj__onNodeConnected(self._node(peer))
        restarted = self._incarnations.get(peer, incarnation) != incarnation
        self._incarnations[peer] = incarnation
        if self._before_loss is not None and peer == self.leader_id and not restarted:
            self._heard_at, self._SyncObj__raftElectionDeadline = self._before_loss
            self._before_loss = None
        if self.role == LEADER and peer in self.replication.followers:
            if restarted:
                self._SyncObj__raftMatchIndex[self._node(peer)] = 0
            self.replication.reconnected(peer, restarted)

    def disconnected(self, peer: str) -> None:
        self._SyncObj__onNodeDisconnected(self._node(peer))
        if self._rules.closed_link_counts and self.role == FOLLOWER and peer == self.leader_id and self._id in self.configuration.ids:
            self._lose_leader(peer)

    def _lose_leader(self, leader: str) -> None:
        """R8: who lost the link to its leader hears it no more; unless it is back within a heartbeat, ask who else lost it.

        The members ask half a heartbeat apart, by name: two that lose the same leader at once do not split the votes.
        """
        due = self._SyncObj__raftElectionDeadline
        place = [peer for peer in self.configuration.ids if peer != leader].index(self._id)
        self._before_loss = self._heard_at, due
        self._heard_at = float("-inf")
        self._pre_vote.reset()  # what was granted before says nothing of now
        self._SyncObj__raftElectionDeadline = min(due, self._ports.clock() + self._timing.heartbeat_s * (1 + place / 2))

    def has_caught_up(self) -> bool:
        """Whether a member that started with nothing holds again what it may have acknowledged before (joining.py)."""
        return self.joining and self._caught_up_at is not None and self.applied_index >= self._caught_up_at

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
        """Ask `target` to stand as soon as it holds everything. New proposals wait for at most one election timeout (R17)."""
        progress = self.replication.followers.get(target)
        if self.role != LEADER or progress is None or (progress.match != self.last_index and not self._rules.wait_for_successor):
            return False
        self._hold_until = self._ports.clock() + self._timing.election_min_s
        self._successor = target
        return True

    def _hand_over(self) -> None:
        """Everything is committed and applied here first, so that no caller is left in doubt."""
        progress = self.replication.followers.get(self._successor)
        if progress is None or self._ports.clock() >= self._hold_until:
            self._successor = ""
        elif progress.match == self.last_index == self.applied_index:
            self._hooks.send(self._successor, TimeoutNow(self.term))
            self._successor = ""

    def step_down(self) -> None:
        """Lead no more; somebody else will."""
        if self.role == LEADER:
            self._step_down()

    def installed(self, index: int, term: int, configuration: Configuration) -> None:
        """A verified snapshot replaced the state; the log goes on after it (R3: commit moves only here and on a matched append)."""
        if index <= self.applied_index:
            raise Halted(f"snapshot {index} is not newer than the applied entry {self.applied_index}")
        if self._journal.term_at(index) == term:
            self._journal.compact_through(index)
        else:
            self._journal.reset(index, term)
        self._SyncObj__raftLastApplied = index
        self._SyncObj__raftCommitIndex = max(index, min(self.commit_index, self.last_index))
        self._memberships.replaced(index, configuration, self.last_index)
        self._refresh_configuration()

    # ------------------------------------------------------------------ inbox

    def receive(self, peer: str, message: AnyMessage) -> None:
        """One message of an authenticated peer. Raises Halted."""
        match message:
            case AppendEntries():
                self._on_append(peer, message)
            case AppendReply() | SnapshotReply():
                self._on_reply(peer, message)
            case RequestVote():
                self._on_request_vote(peer, message)
            case VoteReply():
                if self._current(message.term) and message.granted and self.role == CANDIDATE:
                    members = frozenset(self.configuration.ids)
                    if not self._rules.voters_once or self._voters.first_vote(self.term, peer, members):
                        self._library(peer, {"type": "response_vote", "term": message.term})
            case PreVote():
                self._on_pre_vote(peer, message)
            case PreVoteReply():
                if self._current(message.term, at_least=True) and message.granted:
                    self._pre_vote.grant(peer, message.asked_term, self._ports.clock())
            case SnapshotChunk():
                self._on_chunk(peer, message)
            case TimeoutNow():
                if message.term == self.term and peer == self.leader_id and self._id in self.configuration.ids:
                    self._library(peer, {"type": "timeout_now", "term": message.term})
            case _:
                self.violations += 1
        self._refresh_configuration()

    def _current(self, term: int, at_least: bool = False) -> bool:
        """R2, R16: of a reply; a higher term is adopted, a lower one is dropped."""
        if term > self.term:
            self._adopt(term)
            return False
        return term == self.term or not self._rules.drop_stale_terms or (at_least and term <= self.term)

    def _adopt(self, term: int) -> None:
        led = self.role == LEADER
        self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(FOLLOWER)
        self._SyncObj__raftLeader = None
        if led and self._rules.answer_stale:  # R16: lead on in a higher term, so that the member that is ahead can follow
            self._SyncObj__raftElectionDeadline = 0.0
            self._SyncObj__transferInProgress = True

    def _on_append(self, peer: str, message: AppendEntries) -> None:
        if message.term < self.term:
            if self._rules.answer_stale:
                self._hooks.send(peer, AppendReply(self.term, False, self.commit_index + 1, message.round))
            return
        if not well_formed(message):
            self.violations += 1
            return
        if self.role == LEADER and message.term == self.term:
            raise Halted(f"{peer} leads in term {message.term}, and so does this member")
        bounds = LogBounds(self._log.base_index, self.last_index, self.commit_index)
        plan = plan_append(message, bounds, self._journal.term_at, self._rules)
        if plan.verdict is Verdict.HALT:
            raise Halted(plan.detail)
        if plan.verdict is Verdict.REFUSE:
            self._follow(peer, message.term)
            self._hooks.send(peer, AppendReply(self.term, False, plan.matched_index + 1, message.round))
            return
        entries = self._that_fit(plan.entries)
        matched = plan.matched_index if len(entries) == len(plan.entries) else plan.prev_index + len(entries)
        self._ack = (matched, message.round)
        commit = min(message.commit_index, matched) if self._rules.match_before_commit else message.commit_index
        self._hear()
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
            self._library(peer, safe)

    def _term_there(self, index: int, entries: list[Entry]) -> int | None:
        """Term of the entry at `index`, once these entries are appended."""
        return next((entry.term for entry in entries if entry.index == index), None) or self._journal.term_at(index)

    def _that_fit(self, entries: Any) -> list[Entry]:
        """D4: the leading entries that the journal has room for; the rest is asked for again."""
        fitting: list[Entry] = []
        size = 0
        for entry in entries:
            size += len(entry.payload) + 64
            if not self._journal.has_room(size):
                break
            fitting.append(entry)
        return fitting

    def _follow(self, peer: str, term: int) -> None:
        """The library's handling of a heartbeat that moves nothing."""
        self._hear()
        self._library(peer, {"type": "append_entries", "term": term, "commit_index": self.commit_index})

    def _hear(self) -> None:
        self._heard_at, self._before_loss = self._ports.clock(), None

    def _on_reply(self, peer: str, reply: AppendReply | SnapshotReply) -> None:
        progress = self.replication.followers.get(peer)
        if not self._current(reply.term) or self.role != LEADER or progress is None:
            return
        matched, next_index = isinstance(reply, AppendReply) and reply.matched, 1
        if isinstance(reply, AppendReply):
            next_index = reply.next_index
            if not 1 <= next_index <= self.last_index + 1:
                self.violations += 1
                return
        self._library(peer, {"type": "next_node_idx", "reset": False, "next_node_idx": next_index, "success": matched})
        self.replication.on_reply(progress, reply)

    def _on_chunk(self, peer: str, chunk: SnapshotChunk) -> None:
        if chunk.term < self.term:
            if self._rules.answer_stale:
                self._hooks.send(peer, AppendReply(self.term, False, self.commit_index + 1, chunk.round))
            return
        if self.role == LEADER and chunk.term == self.term:
            raise Halted(f"{peer} leads in term {chunk.term}, and so does this member")
        self._follow(peer, chunk.term)
        reply = self._hooks.on_chunk(peer, chunk)
        if reply is not None:
            self._hooks.send(peer, reply)

    def _on_request_vote(self, peer: str, message: RequestVote) -> None:
        if message.term < self.term:
            if self._rules.answer_stale:
                self._hooks.send(peer, VoteReply(self.term, False))
            return
        now = self._ports.clock()
        if self.joining:
            self._hooks.send(peer, VoteReply(self.term, False))
            return
        if self._rules.pre_vote and not message.transfer and peer != self.leader_id and self._is_sticky(now):
            self._hooks.send(peer, VoteReply(self.term, False))
            return
        self._library(
            peer,
            {"type": "request_vote", "term": message.term, "last_log_index": message.last_index, "last_log_term": message.last_term},
        )

    def _is_sticky(self, now: float) -> bool:
        return self.role == LEADER or is_sticky(self._heard_at, now, self._timing.election_min_s)

    def _on_pre_vote(self, peer: str, message: PreVote) -> None:
        newer = up_to_date(message.last_term, message.last_index, self._journal.last_term, self.last_index)
        free = peer == self.leader_id or not self._is_sticky(self._ports.clock())
        granted = newer and free and message.term >= self.term and not self.joining
        self._hooks.send(peer, PreVoteReply(self.term, message.term, granted))

    # ------------------------------------------------------------------ sending

    def _replicate(self, everyone: bool) -> None:
        connected = self._SyncObj__connectedNodes
        reachable = [peer for peer in self.replication.followers if self._node(peer) in connected]
        self.replication.send_round(Leading(self.term, self.commit_index, self._ports.clock()), reachable, everyone)

    def _append(self, payload: bytes) -> int:
        index = self.last_index + 1
        self._log.add(payload, index, self.term)
        return index

    def _work_left(self) -> bool:
        behind = self.applied_index < self.commit_index
        alone = self.configuration.quorum == 1 and self.commit_index < self._journal.synced_index
        return behind or alone or self.replication.round_wanted

    def _refresh_configuration(self) -> None:
        """R13, R18: tell the library when the configuration in force is another one than before."""
        if self.configuration is self._announced:
            return
        self._announced = self.configuration
        peers = self.configuration.peers_of(self._id)
        self._SyncObj__updateClusterConfiguration([self._node(peer) for peer in peers])
        if self.role == LEADER:
            now = self._ports.clock()
            for peer in peers:
                self._SyncObj__lastResponseTime.setdefault(self._node(peer), now)
                self._SyncObj__raftMatchIndex.setdefault(self._node(peer), 0)
            self.replication.set_peers(peers)
        self._hooks.on_configuration(self.configuration)

    # ------------------------------------------------------------------ the library's seams

    def _node(self, peer: str) -> Peer:
        node = self._nodes.get(peer)
        if node is None:
            node = self._nodes[peer] = Peer(peer)
        return node

    def _library(self, peer: str, message: dict[str, Any]) -> None:
        SyncObj._SyncObj__onMessageReceived(self, self._node(peer), message)

    def _step_down(self) -> None:
        self._SyncObj__setState(FOLLOWER)
        self._SyncObj__raftLeader = None
        self._SyncObj__raftElectionDeadline = self._ports.clock() + self._SyncObj__generateRaftTimeout()

    @property
    def _SyncObj__raftLog(self) -> LogView:
        return self._log

    @_SyncObj__raftLog.setter
    def _SyncObj__raftLog(self, ignored: object) -> None:
        """The constructor assigns the library's own journal; ours stays."""

    def _SyncObj__generateRaftTimeout(self) -> float:
        spread = self._timing.election_max_s - self._timing.election_min_s
        return self._timing.election_min_s + spread * self._ports.random()

    def _SyncObj__connectedToAnyone(self) -> bool:
        """Asked exactly when the election deadline has passed: may this member stand now? (R8)"""
        self._SyncObj__raftLeader = None  # silent for an election timeout: forward nothing to it, do not call it the leader
        if self.joining or self._id not in self.configuration.ids:
            return False
        self._standing_by_transfer = bool(self._SyncObj__transferInProgress)
        if self._standing_by_transfer or self.configuration.quorum == 1:
            return True
        if not self._rules.pre_vote:
            return bool(SyncObj._SyncObj__connectedToAnyone(self))
        now = self._ports.clock()
        members = frozenset(self.configuration.ids)
        if self._pre_vote.won(members, self.configuration.quorum, now - self._timing.election_min_s):
            self._pre_vote.reset()
            return True
        if self._pre_vote.due(self.term, now):
            ask = PreVote(self.term, self.last_index, self._journal.last_term)
            for peer in self.configuration.peers_of(self._id):
                self._hooks.send(peer, ask)
        return False

    def _SyncObj__getCurrentLogIndex(self) -> int:
        """R19: while the commit rule runs, the leader's log ends at its last synced entry."""
        return self._journal.synced_index if self._counting else self._journal.last_index

    def _SyncObj__getCurrentLogTerm(self) -> int:
        return self._journal.last_term

    def _SyncObj__getEntries(self, from_index: int | None, count: int | None = None, max_bytes: int | None = None) -> list[LightEntry]:
        if from_index is None or from_index < self._log.base_index:
            return []
        last = self.last_index if count is None else min(self.last_index, from_index + count - 1)
        return [self._log.light(index) for index in range(from_index, last + 1)]

    def _SyncObj__onBecomeLeader(self) -> None:
        if not self._journal.has_room(LEADER_ROOM_BYTES):
            self._step_down()
            return
        self.replication.begin(self.configuration.peers_of(self._id))
        self._noop_index = self.last_index + 1
        self._pre_vote.reset()
        SyncObj._SyncObj__onBecomeLeader(self)
        self._SyncObj__transferInProgress = False
        if self._bootstrap:
            self._append(self._memberships.payload(self.configuration))
            self._bootstrap = False
        if self.configuration.quorum == 1:  # R19: it won inside a tick, and the commit rule of that tick comes next
            self._counting = self._rules.count_self_synced

    def _SyncObj__setState(self, new_state: int) -> None:
        old = self.role
        SyncObj._SyncObj__setState(self, new_state)
        if old != new_state:
            self._hold_until, self._successor = float("-inf"), ""
            self._hooks.on_role(new_state)

    def _SyncObj__sendNextNodeIdx(
        self,
        node: Peer,
        reset: bool = False,
        nextNodeIdx: int | None = None,
        success: bool = False,
    ) -> None:
        matched, round_number = self._ack
        room = self._journal.has_room(LEADER_ROOM_BYTES)
        self._hooks.send(str(node.id), AppendReply(self.term, success, matched + 1, round_number, room))

    def _SyncObj__sendAppendEntries(self) -> None:
        self._SyncObj__newAppendEntriesTime = self._ports.clock() + self._timing.heartbeat_s
        self._replicate(everyone=True)

    def _checkCommandsToApply(self) -> None:
        if self.role != LEADER:
            return
        held = self._ports.clock() < self._hold_until
        while not held and self.last_index - self.commit_index < self._timing.max_uncommitted:
            payload = self._hooks.next_payload()
            if payload is None:
                break
            self._append(payload)
        if self._successor:
            self._hand_over()
        self._replicate(everyone=False)

    def _SyncObj__applyLogEntries(self) -> bool:
        self._counting = False
        if self.applied_index < self.commit_index:
            for index, term, payload in self._journal.entries(self.applied_index + 1, self.commit_index + 1, MAX_APPLY_BYTES):
                self._hooks.apply(index, term, payload)
                self._SyncObj__raftLastApplied = index
        return False

    def _SyncObj__tryLogCompaction(self) -> None:
        """Snapshots are the replica's (snapshots.py): no fork, no rewriting of the journal (D3, D9)."""

    def _SyncObj__doApplyCommand(self, command: bytes) -> None:
        raise Halted("the library's apply is not used")

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:
        raise Halted("the library's dump is not used")

    def _applyCommand(self, command: bytes, callback: object, commandType: object = None) -> None:
        raise Halted("the library's command queue is not used")


def library_clock() -> float:
    """What the library reads."""
    return float(pysyncobj.syncobj.monotonicTime())


class _Adapter:
    """What the library asks of a transport. It may only send vote messages; everything else is ours."""

    ready = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("setOn") or name in ("addNode", "dropNode", "destroy"):
            return _nothing
        raise AttributeError(name)

    def send(self, node: Peer, message: dict[str, Any]) -> bool:
        engine = self._engine
        match message["type"]:
            case "request_vote":
                last = message["last_log_index"], message["last_log_term"]
                vote = RequestVote(message["term"], *last, engine._standing_by_transfer)
                engine._hooks.send(str(node.id), vote)
            case "response_vote":
                engine._hooks.send(str(node.id), VoteReply(message["term"], True))
            case kind:
                raise Halted(f"the library wanted to send {kind!r}, which is outside the schema")
        return True


class _NullPoller:
    def poll(self, timeout: float) -> None:
        """The replica waits, not the library."""


def _nothing(*args: object) -> None:
    """Callbacks that the library registers with a transport; the replica calls the engine directly."""
