"""Clients that write, read and retry under one key, and remember what they were told."""

from __future__ import annotations

import hashlib
from random import Random
from typing import TYPE_CHECKING

import msgspec

from raftmeta.core.commands import Body, DeclareDeployment, DeleteVersion, Publish
from raftmeta.core.state import decode_outcome
from raftmeta.core.types import Policy, Side, VersionSummary
from raftmeta.log.messages import Proposal
from raftmeta.log.proposals import Result, encode_body
from tests.simulation.invariants import Violation

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.member import SimMember

ENDS_WITHIN_S = 8.0  # R12: an attempt's own limit of 2 s, and an election timeout or two in which a leader notices that it is none
STOP_BEFORE_END_S = 10.0  # the last operations need time to be answered


class Operation(msgspec.Struct):
    key: str
    body: Body
    attempt: int = 0
    answered: bool = False
    revision: int = 0
    code: str = ""
    began: float = 0.0


class Clients:
    def __init__(self, cluster: Cluster, random: Random, rate: float) -> None:
        self._cluster, self._random, self._rate = cluster, random, rate
        self._operations: list[Operation] = []
        self._newest_acknowledged = 0
        self._waiting: dict[tuple[SimMember, int, str], float] = {}  # attempts without an end, and when they began
        self._reads = 0
        self._reads_served = 0
        self._until = 0.0

    def start(self) -> None:
        plan = self._cluster.plan
        self._until = self._cluster.now + plan.stormy_s + plan.calm_s - STOP_BEFORE_END_S
        self._cluster.at(self._cluster.now + 0.5, self._next)

    def counts(self) -> tuple[int, int]:
        answered = sum(operation.answered for operation in self._operations)
        return len(self._operations) + self._reads, answered + self._reads_served

    def _next(self, _: object) -> None:
        self._look_at_the_oldest()
        if self._cluster.now < self._until:
            self._cluster.at(self._cluster.now + self._random.expovariate(self._rate), self._next)
            if self._random.random() < self._cluster.plan.reads:
                self._read()
            else:
                self._write()

    def _look_at_the_oldest(self) -> None:
        """Every attempt ends in a bounded time while its member runs."""
        while self._waiting:
            attempt, began = next(iter(self._waiting.items()))
            member, incarnation, key = attempt
            runs = member.alive and member.incarnation == incarnation and member.paused_until <= began
            if runs and self._cluster.now - began <= ENDS_WITHIN_S:
                return
            if runs:
                raise Violation(f"{member.id} has not said in {ENDS_WITHIN_S:g} s what became of {key}, which it was given at {began:.3f}")
            del self._waiting[attempt]

    def _write(self) -> None:
        number = len(self._operations)
        operation = Operation(f"{self._cluster.wall_ms():013d}-{number:08x}", self._body(number), began=self._cluster.now)
        self._operations.append(operation)
        self._try(operation)

    def _body(self, number: int) -> Body:
        model = f"model-{self._random.randrange(3)}"
        kind = self._random.random()
        if kind < 0.75:
            return _publish(model, f"v{number}")
        if kind < 0.9:
            return DeleteVersion(model, f"v{self._random.randrange(number + 1)}")
        return DeclareDeployment(f"d{number % 5}", model, Side("a", ("n1",)), Side("b", ("n2",)), Policy())

    def _try(self, operation: Operation) -> None:
        """One attempt at a random member, and the next one later if no answer came."""
        if operation.answered:
            return
        operation.attempt += 1
        cluster = self._cluster
        if operation.attempt > 1:
            cluster.count("client retry")
        member = cluster.members[self._random.choice(sorted(cluster.members))]
        cluster.at(cluster.now + self._random.uniform(1.0, 3.0), self._try, operation)
        if member.replica is None:
            return

        attempt = (member, member.incarnation, operation.key)
        self._waiting[attempt] = cluster.now

        def sink(result: Result) -> None:
            self._waiting.pop(attempt, None)
            cluster.note("answer", operation.key, result.code)
            if result.code == "ok" and result.outcome is not None:
                self._answered(operation, result.outcome.revision, result.outcome.code)

        proposal = Proposal(0, operation.key, "client", member.id, encode_body(operation.body))
        member.replica.propose(proposal, 2.0, sink)
        cluster.wake(member, cluster.now)

    def _answered(self, operation: Operation, revision: int, code: str) -> None:
        if operation.answered and (operation.revision, operation.code) != (revision, code):
            raise Violation(f"{operation.key} was answered twice: {operation.revision} {operation.code}, then {revision} {code}")
        between = self._cluster.faults.races.differ_without_a_third(operation.began)
        if between and not operation.answered:
            raise Violation(f"{operation.key} was written while the states of {between} differed and nobody could say whose is right")
        operation.answered, operation.revision, operation.code = True, revision, code
        self._newest_acknowledged = max(self._newest_acknowledged, revision)

    def _read(self) -> None:
        """A linearizable read sees every write that was acknowledged before it began."""
        cluster = self._cluster
        member = cluster.members[self._random.choice(sorted(cluster.members))]
        replica, floor = member.replica, self._newest_acknowledged
        self._reads += 1
        if replica is None:
            return

        def sink(code: str, index: int) -> None:
            if code == "ok":
                self._reads_served += 1
                if replica.state.revision < floor:
                    raise Violation(f"a read at {member.id} saw revision {replica.state.revision}, {floor} was acknowledged before")

        replica.read(2.0, sink)
        cluster.wake(member, cluster.now)

    def check(self) -> None:
        """No acknowledged write is lost, each key was applied once, every attempt ended, and in calm weather everything was answered."""
        replica = next(member.replica for member in self._cluster.members.values() if member.replica)
        for operation in self._operations:
            stored = replica.state.outcomes.get(operation.key)
            kept = decode_outcome(stored) if stored else None
            if not operation.answered:
                raise Violation(f"{operation.key} had no answer after {operation.attempt} attempts")
            if kept is None or (kept.revision, kept.code) != (operation.revision, operation.code):
                raise Violation(f"{operation.key} was acknowledged at {operation.revision} as {operation.code}, the state holds {kept}")
        commands = len(self._operations) + replica.state.feature_level - 1  # a new cluster raises its level itself, by one at a time
        if replica.state.revision != commands:
            raise Violation(f"revision {replica.state.revision} after {commands} commands: a key was applied twice or never")


def _publish(model: str, label: str) -> Publish:
    digest = hashlib.sha256(label.encode()).hexdigest()
    packed = label.encode() * 10
    return Publish(model, label, VersionSummary(digest, digest, digest, digest, hashlib.sha256(packed).hexdigest(), 10, 10, 1, 1), packed)
