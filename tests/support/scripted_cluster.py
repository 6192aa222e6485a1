"""Scripted members together: their network, their client, and the death of one of them at a chosen call of its disk.

Virtual time jumps from deadline to deadline. The client repeats a command under its key until it is acknowledged, and after a restart first
looks whether all that was acknowledged before is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pysyncobj.syncobj

from raftmeta.core.state import State
from raftmeta.core.types import Outcome
from raftmeta.log.configuration import MemberSpec, configuration_of
from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.marker import Marker, write_marker
from raftmeta.log.messages import AnyMessage, Proposal
from raftmeta.log.peers import Connected, Disconnected, Received
from raftmeta.log.proposals import Result, encode_body
from raftmeta.log.quarantine import Quarantined
from raftmeta.log.setup import LEADER
from tests.support.memory_disk import MemoryDisk, PowerLost
from tests.support.scripted_member import CLUSTER_ID, DATA, SEGMENT_BYTES, ScriptedMember
from tests.support.state_hash import recompute_hash
from tests.support.trio import publish

EXCHANGE = ExchangeSettings(entries=6, keep_entries=2, keep_files=2)
HOP_S = 0.001  # a message takes one turn
MAX_TURNS = 20_000  # of one wait; more means that nothing moves
ATTEMPTS = 20  # of a client


class Crash(NamedTuple):
    """How a member's machine ends, and how much of what was not synced is there afterwards."""

    name: str
    keep: float | None  # share of the un-synced changes that survive; None: only the process dies, all of them are readable
    seed: int = 0
    again: int = -1  # the power goes once more before this call of the restart


class Members:
    """A cluster of one or three, its network and its client. The first in `names` leads first and is the one that dies."""

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        disk: MemoryDisk | None = None,
        exchange: ExchangeSettings = EXCHANGE,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`disk`: of the member that dies."""
        self.now = 100.0
        self.names, self.exchange, self.segment_bytes = names, exchange, segment_bytes
        self.apart: set[str] = set()  # members without a link to anyone
        self.acknowledged: dict[str, Outcome] = {}  # by key
        self.proposed: set[str] = set()  # keys
        self.crashes = 0
        self._crash: Crash | None = None
        self._unchecked = False  # somebody restarted since the last look at what was acknowledged
        pysyncobj.syncobj.monotonicTime = lambda: self.now
        self.members = {name: ScriptedMember(name, self, MemoryDisk(1)) for name in names}
        self.victim = self.members[names[0]]
        self.victim.disk = disk or self.victim.disk
        configuration = configuration_of(tuple(MemberSpec(name, f"zone-{name}", "", "") for name in names))
        for member in self.members.values():
            write_marker(member.disk, DATA, Marker(CLUSTER_ID, configuration))

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + int(self.now * 1000)

    # what a script does

    def plan(self, call: int, crash: Crash) -> None:
        """Let the victim die before this call of its disk, counted from now."""
        self._crash = crash
        self.victim.disk.crash_at(call)

    def start(self) -> None:
        for member in self.members.values():
            self._boot(member)

    def restart(self, member: ScriptedMember, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Stop the process in good order, and start it again."""
        assert member.journal is not None
        try:
            member.journal.close()
        except PowerLost:
            self._died(member)
        else:
            self._end(member)
            meanwhile()
            self._boot(member)

    def isolate(self, member: ScriptedMember) -> None:
        self._unlink(member)
        self.apart.add(member.name)

    def heal(self, member: ScriptedMember) -> None:
        self.apart.discard(member.name)
        self._link(member)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass. Whether `until` came true."""
        end = self.now + seconds
        for _ in range(MAX_TURNS):
            if until():
                return True
            if self.now >= end:
                return False
            self._turn(end)
        raise AssertionError(f"{MAX_TURNS} turns within {seconds} virtual seconds")

    def leader(self) -> ScriptedMember:
        """Who leads and may answer. After a restart it must hold all that was acknowledged before."""
        assert self.run(20.0, lambda: self._leading() is not None), "no leader"
        leader = self._leading()
        assert leader is not None and leader.replica is not None
        if self._unchecked:
            self._unchecked = False
            self.check_acknowledged(leader.replica.state)
        return leader

    def write(self, *labels: str) -> None:
        """Publish these and wait for every acknowledgement, however often it takes."""
        for _ in range(ATTEMPTS):
            missing = [label for label in labels if f"key-{label}" not in self.acknowledged]
            if not missing:
                return
            leader = self.leader()
            results = self.propose(leader, *missing)
            incarnation = leader.incarnation
            self.run(3.0, lambda: len(results) == len(missing) or leader.incarnation != incarnation)  # noqa: B023 - used in this turn only
        raise AssertionError(f"{missing} were not acknowledged in {ATTEMPTS} attempts")

    def propose(self, member: ScriptedMember, *labels: str) -> list[Result]:
        """The list into which the results will come, in the order in which they become known."""
        results: list[Result] = []
        for label in labels:
            key = f"key-{label}"
            self.proposed.add(key)

            def sink(result: Result, key: str = key) -> None:
                results.append(result)
                if result.code == "ok" and result.outcome is not None:
                    outcome = msgspec.structs.replace(result.outcome, repeated=False)
                    assert self.acknowledged.setdefault(key, outcome) == outcome, f"{key} was acknowledged with two outcomes"

            if member.replica is not None:
                member.replica.propose(Proposal(0, key, "me", member.name, encode_body(publish(label))), 3.0, sink)
        return results

    def converge(self) -> None:
        """Everyone up, linked, with the same log applied, and quiet."""
        assert self.run(60.0, self._level), "the members do not become level"
        self.run(0.1)

    # what must hold

    def check_acknowledged(self, state: State) -> None:
        for key, outcome in self.acknowledged.items():
            found = state.outcome(key)
            assert found is not None, f"{key} was acknowledged and is lost"
            assert (found.revision, found.code, found.result) == (outcome.revision, outcome.code, outcome.result), key

    def check(self) -> None:
        """At the end of a script that repeated every command until it was acknowledged."""
        assert self.proposed == set(self.acknowledged)
        revisions = sorted(outcome.revision for outcome in self.acknowledged.values())
        assert revisions == list(range(1, len(revisions) + 1)), "a key was applied twice"
        hashes = set()
        for member in self.members.values():
            assert member.replica is not None
            state = member.replica.state
            self.check_acknowledged(state)
            assert state.revision == len(revisions), f"{member.name} is at revision {state.revision}, {len(revisions)} keys were used"
            assert state.state_hash == recompute_hash(state), member.name
            hashes.add(state.state_hash)
        assert len(hashes) == 1, "the members' states differ"

    # inside

    def deliver(self, sender: str, receiver: str, message: AnyMessage) -> None:
        if self._linked(sender, receiver) and self.members[receiver].replica is not None:
            self.members[receiver].inbox.append(Received(sender, message))

    def _turn(self, end: float) -> None:
        due = min(member.due() for member in self.members.values())
        self.now = min(max(self.now + HOP_S, due), end)
        for member in self.members.values():
            if member.due() <= self.now:
                try:
                    member.step()
                except PowerLost:
                    self._died(member)
                except Quarantined:
                    self.restart(member)

    def _boot(self, member: ScriptedMember) -> None:
        try:
            member.boot()
        except PowerLost:
            self._died(member)
        else:
            self._unchecked = True
            self._link(member)

    def _died(self, member: ScriptedMember) -> None:
        crash = self._crash
        assert crash is not None and member is self.victim and self.crashes < 2
        self.crashes += 1
        self._end(member)
        member.disk.random.seed(f"{crash.seed} {member.disk.calls}")
        if crash.keep is None:
            member.disk.kill()
        else:
            member.disk.crash(crash.keep)
        if crash.again >= 0 and self.crashes == 1:
            member.disk.crash_at(crash.again)
        self._boot(member)

    def _end(self, member: ScriptedMember) -> None:
        member.down()
        self._unlink(member)

    def _linked(self, one: str, other: str) -> bool:
        return one != other and one not in self.apart and other not in self.apart

    def _peers(self, member: ScriptedMember) -> list[ScriptedMember]:
        """Those with which it has a link, should it be up."""
        return [other for other in self.members.values() if self._linked(member.name, other.name) and other.replica is not None]

    def _link(self, member: ScriptedMember) -> None:
        for other in self._peers(member) if member.replica is not None else ():
            member.inbox.append(Connected(other.name, other.incarnation))
            other.inbox.append(Connected(member.name, member.incarnation))

    def _unlink(self, member: ScriptedMember) -> None:
        for other in self._peers(member):
            member.inbox.append(Disconnected(other.name))
            other.inbox.append(Disconnected(member.name))

    def _leading(self) -> ScriptedMember | None:
        found = [
            (member.replica.engine.term, member)
            for member in self.members.values()
            if member.replica is not None and member.name not in self.apart
            if member.replica.engine.role == LEADER and member.replica.engine.may_serve_reads
        ]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def _level(self) -> bool:
        engines = [member.replica.engine for member in self.members.values() if member.replica is not None]
        if self.apart or len(engines) < len(self.members) or self._leading() is None or any(engine.joining for engine in engines):
            return False
        return len({(engine.term, engine.last_index, engine.commit_index, engine.applied_index) for engine in engines}) == 1 and all(
            engine.applied_index == engine.last_index for engine in engines
        )
