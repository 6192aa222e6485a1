"""What can be wrong with a member's own data, as errors.

Each says which file, where, what was expected and what was found; style rule 19 applies to all: the member does not go on with an empty or
guessed state. `JournalCorrupt` carries what a later start without a vote needs to fetch the record from a peer: its index and how far the
journal had promised to reach.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from raftmeta.core.errors import RaftmetaError


class Damage(msgspec.Struct, frozen=True):
    """Where a journal stops being what was acknowledged."""

    path: Path
    offset: int  # of the first byte that cannot be trusted
    index: int  # of the first record that cannot be read
    term: int  # of the last record that can
    through: int  # the journal had promised records up to here, at least
    expected: str
    found: str


class JournalCorrupt(RaftmetaError):
    """An acknowledged record is damaged or gone."""

    def __init__(self, damage: Damage) -> None:
        lost = f"records {damage.index} to {damage.through}" if damage.through > damage.index else f"record {damage.index}"
        super().__init__(
            "integrity",
            f"journal {damage.path} is damaged at offset {damage.offset}: expected {damage.expected}, found {damage.found}; "
            f"{lost} cannot be read. A member of several sets its files aside and takes everything from the others; a single member goes "
            f"on without them after: raftmeta server --accept-data-loss-from {damage.index}",
        )
        self.damage = damage
        self.index = damage.index
        self.term = damage.term


class HardStateCorrupt(RaftmetaError):
    """Term and vote are unknown: a member that guessed them could vote twice."""

    def __init__(self, path: Path, expected: str, found: str) -> None:
        super().__init__(
            "integrity",
            f"hard state {path}: expected {expected}, found {found}; this member must not vote, not knowing what it promised. One of "
            "several: keep its data directory elsewhere and start it with an empty one, it takes everything from the others; a single "
            "member: put a backup of the whole directory back",
        )
        self.path = path


class WrongCluster(RaftmetaError):
    """The data belongs to another cluster."""

    def __init__(self, path: Path, expected: str, found: str) -> None:
        super().__init__("integrity", f"{path} belongs to another cluster: expected {expected}, found {found}")


class WrongMember(RaftmetaError):
    """The promises are another member's."""

    def __init__(self, path: Path, expected: str, found: str) -> None:
        super().__init__("integrity", f"{path} belongs to another member: expected {expected}, found {found}")


class SnapshotCorrupt(RaftmetaError):
    """A snapshot does not read back as it was published, and nothing else reaches as far."""

    def __init__(self, path: Path, expected: str, found: str) -> None:
        super().__init__("integrity", f"snapshot {path}: expected {expected}, found {found}")
        self.path = path
