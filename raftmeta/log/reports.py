"""Telling the peers what the state is, and acting on what they tell.

A report goes to every peer every REPORT_EVERY revisions, at a revision that somebody else reported, and from a leader every REPORT_S, so
that a quiet cluster is compared too; to one peer when its link comes up. What a difference means is decided in integrity.py. A member is
`compared` once a majority had its hash at one revision: before that nothing is known, which is no pass. One that a majority contradicts
leads no more and serves no reads from that moment on, whenever its turn to set itself aside may come.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from raftmeta.core.state import State
from raftmeta.log.engine import Engine
from raftmeta.log.guard import Rules
from raftmeta.log.integrity import Comparison, Judgement, Verdict
from raftmeta.log.messages import StateReport
from raftmeta.log.quarantine import Quarantined
from raftmeta.log.setup import LEADER

REPORT_EVERY = 1_000  # revisions
REPORT_S = 10.0  # a leader that writes less than that reports this often
UNDECIDED_REPORT_S = 0.5  # and this often while a difference waits for a majority
ABSENT_S = 60.0  # a member without a link for so long keeps nobody waiting; one that begins again is back in seconds
HASH_BYTES = 32
HEAR_ALL_S = 2.0  # a member that a majority contradicts waits so long for what the others say, one of whom may have to go before it


class Owner(Protocol):
    """The replica, as far as reports need it."""

    engine: Engine
    state: State

    @property
    def linked(self) -> Collection[str]:
        """Peers with a link that is up."""

    def send(self, peer: str, message: StateReport) -> None: ...
    def alarm(self, code: str, detail: str) -> None: ...
    def alarm_over(self, code: str) -> None: ...
    def contradicted(self) -> None:
        """From here on nobody may be answered from this member's state."""

    def set_aside(self, cause: str, detail: str) -> None:
        """Durably decide that this member's state serves no more."""


class Reports:
    def __init__(self, member_id: str, owner: Owner, rules: Rules) -> None:
        self._id, self._owner, self._rules = member_id, owner, rules
        self._comparison = Comparison(member_id, rules.one_set_aside)
        self._told: dict[str, int] = {}  # peer -> revision of the last report to it
        self._due_at = self._now = 0.0
        self._began = float("inf")  # when this member was stepped first
        self._gone_at: dict[str, float] = {}  # peer -> when its link ended
        self._alarmed = False
        self.compared = False  # since it started or got its state from another, a majority, itself included, had one state at some revision
        self._contradicted: tuple[int, str] | None = None  # newest revision at which a majority has another state, and who has which
        self._wrong: tuple[int, float] | None = None  # revision of which it waits to hear everybody, and until when

    @property
    def hold(self) -> bool:
        """Whether nothing may be written now."""
        return self._comparison.undecided and self._rules.hold_undecided

    @property
    def contradiction(self) -> str:
        """What a majority says against this member's state, "" while none does."""
        return self._contradicted[1] if self._contradicted is not None else ""

    def disconnected(self, peer: str, now: float) -> None:
        self._gone_at[peer] = now

    def connected(self, peer: str) -> None:
        self._gone_at.pop(peer, None)
        self._comparison.forget(peer)
        self._told.pop(peer, None)
        self._tell(peer)

    def applied(self, before: int) -> None:
        """The state moved on from revision `before`. Raises Quarantined."""
        revision = self._owner.state.revision
        due = before // REPORT_EVERY != revision // REPORT_EVERY
        if due or (before != revision and self._comparison.heard_at(revision)):  # who is ahead said it before this member came there
            self._report()

    def replaced(self) -> None:
        """The state is another member's now: what was compared before was this member's own. Raises Quarantined."""
        self.compared = False
        self._report()

    def step(self, now: float) -> None:
        """Raises Quarantined."""
        self._now, self._began = now, min(now, self._began)
        if self._wrong is not None and now >= self._wrong[1]:
            revision, self._wrong = self._wrong[0], None
            self._judge(revision, all_had_time=True)
        if now >= self._due_at:
            self._due_at = now + (UNDECIDED_REPORT_S if self._comparison.undecided else REPORT_S)
            if self._owner.engine.role == LEADER:
                self._told.clear()  # somebody may have come to this revision only since
                self._report()

    def caught_up(self) -> None:
        """From here on this member's state stands for something."""
        self._told.clear()
        self._report()

    def heard(self, peer: str, report: StateReport) -> None:
        """Raises Quarantined."""
        if report.revision < 0 or len(report.state_hash) != HASH_BYTES:
            return
        if peer == self._owner.engine.leader_id and peer in self._comparison.heard_at(report.revision):
            self._told.pop(peer, None)  # a leader that says it again may not have heard what this member said
        self._comparison.note(peer, report.revision, report.state_hash, report.sound)
        if report.revision == self._owner.state.revision:
            self._report()
        else:
            self._judge(report.revision)

    def _report(self) -> None:
        """To everybody, since it takes three to see who is wrong; to each peer once per revision."""
        for peer in sorted(self._owner.linked):
            self._tell(peer)
        self._judge(self._note_own()[0])

    def _note_own(self) -> tuple[int, bytes]:
        state = self._owner.state
        own = self._comparison.own_at(state.revision)
        if own is None:
            own = state.state_hash
            self._comparison.note(self._id, state.revision, own)
        return state.revision, own

    def _tell(self, peer: str) -> None:
        revision, own = self._note_own()
        if self._told.get(peer) != revision:
            self._told[peer] = revision
            self._owner.send(peer, StateReport(revision, own, not self._owner.engine.joining))

    def _judge(self, revision: int, *, all_had_time: bool = False) -> None:
        owner, configuration = self._owner, self._owner.engine.configuration
        judged = self._comparison.judge(revision, configuration.ids, configuration.quorum, self._absent(), self._away())
        self._stand_by(judged)
        agrees = judged.verdict in (Verdict.EQUAL, Verdict.PEER)
        self.compared = self.compared or (agrees and judged.by_majority)
        if agrees and self._wrong is not None and revision >= self._wrong[0]:
            self._wrong = None
        if judged.verdict is Verdict.EQUAL:
            if self._alarmed and not self._comparison.undecided:
                self._alarmed = False
                owner.alarm_over("integrity")
            return
        self._alarmed = True
        owner.alarm("integrity", judged.detail)
        if judged.verdict is Verdict.SELF and self._rules.set_aside:
            if self._rules.one_set_aside and not all_had_time and self._silent(revision):
                self._wrong = revision, self._now + HEAR_ALL_S if self._wrong is None else self._wrong[1]
                return
            detail = f"a majority of the members has another state; {judged.detail}"
            owner.set_aside("state_differs", detail)
            raise Quarantined(detail)

    def _stand_by(self, judged: Judgement) -> None:
        """A majority against this member ends what it serves, at once; one that agrees with it later gives it back."""
        if judged.verdict in (Verdict.SELF, Verdict.WAITS) and self._rules.contradicted_stands_by:
            self._contradicted = max(self._contradicted or (0, ""), (judged.revision, judged.detail))
            self._owner.engine.stand_by()
            self._owner.contradicted()
        elif self._contradicted is not None and judged.by_majority and judged.revision > self._contradicted[0]:
            self._contradicted = None
            self._owner.engine.standing_by = False

    def _away(self) -> set[str]:
        """Members without a link."""
        return set(self._owner.engine.configuration.ids) - set(self._owner.linked) - {self._id}

    def _absent(self) -> set[str]:
        """Members whose link ended long ago, or never came up since this member started."""
        return {member for member in self._away() if self._now - self._gone_at.get(member, self._began) >= ABSENT_S}

    def _silent(self, revision: int) -> set[str]:
        """Linked members of which it is not known what their state at this revision is."""
        return set(self._owner.linked) & set(self._owner.engine.configuration.ids) - self._comparison.heard_at(revision)
