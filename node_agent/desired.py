"""What the control plane wants, as far as this node is concerned: deployments and rollouts as last heard. Pure.

Fed by a list and then by the watch's changes, one revision at a time. Each record is judged by itself, whose it is first: one that cannot
be read is the trouble of its own deployment, and of nobody when that is another node's. Goals are made of it once the committed label is
resolved to the bytes that it names. An attestation counts only if this start of the agent made it: an earlier start's memory is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from node_agent.plan import Change, Drain, Goal, Order, Target
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import DrainOverdue, Phase, RolloutKind, RolloutStatus, SideName, Stage

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # what the node's record and a float can hold


class SideView(msgspec.Struct, frozen=True):
    nodes: tuple[str, ...]


class PolicyView(msgspec.Struct, frozen=True):
    """The fields of a policy that an agent needs; members of an earlier build do not give them."""

    drain_timeout_ms: Count = 60_000
    drain_overdue: DrainOverdue = DrainOverdue.WAIT


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a deployment is: all that is read of one that does not list this node."""

    name: str
    primary: SideView
    standby: SideView | None

    def side_of(self, node: str) -> SideName | None:
        if node in self.primary.nodes:
            return SideName.PRIMARY
        return SideName.STANDBY if self.standby is not None and node in self.standby.nodes else None


class Sides(Listing, frozen=True, kw_only=True):
    """Which side takes requests: heard also of a deployment whose other fields this build cannot read."""

    order_revision: Count
    serving_side: SideName = SideName.PRIMARY
    failover: dict[str, Any] | None = None

    @property
    def decided_side(self) -> SideName | None:
        """The side that a fail-over named, None while there was none: then both sides answer."""
        return None if self.failover is None else self.serving_side


class DeploymentView(Sides, frozen=True, kw_only=True):
    """The fields of a deployment that an agent needs; others are ignored."""

    model: str
    version: str
    previous: str
    rollout_id: str
    policy: PolicyView = PolicyView()


class AttestationView(msgspec.Struct, frozen=True):
    node: str
    stage: Stage
    boot_id: str


class RolloutView(msgspec.Struct, frozen=True):
    id: str
    deployment: str
    model: str
    to_version: str
    checksum: str
    vector_root: str
    phase: Phase
    status: RolloutStatus
    attestations: tuple[AttestationView, ...]
    kind: RolloutKind = RolloutKind.ACTIVATE

    @property
    def target(self) -> Target:
        return Target(self.model, self.to_version, self.checksum, self.vector_root)


class Identity(NamedTuple):
    node: str
    boot_id: str


class Event(NamedTuple):
    """One change of one record; the client's own type fits."""

    kind: str
    key: str
    op: str
    value: Mapping[str, Any] | None


class Heard(NamedTuple):
    """A deployment as far as its record could be read."""

    listing: Listing | None = None  # None: not even whose it is
    sides: Sides | None = None  # of this node's own
    record: DeploymentView | None = None
    fault: str = ""  # why not all of it, "" for one that is not this node's


class Desired:
    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.generation = 0
        self._deployments: dict[str, Heard] = {}
        self._rollouts: dict[str, RolloutView] = {}  # by deployment, the last one heard of
        self._nameless = ""  # why a record of the last list cannot even be named
        self._unread = 0  # rollouts that were told and could not be read

    def replace(self, generation: int, records: Iterable[Any]) -> None:
        """Everything anew, from a list. Rollouts are to be asked for."""
        self.generation = generation
        self._deployments, self._rollouts, self._nameless = {}, {}, ""
        for record in records:
            name = record.get("name") if isinstance(record, Mapping) else None
            if isinstance(name, str):
                self._deployments[name] = self._hear(name, record)
            else:
                self._nameless = "the control plane listed a deployment without a name"

    def apply(self, generation: int, events: Iterable[Any]) -> None:
        """All events of one revision."""
        self.generation = max(self.generation, generation)
        for event in events:
            if event.kind == "deployment":
                self._deployments.pop(event.key, None)
                if event.op == "put":
                    self._deployments[event.key] = self._hear(event.key, event.value)
            elif event.kind == "rollout" and event.op == "put":
                self._hear_rollout(event)

    def _hear(self, name: str, value: object) -> Heard:
        heard = Heard()
        try:
            listing: Listing = read(value, Listing)
            if listing.name != name:
                raise RaftmetaError("bad_json", f"the control plane sent the deployment {listing.name[:140]!r} as {name[:140]!r}")
            heard = Heard(listing)
            if listing.side_of(self._identity.node) is not None:
                heard = heard._replace(sides=read(value, Sides))
                heard = heard._replace(record=read(value, DeploymentView))
        except RaftmetaError as fault:
            return heard._replace(fault=str(fault))
        return heard

    def _hear_rollout(self, event: Any) -> None:
        """One that cannot be read is no longer known: whose deployment it is of has to ask for it."""
        try:
            rollout: RolloutView = read(event.value, RolloutView)
        except RaftmetaError:
            self._unread += 1
            self._rollouts = {name: other for name, other in self._rollouts.items() if other.id != event.key}
        else:
            self._rollouts[rollout.deployment] = rollout

    def mine(self) -> list[DeploymentView]:
        """The deployments that list this node and could be read, by name."""
        return [heard.record for _, heard in sorted(self._deployments.items()) if heard.record is not None]

    def sides(self) -> list[Sides]:
        """Of the deployments that list this node, also where no more could be read."""
        return [heard.sides for _, heard in sorted(self._deployments.items()) if heard.sides is not None]

    def find(self, name: str) -> DeploymentView | None:
        heard = self._deployments.get(name)
        return None if heard is None else heard.record

    def stays(self, name: str) -> bool:
        """Nothing that was heard says that this deployment does not list the node."""
        heard = self._deployments.get(name)
        if heard is None:
            return bool(self._nameless)
        return heard.listing is None or heard.listing.side_of(self._identity.node) is not None

    def faults(self) -> dict[str, str]:
        """By deployment, why its record could not be read; "" for one without a name."""
        nameless = {"": self._nameless} if self._nameless else {}
        return nameless | {name: heard.fault for name, heard in self._deployments.items() if heard.fault}

    def stamp(self, name: str) -> tuple[object, ...]:
        """Equal as long as nothing was heard that may concern the deployment."""
        return self.generation, self._deployments.get(name), self._rollouts.get(name), self._unread

    def lacks_rollout(self, deployment: DeploymentView) -> bool:
        rollout = self._rollouts.get(deployment.name)
        return bool(deployment.rollout_id) and (rollout is None or rollout.id != deployment.rollout_id)

    def learn(self, deployment: DeploymentView, rollout: RolloutView) -> None:
        """What was asked for. Raises RaftmetaError bad_json for another one."""
        if (rollout.id, rollout.deployment) != (deployment.rollout_id, deployment.name):
            raise RaftmetaError("bad_json", f"the control plane sent no rollout {deployment.rollout_id!r} of {deployment.name!r}")
        self._rollouts[deployment.name] = rollout

    def known_target(self, deployment: DeploymentView) -> Target | None:
        """What the committed label names, if the last rollout says so."""
        rollout = self._rollouts.get(deployment.name)
        if rollout is not None and (rollout.id, rollout.to_version) == (deployment.rollout_id, deployment.version):
            return rollout.target
        return None

    def goal(self, deployment: DeploymentView, committed: Target | None) -> Goal:
        """`committed` is what `deployment.version` names, None when nothing was activated yet."""
        side = deployment.side_of(self._identity.node)
        assert side is not None, deployment.name
        order = Order(self.generation, deployment.order_revision)
        drain = Drain(deployment.policy.drain_timeout_ms / 1000, deployment.policy.drain_overdue)
        return Goal(deployment.name, side, committed, order, self._change(deployment), drain=drain)

    def _change(self, deployment: DeploymentView) -> Change | None:
        rollout = self._rollouts.get(deployment.name)
        if rollout is None or rollout.id != deployment.rollout_id or rollout.status is not RolloutStatus.RUNNING:
            return None
        mine = [item.stage for item in rollout.attestations if (item.node, item.boot_id) == self._identity]
        return Change(rollout.id, rollout.phase, rollout.target, mine[0] if mine else None, rollout.kind is RolloutKind.ROLL_BACK)


def read(value: object, kind: type[Any]) -> Any:
    """A record of the control plane's JSON. Raises RaftmetaError bad_json."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as cause:
        raise RaftmetaError("bad_json", f"the control plane sent no {kind.__name__}: {cause}") from cause
