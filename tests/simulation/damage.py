"""Damage to one member at a time: bits on its disk, or its state in memory. The others must not suffer, and it must come back whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from raftmeta.log.hard_state import NAME as HARD_STATE
from raftmeta.log.hard_state import SLOT_BYTES
from raftmeta.log.journal import Journal
from raftmeta.log.quarantine import KEPT_NAME
from raftmeta.log.replica import Replica
from tests.simulation.member import DIRECTORY, SimMember
from tests.support.memory_disk import MemoryDisk

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.faults import Faults

COPIED = ("segment-", HARD_STATE)
JOURNAL, SNAPSHOTS, KEPT = DIRECTORY / "journal", DIRECTORY / "snapshots", DIRECTORY / KEPT_NAME


class Damage:
    def __init__(self, cluster: Cluster, faults: Faults) -> None:
        self._cluster, self._faults = cluster, faults
        self.members: set[str] = set()  # who is damaged now

    def over(self, member: SimMember) -> None:
        """It has caught up; an operator has looked at what was kept, and removed it."""
        self.members.discard(member.id)
        member.disk.remove(KEPT)

    def flip_any(self) -> None:
        self.flip(self._faults.pick(), self._faults.random.uniform(0.1, 3.0))

    def flip(self, member: SimMember, down_s: float) -> bool:
        """Stop a member, flip a bit of what it promised to keep, and let it start: it notices or it was harmless. Whether it was done."""
        random = self._faults.random
        replica, journal = member.replica, member.journal
        if replica is None or journal is None or not self._may_harm(replica):
            return False
        path, size = random.choice(self._promised(member.disk, journal))
        if size == 0:
            return False
        self._faults.count("bit flip")
        self.members.add(member.id)
        offset, bit = random.randrange(size), 1 << random.randrange(8)

        def damage() -> None:
            if member.disk.exists(path) and offset < len(member.disk.contents(path)):
                member.disk.flip(path, offset, bit)

        self._cluster.crash(member, down_s, before=damage)
        return True

    def change_any(self) -> None:
        self.change_state(self._faults.pick())

    def change_state(self, member: SimMember) -> bool:
        """Let a member hold another state than its log says, as a defect of apply or of its memory would. Whether it was done."""
        replica = member.replica
        if replica is None or not self._may_harm(replica) or replica.state.revision == 0:
            return False
        self._change(member, replica)
        return True

    def change_two_of_five(self) -> None:
        """Two of them: the majority is right, and they have to go one after the other."""
        first, second = self._faults.random.sample(sorted(self._cluster.members), 2)
        member = self._cluster.members[second]
        if len(self._cluster.members) == 5 and member.replica is not None and self.change_state(self._cluster.members[first]):
            self._faults.count("two states changed")
            self._change(member, member.replica)

    def wipe(self) -> None:
        """Replace a member's disk; it gets the marker of its first start again, as whoever rolls out machines would do it."""
        member = self._faults.pick()
        if member.replica is not None and self._may_harm(member.replica):
            self._faults.count("disk replaced")
            self.members.add(member.id)
            self._cluster.crash(member, self._faults.random.uniform(0.1, 3.0), before=lambda: member.replace_disk(with_marker=True))

    def copy_a_file(self) -> None:
        """Back up one file of a running member; some time later it is put back."""
        member = self._faults.pick()
        if member.alive:
            path = self._faults.random.choice([JOURNAL / name for name in member.disk.listdir(JOURNAL) if name.startswith(COPIED)])
            copy = member.disk, path, member.disk.contents(path)
            self._cluster.at(self._cluster.now + self._faults.random.uniform(0.1, 5.0), self._put_back, (member, *copy))

    def _put_back(self, copy: tuple[SimMember, MemoryDisk, Path, bytes]) -> None:
        """While nothing was written that the hard state or a mark does not know of yet."""
        member, disk, path, data = copy
        replica, journal = member.replica, member.journal
        if replica is None or journal is None or member.disk is not disk or not disk.exists(path) or not self._may_harm(replica):
            return
        at_rest = journal._segments.settled and journal._segments.all[-1].row.end == journal._segments.all[-1].end.offset
        if at_rest and disk.contents(path) != data:
            self._faults.count("old file")
            self.members.add(member.id)
            self._cluster.crash(member, self._faults.random.uniform(0.1, 3.0), before=lambda: disk.put(path, data))

    def _change(self, member: SimMember, replica: Replica) -> None:
        self._faults.count("state changed")
        self.members.add(member.id)
        member.diverged = True
        replica.state = msgspec.structs.replace(replica.state, hash_sum=replica.state.hash_sum ^ (1 << self._faults.random.randrange(256)))

    def _may_harm(self, replica: Replica) -> bool:
        """Only while the others are enough: everybody is a member as far as anybody knows, and nobody else is damaged or catching up.

        Who is down counts too: a removal in its log alone may yet be committed, and then takes fewer losses than everybody does.
        """
        members = self._cluster.members.values()
        everybody = tuple(sorted(self._cluster.members))
        whole = all(each.configuration and tuple(sorted(each.configuration.ids)) == everybody and not each.joining for each in members)
        return not self.members and whole and replica.engine.configuration == replica.engine.configuration_at(replica.engine.commit_index)

    @staticmethod
    def _promised(disk: MemoryDisk, journal: Journal) -> list[tuple[Path, int]]:
        """Files, and how much of each it holds for sure: the active segment up to its mark, the hard state once it is in both slots."""
        active = journal._segments.all[-1]
        files = [
            (SNAPSHOTS / name, len(disk.contents(SNAPSHOTS / name))) for name in disk.listdir(SNAPSHOTS) if name.startswith("snapshot-")
        ]
        files += [(segment.path, segment.end.offset) for segment in journal._segments.all[:-1]]
        files += [(active.path, active.marked.offset)] * 2
        files += [(JOURNAL / HARD_STATE, 2 * SLOT_BYTES if journal._hard.settled else 0)]
        return files
