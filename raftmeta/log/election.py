"""Who may stand and who may vote (R7, R8, R16): pre-vote rounds, voters counted once, stickiness. Pure bookkeeping, no I/O."""

from __future__ import annotations


class PreVoteRound:
    """Asking a majority whether an election could be won, before any term is raised.

    A grant counts for the round it answers; a round is asked again every `retry_s` with the grants kept, since a grant only says that the
    voter heard no leader for the minimum election timeout, and is thrown away when the term moves.
    """

    __slots__ = ("_asked_at", "_granted", "_retry_s", "_term")

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._granted: dict[str, float] = {}
        self._term = -1
        self._asked_at = float("-inf")

    def due(self, term: int, now: float) -> bool:
        """Whether to ask (again) now; notes that it was asked."""
        if term != self._term:
            self._term = term
            self._granted.clear()
        elif now - self._asked_at < self._retry_s:
            return False
        self._asked_at = now
        return True

    def grant(self, voter: str, term: int, now: float) -> None:
        if term == self._term:
            self._granted[voter] = now

    def won(self, members: frozenset[str], quorum: int, fresh_after: float) -> bool:
        """Whether this member and those that granted since `fresh_after` are a majority of the members."""
        fresh = sum(1 for voter, at in self._granted.items() if at >= fresh_after and voter in members)
        return fresh + 1 >= quorum

    def reset(self) -> None:
        self._term = -1
        self._granted.clear()
        self._asked_at = float("-inf")

    def next_due(self) -> float:
        return self._asked_at + self._retry_s


class Voters:
    """R7: each member's vote counts once per term."""

    __slots__ = ("_term", "_voters")

    def __init__(self) -> None:
        self._term = -1
        self._voters: set[str] = set()

    def first_vote(self, term: int, voter: str, members: frozenset[str]) -> bool:
        if term != self._term:
            self._term, self._voters = term, set()
        if voter not in members or voter in self._voters:
            return False
        self._voters.add(voter)
        return True


def is_sticky(heard_at: float, now: float, election_min_s: float) -> bool:
    """R8: a member that heard its leader within the minimum election timeout does not help to depose it."""
    return now - heard_at < election_min_s
