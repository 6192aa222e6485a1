"""What the members said in the course of one call or watch: who is asked again, when to end, and with which error. Pure.

A member that answers with its own trouble (`internal`, `integrity`, `unauthenticated`, a limit, no readable reply) does not speak for
the others: each of them is asked before that answer ends a call. And no answer ends a mutation as refused, after an attempt that may have
been applied, unless it is the judgement of the command itself.
"""

from __future__ import annotations

from enum import Enum

from raftmeta.core.errors import RaftmetaError

OWN_TROUBLE = frozenset({"internal", "integrity", "unauthenticated", "too_many_watchers"})
_MAYBE_APPLIED = frozenset({"unknown_outcome", "revision_not_reached", "internal"})  # the second: applied, not seen by this member yet
# refusals that a leader may give without having looked for the key, or for the sake of the key alone
_NO_JUDGEMENT = frozenset({"unsupported_command", "feature_level_unsupported", "idempotency_expired"})


class Standing(Enum):
    """What a member did last."""

    AWAY = "away"  # no answer
    BUSY = "busy"  # will be worth asking again
    UNTRUSTED = "untrusted"  # has no certificate that is trusted here, or wants one where none was asked for
    USELESS = "useless"  # answered, and will answer the same


class Failure(Exception):
    """An attempt that another may follow."""

    def __init__(self, error: RaftmetaError, standing: Standing, *, maybe_applied: bool, pause_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.standing = error, standing
        self.maybe_applied = maybe_applied
        self.pause_s = pause_s


def may_be_applied(code: str) -> bool:
    return code in _MAYBE_APPLIED


def is_judgement(error: RaftmetaError, marked: bool) -> bool:
    """Whether a refusal says what became of the command; `marked`: the member says that it was judged."""
    return marked and error.code not in _NO_JUDGEMENT


class Course:
    """The standing of each member, and whether the command may have been applied."""

    def __init__(self, n_members: int) -> None:
        self._n_members = n_members
        self._standing: dict[str, Standing] = {}
        self._said: dict[str, RaftmetaError] = {}  # by member, the last
        self._codes: set[str] = set()
        self._useless: RaftmetaError | None = None
        self.attempts = 0
        self.maybe_applied = False

    def failed(self, url: str, failure: Failure) -> None:
        self.attempts += 1
        self.maybe_applied = self.maybe_applied or failure.maybe_applied
        self._codes.add(failure.error.code)
        self._standing[url] = failure.standing
        self._said[url] = failure.error
        if failure.standing is Standing.USELESS:
            self._useless = failure.error

    def forget(self) -> None:
        """A member served what was asked for: what the others said is of the past."""
        self._standing.clear()
        self._said.clear()
        self._useless = None
        self.attempts = 0

    @property
    def over(self) -> bool:
        """Nobody is left who might answer better. Members that are away are waited for, unless one that is there gave its answer."""
        found = set(self._standing.values())
        if len(self._standing) < self._n_members or Standing.BUSY in found:
            return False
        return Standing.USELESS in found or found == {Standing.UNTRUSTED}

    def error(self, last: RaftmetaError, is_mutation: bool) -> RaftmetaError:
        """What ends the call: never one that calls a mutation not applied after an attempt that may have been."""
        error = self._useless if self._useless is not None and self.over else self._of_all(last)
        detail = f"{error.detail} (after {self.attempts} attempts)" if self.attempts > 1 else error.detail
        code = error.code
        if is_mutation and self.maybe_applied and self._codes != {"internal"}:  # which says nothing of it, and calls a person
            detail = detail if code == "unknown_outcome" else f"{code}: {detail}; an attempt may have been applied"
            code = "unknown_outcome"
        elif is_mutation and code == "no_quorum":
            code = "not_applied"
        return RaftmetaError(code, detail, **error.params)

    def _of_all(self, last: RaftmetaError) -> RaftmetaError:
        """The last error; where one member answers without a leader and others do not answer at all, what that says of the cluster."""
        leaderless = [url for url, error in self._said.items() if error.code == "no_leader" and self._standing[url] is Standing.BUSY]
        away = [error.detail for url, error in self._said.items() if self._standing[url] is Standing.AWAY]
        if not leaderless or not away or last.code not in ("no_leader", "no_quorum"):
            return last
        answer = "answers" if len(leaderless) == 1 else "answer"
        return RaftmetaError("no_leader", f"{', '.join(leaderless)} {answer} and knows no leader; {'; '.join(away)}", **last.params)
