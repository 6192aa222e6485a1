"""Opening a member's directory: finish what was under way, recover, and let other members fill what is damaged.

A journal that is damaged at or below its mark is never cut, and no state is guessed where a snapshot is missing. Where there are others,
what is there is set aside and the member takes everything from them, without a vote until it has caught up (D6, D10); alone, or when
that happened before and nobody looked, it refuses. A damaged hard state is always refused: the member no longer knows what it promised.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, FileDamaged
from raftmeta.log import joining, quarantine
from raftmeta.log.boot import Recovered
from raftmeta.log.faults import HardStateCorrupt, JournalCorrupt, WrongCluster
from raftmeta.log.hard_state import HardStateFile
from raftmeta.log.journal import Journal
from raftmeta.log.quarantine import Quarantine


class Openers(NamedTuple):
    journal: Callable[[], Journal]
    recover: Callable[[Journal, bool], Recovered]  # given whether the member is joining


def open_log(disk: Disk, data_dir: Path, openers: Openers, *, has_marker: bool, has_peers: bool) -> tuple[Journal, Recovered]:
    """Raises what the openers raise, having changed nothing, where nobody else can help."""
    if quarantine.finish(disk, data_dir) is not None:
        has_marker = False
    joins = has_peers and joining.mark_if_new(disk, data_dir, has_marker)
    try:
        return _open(disk, data_dir, openers, joins)
    except (HardStateCorrupt, WrongCluster, FileDamaged):
        raise
    except RaftmetaError as damage:
        if not has_peers or damage.code != "integrity":
            raise
        hard = HardStateFile.load(disk, data_dir / "journal")
        hard.close()
        cause = "journal_damaged" if isinstance(damage, JournalCorrupt) else "snapshot_damaged"
        quarantine.mark(disk, data_dir, Quarantine(cause, damage.detail, hard.state.term, hard.state.voted_for))
    quarantine.finish(disk, data_dir)
    return _open(disk, data_dir, openers, True)


def _open(disk: Disk, data_dir: Path, openers: Openers, joins: bool) -> tuple[Journal, Recovered]:
    kept = quarantine.set_aside_before(disk, data_dir) if joins else None  # read before opening the journal changes a file
    journal = openers.journal()
    try:
        if kept is not None:
            quarantine.keep_promises(kept, journal)
        return journal, openers.recover(journal, joins)
    except BaseException:
        journal.close()
        raise
