"""Faults, drawn from the seed: crashes between and inside steps, loss, delay, doubling, partitions, pauses, slow disks, torn writes."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.member import SimMember
from tests.simulation.network import Weather

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


class Faults:
    def __init__(self, cluster: Cluster, random: Random) -> None:
        self._cluster, self.random = cluster, random
        self.counts: Counter[str] = Counter()
        self._until = 0.0
        self._slow: dict[str, float] = {}  # member -> slow disk until
        self._mean_gap_s = random.choice((0.3, 1.0, 3.0))
        self._kinds = (
            self._crash,
            self._crash_inside,
            self._partition,
            self._one_way,
            self._pause,
            self._weather,
            self._slow_disk,
            self._heal,
        )

    def start(self, until: float) -> None:
        self._until = until
        self._cluster.at(self._cluster.now + self.random.uniform(0.0, 3.0), "fault")

    def act(self) -> None:
        if self._cluster.now < self._until:
            self.random.choice(self._kinds)()
            self._cluster.at(self._cluster.now + self.random.expovariate(1 / self._mean_gap_s), "fault")

    def stop(self) -> None:
        self._slow.clear()
        for member in self._cluster.members.values():
            member.paused_until = min(member.paused_until, self._cluster.now)
        self._heal()

    def sync_s(self, member: SimMember) -> float:
        if self._slow.get(member.id, 0.0) > self._cluster.now:
            return self.random.uniform(0.05, 0.4)
        return self.random.uniform(0.0001, 0.002)

    def _member(self) -> SimMember:
        return self._cluster.members[self.random.choice(sorted(self._cluster.members))]

    def _count(self, kind: str, member: SimMember | None = None) -> None:
        role = ("down" if member.replica is None else ("follower", "candidate", "leader")[member.replica.engine.role]) if member else ""
        self.counts[f"{kind} {role}".strip()] += 1
        self._cluster.note("fault", kind, member.id if member else "")

    def _crash(self) -> None:
        victims = [self._member()] if self.random.random() < 0.8 else list(self._cluster.members.values())
        for member in victims:
            if member.alive:
                self._count("crash", member)
                self._cluster.crash(member, self.random.uniform(0.05, 4.0))

    def _crash_inside(self) -> None:
        member = self._member()
        if member.alive:
            self._count("crash planned", member)
            member.disk.crash_at(self.random.randrange(12))

    def _partition(self) -> None:
        names = sorted(self._cluster.members)
        self.random.shuffle(names)
        side = set(names[: self.random.randrange(1, len(names))])
        cut = frozenset((a, b) for a in names for b in names if (a in side) != (b in side))
        self._set_cut(cut, "partition")

    def _one_way(self) -> None:
        a, b = self.random.sample(sorted(self._cluster.members), 2)
        self._set_cut(frozenset({(a, b)}), "one-way cut")

    def _set_cut(self, cut: frozenset[tuple[str, str]], kind: str) -> None:
        self._cluster.network.weather.cut = cut
        self._count(kind)
        self._cluster.refresh_links()

    def _pause(self) -> None:
        member = self._member()
        if member.alive:
            self._count("pause", member)
            member.paused_until = self._cluster.now + self.random.choice((0.3, 1.2, 5.0))

    def _weather(self) -> None:
        cut = self._cluster.network.weather.cut
        self._cluster.network.weather = Weather(
            loss=self.random.choice((0.0, 0.05, 0.3)),
            double=self.random.choice((0.0, 0.1)),
            slow=self.random.choice((0.0, 0.05, 0.3)),
            slow_s=self.random.choice((0.05, 0.5, 3.0)),
            cut=cut,
        )
        self._count("weather")

    def _slow_disk(self) -> None:
        member = self._member()
        self._count("slow disk", member)
        self._slow[member.id] = self._cluster.now + self.random.uniform(0.5, 5.0)

    def _heal(self) -> None:
        self._cluster.network.weather = Weather()
        self._count("heal")
        self._cluster.refresh_links()
