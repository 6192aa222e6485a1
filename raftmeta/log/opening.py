"""Opening a member's directory: finish what was under way, recover, and let other members fill what is damaged.

A journal that is damaged at or below its mark is never cut, and no state is guessed where a snapshot is missing. Where there are others,
what is there is set aside and the member takes everything from them, without a vote until it has caught up (D6, D10); alone, or when
that happened before and nobody looked, it refuses. A damaged or missing hard state is always refused, and so is one that is older than
the journal or another member's: the member no longer knows what it promised.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, FileDamaged
from raftmeta.log import quarantine
from raftmeta.log.boot import Recovered
from raftmeta.log.faults import HardStateCorrupt, JournalCorrupt, WrongCluster, WrongMember
from raftmeta.log.hard_state import NAME, HardStateFile, Owner
from raftmeta.log.journal import Journal
from raftmeta.log.quarantine import Quarantine


class Openers(NamedTuple):
    journal: Callable[[], Journal]
    recover: Callable[[Journal], Recovered]


class Whose(NamedTuple):
    """What is known of the directory before its journal is opened."""

    owner: Owner
    has_peers: bool
    began: bool = False  # it held a journal before


def open_log(disk: Disk, data_dir: Path, openers: Openers, whose: Whose) -> tuple[Journal, Recovered]:
    """Raises what the openers raise, having changed nothing, where nobody else can help."""
    quarantine.finish(disk, data_dir, whose.owner)
    path = data_dir / "journal" / NAME
    if whose.began and not disk.exists(path):
        raise HardStateCorrupt(path, "a file, since this member has started before", "none")
    try:
        return _open(openers)
    except (HardStateCorrupt, WrongCluster, WrongMember, FileDamaged):
        raise
    except RaftmetaError as damage:
        if not whose.has_peers or damage.code != "integrity":
            raise
        hard = HardStateFile.load(disk, data_dir / "journal", whose.owner)
        hard.close()
        cause = "journal_damaged" if isinstance(damage, JournalCorrupt) else "snapshot_damaged"
        quarantine.mark(disk, data_dir, Quarantine(cause, damage.detail, hard.state.promise.term, hard.state.promise.voted_for))
    quarantine.finish(disk, data_dir, whose.owner)
    return _open(openers)


def _open(openers: Openers) -> tuple[Journal, Recovered]:
    journal = openers.journal()
    try:
        return journal, openers.recover(journal)
    except BaseException:
        journal.close()
        raise
