"""Chains of faults that have to meet: what single ones drawn at random bring about once in ten thousand seeds.

Each is allowed of a correct cluster at any time, and other faults may break into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from raftmeta.log.setup import CANDIDATE, LEADER
from tests.simulation.invariants import Violation
from tests.simulation.member import SimMember
from tests.simulation.network import Weather

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.faults import Faults

LOOK_S = 0.0002  # shorter than any message takes
KNOWN_S = 14.0  # an election and the leader's next report: until then two members that differ may not know it
DIFFER_S = 25.0
LATE_S = 2.5  # an election and some writes under the next leader
NOTICED_S = 2.5  # an election timeout and what is under way


class TwoDiffer(msgspec.Struct, frozen=True):
    """One of two members that hear each other holds another state than its log says; nobody hears the third."""

    since: float
    incarnations: dict[str, int]
    weather: Weather  # in which no report is lost


class Absence(msgspec.Struct, frozen=True):
    """One member is away; who led when that began, and the count of everything that befell anybody until then."""

    away: SimMember
    leader: SimMember
    term: int
    weather: Weather
    disturbances: int


class Races:
    def __init__(self, cluster: Cluster, faults: Faults) -> None:
        self._cluster, self._faults = cluster, faults
        self._differ: TwoDiffer | None = None

    def vote_race(self) -> None:
        """An election that one member sleeps through; then its voter starts again and meets that member before it heard who was elected."""
        leader = self._leader_of_three()
        if leader is None or leader.replica is None:
            return
        self._faults.count("vote race")
        aside = self._faults.random.choice(self._others(leader))
        self._isolate(aside)
        term, until = leader.replica.engine.term, self._cluster.now + 3.0
        self._cluster.crash(leader, 0.02)
        self._cluster.at(self._cluster.now + LOOK_S, self._when_elected, (aside, term, until))

    def _when_elected(self, waiting: tuple[str, int, float]) -> None:
        aside, term, until = waiting
        members = self._cluster.members
        elected = next((m.id for m in members.values() if m.role == LEADER and m.replica and m.replica.engine.term > term), None)
        if elected is None:
            if self._cluster.now < until:
                self._cluster.at(self._cluster.now + LOOK_S, self._when_elected, waiting)
            return
        self._isolate(elected)
        voter = next(member for name, member in members.items() if name not in (aside, elected))
        if voter.alive and elected != aside:
            self._cluster.crash(voter, 0.02)
        self._heal_after(4.0)

    def flip_race(self) -> None:
        """Two of three hold writes; then one of the two finds its disk damaged, and can meet only the third, who lacks them."""
        leader = self._leader_of_three()
        if leader is None:
            return
        holder, behind = self._faults.random.sample(self._others(leader), 2)
        self._isolate(behind)
        self._faults.count("flip race")

        def damage(_: object) -> None:
            if self._faults.damage.flip(self._cluster.members[holder], down_s=0.05):
                self._isolate(leader.id)
            self._heal_after(4.0)

        self._cluster.at(self._cluster.now + 0.8, damage)

    def two_differ(self) -> None:
        """The state of a member is changed, and of the two others one hears nobody for as long as it takes to find out and more."""
        leader = self._leader_of_three()
        if leader is None:
            return
        first, second, third = self._faults.random.sample(sorted(self._cluster.members), 3)
        if not self._faults.damage.change_state(self._cluster.members[first]):
            return
        self._faults.count("two that differ")
        self._cluster.network.weather = Weather()
        self._isolate(third)
        incarnations = {name: self._cluster.members[name].incarnation for name in (first, second)}
        self._differ = TwoDiffer(self._cluster.now, incarnations, self._cluster.network.weather)
        self._heal_after(DIFFER_S)

    def differ_without_a_third(self, began: float) -> str:
        """The members whose states have differed for so long, when an operation began, that nothing may be written now; "" for none."""
        found = self._differ
        if found is None or began < found.since + KNOWN_S:
            return ""
        members = [self._cluster.members[name] for name in found.incarnations]
        undisturbed = self._cluster.network.weather is found.weather and all(
            member.alive and member.incarnation == found.incarnations[member.id] and member.paused_until <= found.since
            for member in members
        )
        return " and ".join(found.incarnations) if undisturbed and any(member.diverged for member in members) else ""

    def deaf_leader(self) -> None:
        """A leader that hears late: answers to what it once asked arrive when somebody else leads, whom nobody stops or whom it chose."""
        leader = self._leader()
        if leader is None:
            return
        self._faults.count("deaf leader")
        if self._faults.random.random() < 0.5:
            self.transfer()
            self._cluster.at(self._cluster.now + LOOK_S, self._when_handed_over, (leader, self._cluster.now + 1.0))
        else:
            self._cluster.network.weather = Weather(late_to=leader.id, slow_s=LATE_S)
            self._faults.set_cut(frozenset((leader.id, other) for other in self._others(leader)), "one-way cut")
            self._heal_after(4.0)

    def _when_handed_over(self, waiting: tuple[SimMember, float]) -> None:
        leader, until = waiting
        if any(member.role == CANDIDATE for member in self._cluster.members.values()):
            self._cluster.network.weather = Weather(late_to=leader.id, slow_s=LATE_S)
            self._heal_after(4.0)
        elif self._cluster.now < until:
            self._cluster.at(self._cluster.now + LOOK_S, self._when_handed_over, waiting)

    def blink(self) -> None:
        """Everybody loses the link to the leader for as long as it takes to ask for votes, which may get lost."""
        leader = self._leader()
        if leader is None:
            return
        self._faults.count("blink")
        self._cluster.network.weather = Weather(loss=self._faults.random.choice((0.0, 0.5)))
        self._isolate(leader.id)
        self._heal_after(self._faults.random.uniform(0.1, 0.4))

    def transfer(self) -> None:
        """Leadership is handed over."""
        leader = self._leader()
        if leader is None or leader.replica is None:
            return
        target, engine = self._faults.random.choice(self._others(leader)), leader.replica.engine
        if leader.replica.transfer(target):
            self._faults.count("transfer")
            self._cluster.wake(leader, self._cluster.now)
        elif leader.replica.is_connected(target) and target in engine.configuration.ids:
            raise Violation(f"{leader.id} leads and does not hand over to {target}, which follows it")

    def absence(self) -> None:
        """One member hears nobody for a while: a leader notices that it leads no more, a follower that comes back deposes nobody."""
        leader = self._leader()
        if leader is None or leader.replica is None or not self._faults.nothing_lasts():
            return
        away = self._faults.pick()
        self._faults.count("absence")
        self._cluster.network.weather = Weather()
        self._isolate(away.id)
        watch = Absence(away, leader, leader.replica.engine.term, self._cluster.network.weather, self._faults.disturbances)
        if away is leader:
            self._cluster.at(self._cluster.now + NOTICED_S, self._leads_no_more, watch)
            self._heal_after(NOTICED_S + 1.0)
        else:
            self._cluster.at(self._cluster.now + 4.0, self._is_back, watch)

    def _leads_no_more(self, watch: Absence) -> None:
        if self._is_undisturbed(watch) and watch.away.role == LEADER:
            raise Violation(f"{watch.away.id} still leads, {NOTICED_S:g} s after anybody could hear it")

    def _is_back(self, watch: Absence) -> None:
        if self._cluster.network.weather is not watch.weather:
            return
        undisturbed = self._is_undisturbed(watch) and self._still_leads(watch)
        self._faults.heal()
        if undisturbed:
            again = msgspec.structs.replace(watch, weather=self._cluster.network.weather, disturbances=self._faults.disturbances)
            self._cluster.at(self._cluster.now + 2.0, self._deposed_nobody, again)

    def _deposed_nobody(self, watch: Absence) -> None:
        if self._is_undisturbed(watch) and not self._still_leads(watch):
            raise Violation(f"{watch.leader.id} was deposed by {watch.away.id}, which had been away")

    def _still_leads(self, watch: Absence) -> bool:
        replica = watch.leader.replica
        return replica is not None and (replica.engine.role, replica.engine.term) == (LEADER, watch.term)

    def _is_undisturbed(self, watch: Absence) -> bool:
        return self._cluster.network.weather is watch.weather and self._faults.disturbances == watch.disturbances

    def _heal_after(self, seconds: float) -> None:
        weather = self._cluster.network.weather

        def heal(_: object) -> None:
            if self._cluster.network.weather is weather:  # nothing came in between
                self._faults.heal()

        self._cluster.at(self._cluster.now + seconds, heal)

    def _isolate(self, name: str) -> None:
        others = [other for other in self._cluster.members if other != name]
        self._faults.set_cut(frozenset(pair for other in others for pair in ((name, other), (other, name))), "partition")

    def _leader(self) -> SimMember | None:
        return next((member for member in self._cluster.members.values() if member.role == LEADER), None)

    def _leader_of_three(self) -> SimMember | None:
        return self._leader() if len(self._cluster.members) == 3 else None

    def _others(self, leader: SimMember) -> list[str]:
        return [name for name in sorted(self._cluster.members) if name != leader.id]
