"""The configurations in the log: the latest is in force, committed or not (R13); one change at a time (R4); what is cut is undone."""

from __future__ import annotations

from collections.abc import Sequence

from raftmeta.log import configuration as cfg
from raftmeta.log.configuration import Configuration
from raftmeta.log.setup import OP_MEMBERSHIP


class Memberships:
    def __init__(self, known: Sequence[tuple[int, Configuration]]) -> None:
        """`known`: (index, configuration) by index, at least one."""
        self._known = list(known)

    @property
    def current(self) -> Configuration:
        return self._known[-1][1]

    @property
    def current_index(self) -> int:
        return self._known[-1][0]

    def at(self, index: int) -> Configuration:
        """The configuration in force at an entry."""
        return next(configuration for at, configuration in reversed(self._known) if at <= index)

    def appended(self, index: int, payload: bytes) -> None:
        if payload[0] == OP_MEMBERSHIP:
            self._known.append((index, cfg.decode(payload[1:])))

    def deleted_from(self, index: int) -> None:
        while len(self._known) > 1 and self._known[-1][0] >= index:
            self._known.pop()

    def replaced(self, index: int, configuration: Configuration, last_index: int) -> None:
        """A snapshot stands in for everything up to `index`; the log goes on to `last_index`."""
        later = [(at, known) for at, known in self._known if index < at <= last_index]
        self._known = [(index, configuration), *later]

    def payload(self, new: Configuration) -> bytes:
        return bytes([OP_MEMBERSHIP]) + cfg.encode(new)
