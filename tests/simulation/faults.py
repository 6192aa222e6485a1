"""Faults, drawn from the seed, and how often each one met which role.

At most one member at a time is damaged (bits flipped on its disk, its state changed behind its back): what two damaged members hold may be
gone for good, and nothing is promised then. It counts as whole again once it has caught up without a difference, or came up undamaged.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

import msgspec

from tests.simulation.damage import Damage
from tests.simulation.member import SimMember
from tests.simulation.membership import Membership
from tests.simulation.network import Weather
from tests.simulation.races import Races

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

ROLES = ("follower", "candidate", "leader")
BY_ROLE = ("crash", "crash planned", "pause", "slow disk", "EIO", "ENOSPC", "clock jump")
ANY = (
    "crash inside a step", "partition", "partial partition", "one-way cut", "weather", "loss", "duplication", "delay", "heal",
    "bit flip", "state changed", "set aside", "snapshot installed", "member removed", "member added", "client retry", "stale message",
    "vote race", "flip race", "two that differ", "deaf leader", "blink", "transfer", "absence",
    "two states changed", "disk replaced", "old file", "refused",
)  # fmt: skip
EXPECTED = (*(f"{kind} {role}" for kind in BY_ROLE for role in ("follower", "leader")), *ANY)  # none may stay at zero over many seeds


class Faults:
    def __init__(self, cluster: Cluster, random: Random, kinds: Sequence[str] = (), gap_s: float = 0.0) -> None:
        self._cluster, self.random = cluster, random
        self.counts: Counter[str] = Counter()
        self.disturbances = 0  # faults so far, of all kinds
        self._until = 0.0
        self._slow: dict[str, float] = {}  # member -> slow disk until
        self._mean_gap_s = gap_s or random.choice((0.3, 1.0, 3.0))
        self.damage = Damage(cluster, self)
        self._membership = Membership(cluster, self)
        self.races = Races(cluster, self)
        table: dict[str, tuple[Callable[[], None], int]] = {
            "crash": (self._crash, 3),
            "crash_inside": (self._crash_inside, 3),
            "partition": (self._partition, 2),
            "partial": (self._partial, 1),
            "one_way": (self._one_way, 2),
            "pause": (self._pause, 2),
            "weather": (self._weather, 3),
            "late": (self._late, 1),
            "doubling": (self._doubling, 1),
            "slow_disk": (self._slow_disk, 2),
            "heal": (self.heal, 3),
            "io_error": (self._io_error, 1),
            "full_disk": (self._full_disk, 1),
            "clock_jump": (self._clock_jump, 1),
            "flip": (self.damage.flip_any, 1),
            "change_state": (self.damage.change_any, 1),
            "wipe": (self.damage.wipe, 1),
            "old_file": (self.damage.copy_a_file, 1),
            "change_two": (self.damage.change_two_of_five, 1),
            "membership": (self._membership.change, 1),
            "vote_race": (self.races.vote_race, 1),
            "flip_race": (self.races.flip_race, 1),
            "two_differ": (self.races.two_differ, 1),
            "deaf_leader": (self.races.deaf_leader, 1),
            "blink": (self.races.blink, 1),
            "absence": (self.races.absence, 1),
            "transfer": (self.races.transfer, 1),
        }
        chosen = [table[kind] for kind in kinds or table]
        self._kinds, self._weights = [act for act, _ in chosen], [weight for _, weight in chosen]

    def start(self, until: float) -> None:
        self._until = until
        self._cluster.at(self._cluster.now + self.random.uniform(0.0, 3.0), self._act)

    def stop(self, _: object) -> None:
        """The calm begins."""
        self._slow.clear()
        for member in self._cluster.members.values():
            member.paused_until = min(member.paused_until, self._cluster.now)
            member.wall_offset_ms = 0
            member.disk.heal()
            self._free(member)
            if member.alive:
                self._cluster.wake(member, self._cluster.now)
        self.heal()
        self._membership.restore()

    def ended(self, member: SimMember) -> None:
        """Its process is gone in the middle of a step."""
        if not member.set_aside_now:
            self.counts["crash inside a step"] += 1
        member.set_aside_now = False

    def sync_s(self, member: SimMember) -> float:
        if self._slow and self._slow.get(member.id, 0.0) > self._cluster.now:
            return self.random.uniform(0.05, 0.4)
        return self.random.uniform(0.0001, 0.002)

    def nothing_lasts(self) -> bool:
        """Whether no member sleeps or waits for its disk because of an earlier fault."""
        now = self._cluster.now
        asleep = any(member.paused_until > now or not member.alive for member in self._cluster.members.values())
        return not asleep and all(until <= now for until in self._slow.values())

    def pick(self) -> SimMember:
        return self._cluster.members[self.random.choice(sorted(self._cluster.members))]

    def count(self, kind: str, member: SimMember | None = None) -> None:
        role = ("down" if member.replica is None else ROLES[member.replica.engine.role]) if member else ""
        self.counts[f"{kind} {role}".strip()] += 1
        self.disturbances += kind != "client retry"
        self._cluster.note("fault", kind, member.id if member else "")

    def _act(self, _: object) -> None:
        if self._cluster.now < self._until:
            self.random.choices(self._kinds, self._weights)[0]()
            self._cluster.at(self._cluster.now + self.random.expovariate(1 / self._mean_gap_s), self._act)

    # ------------------------------------------------------------------ processes

    def _crash(self) -> None:
        victims = [self.pick()] if self.random.random() < 0.8 else list(self._cluster.members.values())
        for member in victims:
            if member.alive:
                self.count("crash", member)
                self._cluster.crash(member, self.random.uniform(0.05, 4.0))

    def _crash_inside(self) -> None:
        member = self.pick()
        if member.alive:
            self.count("crash planned", member)
            member.disk.crash_at(self.random.randrange(12))

    def _pause(self) -> None:
        member = self.pick()
        if member.alive:
            self.count("pause", member)
            member.paused_until = self._cluster.now + self.random.choice((0.3, 1.2, 5.0))

    def _clock_jump(self) -> None:
        member = self.pick()
        self.count("clock jump", member)
        member.wall_offset_ms = self.random.choice((-3_600_000, -1_000, 1_000, 3_600_000))

    # ------------------------------------------------------------------ disks

    def _slow_disk(self) -> None:
        member = self.pick()
        self.count("slow disk", member)
        self._slow[member.id] = self._cluster.now + self.random.uniform(0.5, 5.0)

    def _io_error(self) -> None:
        """The next such call fails; the member must end, and starts again on what the disk really holds."""
        member = self.pick()
        if member.alive:
            self.count("EIO", member)
            member.disk.fail(self.random.choice(("fdatasync", "pwrite", "fsync")), errno.EIO, skip=self.random.randrange(3))

    def _full_disk(self) -> None:
        member = self.pick()
        if member.alive and member.disk.capacity_bytes is None:
            self.count("ENOSPC", member)
            member.disk.capacity_bytes = member.disk.used_bytes() + self.random.choice((0, 4_096, 40_000))
            self._cluster.at(self._cluster.now + self.random.uniform(0.5, 8.0), self._free, member)

    def _free(self, member: SimMember) -> None:
        member.disk.capacity_bytes = None

    # ------------------------------------------------------------------ the network

    def _partition(self) -> None:
        names = sorted(self._cluster.members)
        self.random.shuffle(names)
        side = set(names[: self.random.randrange(1, len(names))])
        self.set_cut(frozenset((a, b) for a in names for b in names if (a in side) != (b in side)), "partition")

    def _partial(self) -> None:
        """Two members do not hear each other; somebody between them hears both."""
        a, b = self.random.sample(sorted(self._cluster.members), 2)
        self.set_cut(frozenset({(a, b), (b, a)}), "partial partition")

    def _one_way(self) -> None:
        a, b = self.random.sample(sorted(self._cluster.members), 2)
        self.set_cut(frozenset({(a, b)}), "one-way cut")

    def set_cut(self, cut: frozenset[tuple[str, str]], kind: str) -> None:
        self._cluster.network.weather = msgspec.structs.replace(self._cluster.network.weather, cut=cut)
        self.count(kind)
        self._cluster.refresh_links()

    def _weather(self) -> None:
        cut = self._cluster.network.weather.cut
        self._cluster.network.weather = Weather(
            loss=self.random.choice((0.0, 0.05, 0.3)),
            double=self.random.choice((0.0, 0.1)),
            slow=self.random.choice((0.0, 0.05, 0.3)),
            slow_s=self.random.choice((0.05, 0.5, 3.0)),
            cut=cut,
        )
        self.count("weather")

    def _late(self) -> None:
        """Most messages take longer than an election."""
        self._cluster.network.weather = Weather(slow=0.6, slow_s=3.0, cut=self._cluster.network.weather.cut)
        self.count("weather")

    def _doubling(self) -> None:
        """Nearly every message arrives twice."""
        self._cluster.network.weather = Weather(double=0.9, slow=0.3, slow_s=0.05, cut=self._cluster.network.weather.cut)
        self.count("weather")

    def heal(self) -> None:
        self._cluster.network.weather = Weather()
        self.count("heal")
        self._cluster.refresh_links()
