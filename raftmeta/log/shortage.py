"""A full disk, from the first thing that found no room until all of it can be done again (D4): raises the alarm and takes it back.

A member with an alarm is not ready, so one whose disk has room again must say so by itself, however little happens: the disk is asked now
and then, and a snapshot that did not fit is due again at once. Belongs to the replica's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from raftmeta.log.exchange import SnapshotExchange
from raftmeta.log.journal import Journal

CODE = "disk_full"
LOOK_S = 1.0  # as often as the journal tries for another segment


class Owner(Protocol):
    """Who tells the member."""

    def alarm(self, code: str, detail: str) -> None: ...
    def alarm_over(self, code: str) -> None: ...


class Shortage:
    def __init__(self, journal: Journal, exchange: SnapshotExchange, owner: Owner) -> None:
        self._journal, self._exchange, self._owner = journal, exchange, owner
        self._refused_bytes = 0  # of the largest entry that found no room, 0 while there is room
        self._peers_lack = False
        self._said = ""  # the alarm that stands
        self._look_at = 0.0

    def entry_refused(self, n_bytes: int) -> None:
        """Commands of that size found no room in the journal."""
        self._refused_bytes = max(self._refused_bytes, n_bytes)
        self._say("no room for another entry; new commands are refused")

    def peers_lack(self, peers: Sequence[str]) -> None:
        """So many of the followers have no room that nothing would be committed."""
        self._peers_lack = True
        self._say(f"no majority has room for another entry: {' and '.join(peers)} have none; new commands are refused")

    def step(self, now: float, position: tuple[int, int], majority_without_room: Callable[[], Sequence[str]]) -> None:
        if self._exchange.trouble and not self._refused_bytes and not self._peers_lack:
            self._say(f"snapshot: {self._exchange.trouble}")
        if not self._said or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        self._exchange.look_again(*position)
        if self._refused_bytes and self._journal.has_room(self._refused_bytes):
            self._refused_bytes = 0
        self._peers_lack = self._peers_lack and bool(majority_without_room())
        if not self._refused_bytes and not self._peers_lack and not self._exchange.trouble:
            self._said = ""
            self._owner.alarm_over(CODE)

    def _say(self, detail: str) -> None:
        """Once, until it is something else."""
        if detail != self._said:
            self._said = detail
            self._owner.alarm(CODE, detail)
