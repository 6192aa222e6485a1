"""What it means that members have different states at one revision. Pure: reports in, judgements out.

Equal revisions must have equal hashes. A difference is decided by a majority of the configuration and by nothing less: the member that
stands alone against it sets itself aside; without a majority nobody is chosen, and nothing more is written until one appears or an operator
decides. One at a time: of several that a majority contradicts the first by name goes, and the next one once that has caught up again or has
been away for long. What a contradicted member must not do meanwhile does not wait for its turn (reports.py).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

MAX_REVISIONS = 64  # kept of each member, the last that it named; one that is further behind is compared at a later one


class Verdict(Enum):
    EQUAL = "equal"  # nobody differs, as far as is known
    SELF = "self"  # a majority holds another state: this member is wrong, and its turn to set itself aside has come
    WAITS = "waits"  # likewise, but another one goes first or has not caught up
    PEER = "peer"  # a majority, this member included, differs from somebody, who finds out likewise
    UNDECIDED = "undecided"  # states differ, and no majority says which is right


class Judgement(NamedTuple):
    verdict: Verdict
    revision: int
    detail: str = ""
    by_majority: bool = False  # the reports of a majority agree at this revision


class Comparison:
    """Reports by member, this one's own under its own name. What one member names never drives out what another did."""

    def __init__(self, member_id: str, one_at_a_time: bool = True) -> None:
        self._id, self._one_at_a_time = member_id, one_at_a_time
        self._reports: dict[str, dict[int, bytes]] = {}  # by revision, in the order in which they came
        self._unsound: set[str] = set()  # members that are set aside, have not caught up since, or have not said that they have
        self._sound: set[str] = set()  # members that said so since their link came up
        self._undecided: set[int] = set()

    @property
    def undecided(self) -> bool:
        """Whether a difference stands that no majority has decided."""
        return bool(self._undecided)

    def own_at(self, revision: int) -> bytes | None:
        return self._reports.get(self._id, {}).get(revision)

    def heard_at(self, revision: int) -> set[str]:
        """Members whose state at that revision is known."""
        return {member for member, reports in self._reports.items() if revision in reports}

    def note(self, member: str, revision: int, state_hash: bytes, sound: bool = True) -> None:
        """A member's state at a revision. Of one that is not sound nothing is compared, now or before.

        Who has caught up stays so for as long as its process lives: what it said before that may come late, and is no news.
        """
        if not sound:
            if member not in self._sound:
                self.forget(member)
            return
        self._sound.add(member)
        self._unsound.discard(member)
        reports = self._reports.setdefault(member, {})
        reports.pop(revision, None)
        reports[revision] = state_hash
        if len(reports) > MAX_REVISIONS:
            oldest = next(iter(reports))
            del reports[oldest]
            if member == self._id:
                self._undecided.discard(oldest)

    def forget(self, member: str) -> None:
        """What it said before: it may have started again since, perhaps with nothing, and is not sound until it says so."""
        self._unsound.add(member)
        self._sound.discard(member)
        self._reports.pop(member, None)

    def judge(
        self, revision: int, members: Collection[str], quorum: int, absent: Collection[str] = (), away: Collection[str] = ()
    ) -> Judgement:
        """What the reports of the members of the configuration say about this revision.

        Who is `away` has no link now: it may have set itself aside unless it was heard here. Nobody waits for those that are `absent`.
        """
        reports = {member: named[revision] for member, named in self._reports.items() if member in members and revision in named}
        own = reports.get(self._id)
        differing = sorted(member for member, found in reports.items() if found != own)
        if own is None or not differing:
            agreed = own is not None and len(reports) >= quorum
            if agreed:
                self._decided(revision)
            return Judgement(Verdict.EQUAL, revision, by_majority=agreed)
        groups: dict[bytes, list[str]] = {}
        for member, found in sorted(reports.items()):
            groups.setdefault(found, []).append(member)
        detail = f"state hashes at revision {revision} differ: " + ", ".join(
            f"{' and '.join(names)}: {found.hex()}" for found, names in groups.items()
        )
        largest = max(groups.values(), key=len)
        contradicted = [member for member in sorted(reports) if member not in largest]
        if len(largest) < quorum:
            self._undecided.add(revision)
            return Judgement(Verdict.UNDECIDED, revision, detail)
        self._unsound.update(member for member in contradicted if member != self._id)  # until they report again
        self._decided(revision)
        if self._id in largest:
            return Judgement(Verdict.PEER, revision, detail, by_majority=True)
        present = set(members) - set(absent)
        goes = self._may_go([member for member in contradicted if member in present], present, set(away) - set(reports))
        return Judgement(Verdict.SELF if goes else Verdict.WAITS, revision, detail, by_majority=True)

    def _may_go(self, contradicted: list[str], present: set[str], unheard: set[str]) -> bool:
        """Whether no other member is set aside, or about to be before this one, or was contradicted and has not been heard since."""
        others = (self._unsound | unheard) & present - set(contradicted)
        return not self._one_at_a_time or (contradicted[0] == self._id and not others)

    def _decided(self, revision: int) -> None:
        """A majority that agrees here settles what was open before: states do not become equal again by themselves."""
        self._undecided = {open_one for open_one in self._undecided if open_one > revision}
