"""Members that leave the configuration and come back, one change at a time, through whoever leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftmeta.log.configuration import Configuration, configuration_of
from raftmeta.log.setup import LEADER
from tests.simulation.member import SimMember

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.faults import Faults

RETRY_S = 0.3
FEWEST = {1: 1, 3: 2, 5: 3}  # members that stay, by how many there are


class Membership:
    def __init__(self, cluster: Cluster, faults: Faults) -> None:
        self._cluster, self._faults = cluster, faults

    def change(self) -> None:
        """Remove a member other than the leader, or bring one back; three at least stay of five, two of three."""
        leader = self._leader()
        if leader is None or leader.replica is None:
            return
        now = leader.replica.engine.configuration
        away = [name for name in self._cluster.members if name not in now.ids]
        if away and (len(now.ids) <= FEWEST[len(self._cluster.members)] or self._faults.random.random() < 0.5):
            self._propose(leader, self._with(now, away[0]), "member added")
            return
        victim = self._faults.pick()
        if (
            victim is not leader and victim.id in now.ids and not self._faults.damage.members
        ):  # what is left must be a majority that is whole
            self._propose(leader, _without(now, victim.id), "member removed")
            another = self._faults.pick()
            if another is not leader:  # refused while the first is under way (R4)
                self._propose(leader, _without(leader.replica.engine.configuration, another.id), "two members removed at once")

    def restore(self, _: object = None) -> None:
        """Bring everybody back, and look again until they are."""
        leader = self._leader()
        if leader is not None and leader.replica is not None:
            engine = leader.replica.engine
            away = [name for name in self._cluster.members if name not in engine.configuration.ids]
            if not away and engine.commit_index >= engine.last_index:
                return
            if away:
                self._propose(leader, self._with(engine.configuration, away[0]), "member added")
        self._cluster.at(self._cluster.now + RETRY_S, self.restore)

    def _with(self, now: Configuration, name: str) -> Configuration:
        return configuration_of((*now.members, self._cluster.specs[name]))

    def _propose(self, leader: SimMember, new: Configuration, kind: str) -> None:
        assert leader.replica is not None
        if leader.replica.engine.change_configuration(new) is None:
            self._faults.count(kind)
            self._cluster.wake(leader, self._cluster.now)

    def _leader(self) -> SimMember | None:
        """Who leads in the newest term, and is awake."""
        found = [
            (member.replica.engine.term, member.id, member)
            for member in self._cluster.members.values()
            if member.replica is not None and member.replica.engine.role == LEADER and member.paused_until <= self._cluster.now
        ]
        return max(found, key=lambda each: each[:2])[2] if found else None


def _without(now: Configuration, name: str) -> Configuration:
    return Configuration(tuple(member for member in now.members if member.id != name))
