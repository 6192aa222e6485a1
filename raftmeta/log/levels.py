"""The feature levels that the members can run, by what they say when a link comes up, and what follows for what is proposed.

A level is raised only while every member is linked and can run it: one that is away may come back with the build that it had. A cluster
that is new begins at the highest level that all its members can run; one that was ever written to is raised by an operator. Belongs to the
replica's thread.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from raftmeta.core.commands import Body, RaiseFeatureLevel
from raftmeta.core.levels import level_fault, raise_fault
from raftmeta.core.state import State
from raftmeta.core.types import Outcome
from raftmeta.log.engine import Engine
from raftmeta.log.messages import Proposal
from raftmeta.log.proposals import Pending, Proposals, Result, encode_body

PRINCIPAL = "system:log"
PROPOSE_S = 5.0


class Owner(Protocol):
    """The replica, as far as feature levels need it."""

    engine: Engine
    state: State
    proposals: Proposals

    @property
    def linked(self) -> Collection[str]: ...


class Levels:
    def __init__(self, owner: Owner, member_id: str, feature: int) -> None:
        """`feature`: highest level that this build can run."""
        self._owner, self._id, self._feature = owner, member_id, feature
        self._told: dict[str, int] = {}  # peer -> highest level of the build behind its last link
        self._begun = False

    def connected(self, peer: str, feature: int) -> None:
        self._told[peer] = feature

    def of(self, member: str) -> int:
        """Highest level that the member's build can run, 0 while there is no link to it."""
        if member == self._id:
            return self._feature
        return self._told.get(member, 0) if member in self._owner.linked else 0

    def refusal(self, body: Body) -> Outcome | None:
        """What a leader answers a command that not every member would understand; None for others."""
        state = self._owner.state
        fault = level_fault(body, state.feature_level)
        if fault:
            return Outcome(state.revision, "unsupported_command", fault)
        if isinstance(body, RaiseFeatureLevel) and body.level > state.feature_level:
            fault = raise_fault(body.level, {member: self.of(member) for member in self._owner.engine.configuration.ids})
            return Outcome(state.revision, "feature_level_unsupported", fault) if fault else None
        return None

    def begin(self, now: float) -> None:
        """A leader is about to make an entry. While nothing was ever written, the level is raised in front of the first command.

        Every founder was heard before there was a leader, so what it said counts also while its link is cut.
        """
        owner = self._owner
        if self._begun or owner.state.revision > 0:
            return
        members = owner.engine.configuration.ids
        highest = min((self._feature if member == self._id else self._told.get(member, 0) for member in members), default=0)
        if highest <= owner.state.feature_level:
            return
        self._begun = True
        for level in range(highest, owner.state.feature_level, -1):
            body = encode_body(RaiseFeatureLevel(level))
            proposal = Proposal(0, f"feature-level-{level}", PRINCIPAL, self._id, body)
            owner.proposals.submit_first(Pending(proposal, now + PROPOSE_S, self._ended))

    def _ended(self, result: Result) -> None:
        if result.outcome is None:  # of a leader that was none for long enough: the next one, or this one again
            self._begun = False
