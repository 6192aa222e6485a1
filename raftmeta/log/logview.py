"""The journal in the shape that PySyncObj expects of its log: a list whose element 0 is the entry just below the journal.

Elements are (payload, index, term). The engine never asks the view for payloads except through `Engine`, so index and term suffice here;
what is appended or deleted is watched for membership entries, because the configuration in force is the latest one in the log (R13).
"""

from __future__ import annotations

from collections.abc import Callable

from raftmeta.log.journal import Journal

LightEntry = tuple[bytes, int, int]


class LogView:
    def __init__(self, journal: Journal, appended: Callable[[int, bytes], None], deleted_from: Callable[[int], None]) -> None:
        self._journal = journal
        self._appended = appended
        self._deleted_from = deleted_from

    @property
    def base_index(self) -> int:
        return self._journal.first_index - 1

    def __len__(self) -> int:
        return self._journal.last_index - self.base_index + 1

    def __getitem__(self, position: int) -> LightEntry:
        if position == -1:
            return b"", self._journal.last_index, self._journal.last_term
        return self.light(self.base_index + position)

    def light(self, index: int) -> LightEntry:
        term = self._journal.term_at(index)
        assert term is not None, index
        return b"", index, term

    def add(self, payload: bytes, index: int, term: int) -> None:
        self._journal.append(index, term, payload)
        self._appended(index, payload)

    def deleteEntriesFrom(self, position: int) -> None:
        index = self.base_index + position
        self._journal.truncate_from(index)
        self._deleted_from(index)

    def setCurrentTerm(self, term: int, voted_for: str | None) -> None:
        self._journal.set_hard_state(term, voted_for or "")

    def getCurrentTerm(self) -> int:
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:
        return self._journal.voted_for or None

    def getRaftCommitIndex(self) -> int:
        return self.base_index  # the wall sets what is known beyond it

    def setRaftCommitIndex(self, index: int) -> None:
        """The replica tells the journal, whose marks it goes with."""

    def onOneSecondTimer(self) -> None:
        """The library's timer for its own meta file, which we do not have."""
