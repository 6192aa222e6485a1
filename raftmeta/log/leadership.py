"""How leadership moves, by our rules: who stands, for whom this member votes, what a lost leader means, and handing it over.

The library counts the votes and changes the terms; this decides which requests it hears of and when it may begin. A member stands only
after a majority said that it hears no leader either (R8) and while no majority contradicts its state, votes for nobody while it hears a
leader, and has no vote before it has caught up (hard_state.py). One with the marker of a first start has a vote once every other member
said that it holds nothing: whoever holds something may hold what an earlier life of this one acknowledged. Asked by the engine, which it
knows as its `Owner` only.
"""

from __future__ import annotations

from typing import Any, Protocol

from raftmeta.log.configuration import Configuration
from raftmeta.log.election import PreVoteRound, Voters, is_sticky
from raftmeta.log.guard import up_to_date
from raftmeta.log.journal import Journal
from raftmeta.log.messages import PreVote, PreVoteReply, RequestVote, TimeoutNow, VoteReply
from raftmeta.log.replication import Replication
from raftmeta.log.setup import CANDIDATE, FOLLOWER, LEADER, Hooks, Setup


class Owner(Protocol):
    """The engine, as far as elections need it."""

    joining: bool
    standing_by: bool
    election_due: float

    @property
    def role(self) -> int: ...
    @property
    def term(self) -> int: ...
    @property
    def leader_id(self) -> str: ...
    @property
    def configuration(self) -> Configuration: ...

    def is_linked(self) -> bool: ...
    def give(self, peer: str, message: dict[str, Any]) -> None: ...


class Elections:
    def __init__(self, owner: Owner, journal: Journal, hooks: Hooks, setup: Setup) -> None:
        self._owner, self._journal, self._hooks = owner, journal, hooks
        self._id, self._timing, self._clock, self._rules = setup.member_id, setup.timing, setup.ports.clock, setup.rules
        self.pre_vote, self._voters = PreVoteRound(self._timing.heartbeat_s), Voters()
        self._founding = setup.bootstrap
        self._empty: set[str] = set()  # peers that hold nothing, asked in this life of the member
        self._heard_at = float("-inf")
        self._before_loss: tuple[float, float] | None = None  # when the leader was heard and the election was due, before its link closed

    # ------------------------------------------------------------------ the leader, heard and lost

    def heard(self) -> None:
        """The leader of this term sent something."""
        self._heard_at, self._before_loss = self._clock(), None

    def link_opened(self, peer: str, restarted: bool) -> None:
        """The leader is back before anyone missed it, as if its link had not closed."""
        if self._before_loss is not None and peer == self._owner.leader_id and not restarted:
            self._heard_at, self._owner.election_due = self._before_loss
            self._before_loss = None
        if self._owner.joining and self._founding:
            self._hooks.send(peer, self._question())

    def link_closed(self, peer: str) -> None:
        owner = self._owner
        if self._rules.closed_link_counts and owner.role == FOLLOWER and peer == owner.leader_id and self._is_member():
            self._lose_leader(peer)

    def _lose_leader(self, leader: str) -> None:
        """R8: who lost the link to its leader hears it no more; unless it is back within a heartbeat, ask who else lost it.

        The members ask half a heartbeat apart, by name: two that lose the same leader at once do not split the votes.
        """
        due = self._owner.election_due
        place = [peer for peer in self._owner.configuration.ids if peer != leader].index(self._id)
        self._before_loss = self._heard_at, due
        self._heard_at = float("-inf")
        self.pre_vote.reset()  # what was granted before says nothing of now
        self._owner.election_due = min(due, self._clock() + self._timing.heartbeat_s * (1 + place / 2))

    # ------------------------------------------------------------------ standing

    def is_eligible(self) -> bool:
        """Whether its election deadline means anything to this member: it may stand then, or ask the others for a first start."""
        return (not self._owner.joining or self._founding) and not self._owner.standing_by and self._is_member()

    def may_stand(self, by_transfer: bool) -> bool:
        """The election deadline has passed (R8). Asks for pre-votes where it takes them."""
        if not self.is_eligible():
            return False
        if self._owner.joining:
            self._ask(self._clock())
            return False
        configuration = self._owner.configuration
        if by_transfer or configuration.quorum == 1:
            return True
        if not self._rules.pre_vote:
            return self._owner.is_linked()
        now = self._clock()
        if self.pre_vote.won(frozenset(configuration.ids), configuration.quorum, now - self._timing.election_min_s):
            self.pre_vote.reset()
            return True
        self._ask(now)
        return False

    def _ask(self, now: float) -> None:
        if self.pre_vote.due(self._owner.term, now):
            for peer in self._owner.configuration.peers_of(self._id):
                self._hooks.send(peer, self._question())

    def _question(self) -> PreVote:
        return PreVote(self._owner.term, self._journal.last_index, self._journal.last_term)

    def on_empty(self, peer: str) -> None:
        self._empty.add(peer)

    def may_found(self) -> bool:
        """Whether the members of the marker form the cluster now: neither this one nor any other holds anything."""
        return self._founding and self._journal.last_index == 0 and not (self.unheard() and self._rules.ask_before_founding)

    def unheard(self) -> tuple[str, ...]:
        """Members of the marker that have not said yet that they hold nothing; none where that is not asked. From any thread."""
        return tuple(peer for peer in self._owner.configuration.peers_of(self._id) if peer not in self._empty) if self._founding else ()

    def on_pre_vote_granted(self, peer: str, asked_term: int) -> None:
        self.pre_vote.grant(peer, asked_term, self._clock())

    def on_vote_granted(self, peer: str, term: int) -> None:
        """R7: the library hears of each member's vote once."""
        owner = self._owner
        if owner.role != CANDIDATE:
            return
        if not self._rules.voters_once or self._voters.first_vote(owner.term, peer, frozenset(owner.configuration.ids)):
            owner.give(peer, {"type": "response_vote", "term": term})

    def on_timeout_now(self, peer: str, message: TimeoutNow) -> None:
        """R17: the leader of this term hands over to this member."""
        if message.term == self._owner.term and peer == self._owner.leader_id and self.is_eligible():
            self._owner.give(peer, {"type": "timeout_now", "term": message.term})

    # ------------------------------------------------------------------ voting

    def on_request_vote(self, peer: str, message: RequestVote) -> None:
        owner = self._owner
        if message.term < owner.term:
            if self._rules.answer_stale:
                self._hooks.send(peer, VoteReply(owner.term, False))
            return
        now = self._clock()
        if owner.joining:
            self._hooks.send(peer, VoteReply(owner.term, False))
            return
        if self._rules.pre_vote and not message.transfer and peer != owner.leader_id and self._is_sticky(now):
            self._hooks.send(peer, VoteReply(owner.term, False))
            return
        owner.give(
            peer,
            {"type": "request_vote", "term": message.term, "last_log_index": message.last_index, "last_log_term": message.last_term},
        )

    def on_pre_vote(self, peer: str, message: PreVote) -> None:
        owner = self._owner
        newer = up_to_date(message.last_term, message.last_index, self._journal.last_term, self._journal.last_index)
        free = peer == owner.leader_id or not self._is_sticky(self._clock())
        granted = newer and free and message.term >= owner.term and not owner.joining
        self._hooks.send(peer, PreVoteReply(owner.term, message.term, granted, self._journal.last_index == 0))

    def _is_sticky(self, now: float) -> bool:
        return self._owner.role == LEADER or is_sticky(self._heard_at, now, self._timing.election_min_s)

    def _is_member(self) -> bool:
        return self._id in self._owner.configuration.ids


class Handover:
    """R17: a leader asks a follower to stand as soon as it holds everything. New proposals wait for at most one election timeout."""

    def __init__(self, replication: Replication, hooks: Hooks, setup: Setup) -> None:
        self._replication, self._hooks = replication, hooks
        self._hold_s, self._clock, self._rules = setup.timing.election_min_s, setup.ports.clock, setup.rules
        self.hold_until = float("-inf")
        self.successor = ""  # whom to ask to stand once it holds everything

    def begin(self, target: str, last_index: int) -> bool:
        """False when the target follows no log of this leader."""
        progress = self._replication.followers.get(target)
        if progress is None or (progress.match != last_index and not self._rules.wait_for_successor):
            return False
        self.hold_until = self._clock() + self._hold_s
        self.successor = target
        return True

    def step(self, term: int, last_index: int, applied_index: int) -> None:
        """Everything is committed and applied here first, so that no caller is left in doubt."""
        progress = self._replication.followers.get(self.successor)
        if progress is None or self._clock() >= self.hold_until:
            self.successor = ""
        elif progress.match == last_index == applied_index:
            self._hooks.send(self.successor, TimeoutNow(term))
            self.successor = ""

    def end(self) -> None:
        """This member's role is another one now."""
        self.hold_until, self.successor = float("-inf"), ""
