"""PySyncObj behind a wall: the only file that imports it or names its private parts.

The library keeps what it does well: counting votes, the commit rule, changing terms, appending. What it is given was judged before and
comes in a shape that it handles safely; what it wants to send goes through `Hooks` and leaves after the journal's sync. Methods named
`_SyncObj__x` replace the library's private ones, since its calls go through `self`; our rules are in the subclass (engine.py), which also
overrides what stands under "the library asks". docs/adr/engine-behind-a-wall.md lists every method of the library: inherited, wrapped,
replaced, and why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import pysyncobj.syncobj
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node

from raftmeta.log.configuration import Configuration
from raftmeta.log.journal import Journal
from raftmeta.log.logview import LightEntry, LogView
from raftmeta.log.memberships import Memberships
from raftmeta.log.messages import AppendReply, RequestVote, VoteReply
from raftmeta.log.setup import FOLLOWER, LEADER, Halted, Hooks, Setup

MAX_APPLY_BYTES = 4 << 20  # payload bytes applied in one tick
LEADER_ROOM_BYTES = 4096  # a leader must be able to write its first entry


class Peer(Node):  # type: ignore[misc]
    """R20: hashes the same in every process, so that sets of peers are walked in the same order everywhere."""

    def __init__(self, member_id: str) -> None:
        super().__init__(member_id)
        self._hash = int.from_bytes(member_id.encode()[-7:], "big")

    def __hash__(self) -> int:
        return self._hash


class Wall(SyncObj, ABC):  # type: ignore[misc]
    """A subclass sets its own attributes before it calls `__init__`: the library's constructor reads every attribute once."""

    _SyncObj__raftState: int
    _SyncObj__raftCurrentTerm: int
    _SyncObj__raftCommitIndex: int
    _SyncObj__raftLastApplied: int
    _SyncObj__raftElectionDeadline: float

    def __init__(self, setup: Setup, journal: Journal, hooks: Hooks) -> None:
        self._id, self._timing, self._ports, self._rules = setup.member_id, setup.timing, setup.ports, setup.rules
        self._journal, self._hooks = journal, hooks
        self._memberships = Memberships(setup.configurations)
        self._log = LogView(journal, self._memberships.appended, self._memberships.deleted_from)
        self._nodes: dict[str, Peer] = {}
        self._counting = False  # the commit rule of a leader runs
        self._ack: tuple[int, int] = (0, 0)  # last matched index and round of the append that the library handles now
        self._standing_by_transfer = False
        self._round_due = 0.0  # when a leader owes everyone a sign of life
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
        self._linked: set[Peer] = self._SyncObj__connectedNodes  # the library changes it in place
        self._poller = _NullPoller()
        self._SyncObj__raftLastApplied = setup.applied_index
        known = self._journal.committed_index if self._rules.keep_committed else 0  # to an earlier life; no leader may contradict it
        self._SyncObj__raftCommitIndex = max(setup.applied_index, known)
        if self.configuration.ids == (self._id,):
            self._SyncObj__raftElectionDeadline = self._ports.clock()  # nobody else could lead: a single member is ready at once

    # ------------------------------------------------------------------ where the library stands

    @property
    def role(self) -> int:
        return self._SyncObj__raftState

    @property
    def term(self) -> int:
        return self._SyncObj__raftCurrentTerm

    @property
    def leader_id(self) -> str:
        leader = self._SyncObj__raftLeader
        return "" if leader is None else str(leader.id)

    @property
    def commit_index(self) -> int:
        return self._SyncObj__raftCommitIndex

    @property
    def applied_index(self) -> int:
        return self._SyncObj__raftLastApplied

    @property
    def configuration(self) -> Configuration:
        return self._memberships.current

    @property
    def election_due(self) -> float:
        """When a member that does not lead may stand."""
        return self._SyncObj__raftElectionDeadline

    @election_due.setter
    def election_due(self, due: float) -> None:
        self._SyncObj__raftElectionDeadline = due

    # ------------------------------------------------------------------ what the library is told

    def tick(self) -> None:
        """One tick of the library: elections, the commit rule, applying, sending. Raises Halted."""
        self._counting = self._SyncObj__raftState == LEADER and self._rules.count_self_synced
        self.doTick(0.0)
        self._counting = False

    def give(self, peer: str, message: dict[str, Any]) -> None:
        """A message in the library's words."""
        SyncObj._SyncObj__onMessageReceived(self, self._node(peer), message)

    def is_linked(self) -> bool:
        """Whether any peer is connected, or there is none."""
        return bool(SyncObj._SyncObj__connectedToAnyone(self))

    def _link_opened(self, peer: str) -> None:
        self._SyncObj__onNodeConnected(self._node(peer))

    def _link_closed(self, peer: str) -> None:
        self._SyncObj__onNodeDisconnected(self._node(peer))

    def _forget_match(self, peer: str) -> None:
        self._SyncObj__raftMatchIndex[self._node(peer)] = 0

    def _enter_term(self, term: int) -> None:
        """Follow in a higher term, whose leader is not known yet."""
        self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(FOLLOWER)
        self._SyncObj__raftLeader = None

    def _stand_at_once(self) -> None:
        self._SyncObj__raftElectionDeadline = 0.0
        self._SyncObj__transferInProgress = True

    def _step_down(self) -> None:
        self._SyncObj__setState(FOLLOWER)
        self._SyncObj__raftLeader = None
        self._SyncObj__raftElectionDeadline = self._ports.clock() + self._SyncObj__generateRaftTimeout()

    def _moved_to(self, index: int) -> None:
        """A snapshot replaced the state."""
        self._SyncObj__raftLastApplied = index
        self._SyncObj__raftCommitIndex = max(index, min(self.commit_index, self._journal.last_index))

    def _set_peers(self, peers: Iterable[str]) -> None:
        nodes = [self._node(peer) for peer in peers]
        self._SyncObj__updateClusterConfiguration(nodes)
        if self.role == LEADER:
            now = self._ports.clock()
            for node in nodes:
                self._SyncObj__lastResponseTime.setdefault(node, now)
                self._SyncObj__raftMatchIndex.setdefault(node, 0)

    def _node(self, peer: str) -> Peer:
        node = self._nodes.get(peer)
        if node is None:
            node = self._nodes[peer] = Peer(peer)
        return node

    # ------------------------------------------------------------------ the library asks

    @abstractmethod
    def _may_stand(self, by_transfer: bool) -> bool:
        """The election deadline has passed: may this member stand now?"""

    def _become_leader(self) -> None:
        """The election is won. Appends the first entry of the term and sends a round."""
        SyncObj._SyncObj__onBecomeLeader(self)
        self._SyncObj__transferInProgress = False
        if self.configuration.quorum == 1:  # R19: it won inside a tick, and the commit rule of that tick comes next
            self._counting = self._rules.count_self_synced

    @abstractmethod
    def _role_changed(self, role: int) -> None:
        """It leads, stands or follows now, and did not before."""

    @abstractmethod
    def _lead(self) -> None:
        """A leader's turn in a tick: append what waits, send."""

    @abstractmethod
    def _send_round(self, everyone: bool) -> None:
        """To each follower what it may get now; with `everyone` a sign of life to the others."""

    # ------------------------------------------------------------------ in place of the library's

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
        """Asked exactly when the election deadline has passed (R8)."""
        self._SyncObj__raftLeader = None  # silent for an election timeout: forward nothing to it, do not call it the leader
        self._standing_by_transfer = bool(self._SyncObj__transferInProgress)
        return self._may_stand(self._standing_by_transfer)

    def _SyncObj__getCurrentLogIndex(self) -> int:
        """R19: while the commit rule runs, the leader's log ends at its last synced entry."""
        return self._journal.synced_index if self._counting else self._journal.last_index

    def _SyncObj__getCurrentLogTerm(self) -> int:
        return self._journal.last_term

    def _SyncObj__getEntries(self, from_index: int | None, count: int | None = None, max_bytes: int | None = None) -> list[LightEntry]:
        if from_index is None or from_index < self._log.base_index:
            return []
        last = self._journal.last_index
        last = last if count is None else min(last, from_index + count - 1)
        return [self._log.light(index) for index in range(from_index, last + 1)]

    def _SyncObj__onBecomeLeader(self) -> None:
        if self._journal.has_reserve(LEADER_ROOM_BYTES):  # a leader that can take no command still answers reads
            self._become_leader()
        else:
            self._step_down()

    def _SyncObj__setState(self, new_state: int) -> None:
        old = self.role
        SyncObj._SyncObj__setState(self, new_state)
        if old != new_state:
            self._role_changed(new_state)

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
        self._round_due = self._SyncObj__newAppendEntriesTime = self._ports.clock() + self._timing.heartbeat_s
        self._send_round(everyone=True)

    def _checkCommandsToApply(self) -> None:
        if self._SyncObj__raftState == LEADER:
            self._lead()

    def _SyncObj__applyLogEntries(self) -> bool:
        self._counting = False
        if self._SyncObj__raftLastApplied < self._SyncObj__raftCommitIndex:
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

    def __init__(self, wall: Wall) -> None:
        self._wall = wall

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("setOn") or name in ("addNode", "dropNode", "destroy"):
            return _nothing
        raise AttributeError(name)

    def send(self, node: Peer, message: dict[str, Any]) -> bool:
        wall = self._wall
        match message["type"]:
            case "request_vote":
                last = message["last_log_index"], message["last_log_term"]
                vote = RequestVote(message["term"], *last, wall._standing_by_transfer)
                wall._hooks.send(str(node.id), vote)
            case "response_vote":
                wall._hooks.send(str(node.id), VoteReply(message["term"], True))
            case kind:
                raise Halted(f"the library wanted to send {kind!r}, which is outside the schema")
        return True


class _NullPoller:
    def poll(self, timeout: float) -> None:
        """The replica waits, not the library."""


def _nothing(*args: object) -> None:
    """Callbacks that the library registers with a transport; the replica calls the engine directly."""
