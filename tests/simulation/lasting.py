"""One lasting fault in an otherwise calm simulation: what it does to leadership, and to the writes of clients.

The seeds of the storm draw short faults that mix; what operators reported were single ones that stayed for minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise

import msgspec

from raftmeta.log.guard import Rules
from raftmeta.log.setup import LEADER
from tests.simulation.cluster import Cluster, Plan
from tests.simulation.member import SimMember

BEGINS_S = 5.0  # by then a leader has been elected, and the one fault that a plan must name is over
CALM_S = 12.0


class Seen(msgspec.Struct):
    """What happened while the fault lasted."""

    leader_changes: int
    longest_gap_s: float  # in which no write of any client was acknowledged


class LastingFault(Cluster):
    def __init__(self, lasts_s: float, rules: Rules | None = None) -> None:
        """`kinds` of the plan must name something; once, while nothing is there to heal, is as good as never."""
        plan = Plan(1, stormy_s=BEGINS_S + lasts_s, calm_s=CALM_S, rate=2.0, rules=rules or Rules(), kinds=("heal",), gap_s=lasts_s * 100)
        super().__init__(plan)
        self._lasts_s = lasts_s
        self._answered_at: list[float] = []
        self.slow_syncs: dict[str, float] = {}  # member -> s of each of its steps

    def watch(self, begin: Callable[[], None]) -> Seen:
        """Run with `begin` called once a leader has been elected; the calm at the end takes the fault back, and all must converge."""
        began, ends = self.now + BEGINS_S, self.now + BEGINS_S + self._lasts_s
        counted: list[int] = []

        def start(_: object) -> None:
            counted.append(self.invariants.leader_changes)
            begin()

        def end(_: object) -> None:
            counted.append(self.invariants.leader_changes)
            self.slow_syncs.clear()

        self.at(began, start)
        self.at(ends - 0.001, end)
        self.run()
        times = [began, *(time for time in self._answered_at if began <= time <= ends), ends]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return Seen(counted[1] - counted[0], max(gaps))

    def leader(self) -> SimMember:
        (leader,) = (member for member in self.members.values() if member.role == LEADER)
        return leader

    def followers(self) -> list[SimMember]:
        return [member for member in self.members.values() if member.role != LEADER]

    def cut(self, pairs: Collection[tuple[SimMember, SimMember]]) -> None:
        """Nothing passes between these, either way."""
        self.faults.set_cut(frozenset(way for a, b in pairs for way in ((a.id, b.id), (b.id, a.id))), "partition")

    def sync_s(self, member: SimMember) -> float:
        return self.slow_syncs.get(member.id) or super().sync_s(member)

    def note(self, *what: object) -> None:
        super().note(*what)
        if what[0] == "answer" and what[2] == "ok":
            self._answered_at.append(self.now)
