"""What the control plane wants, as far as this node is concerned: deployments and rollouts as last heard. Pure.

Fed by a list and then by the watch's changes, one revision at a time. Goals are made of it once the committed label is resolved to the
bytes that it names. An attestation counts only if this start of the agent made it: an earlier start's memory is gone.
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
    zone: str
    nodes: tuple[str, ...]


class PolicyView(msgspec.Struct, frozen=True):
    """The fields of a policy that an agent needs; members of an earlier build do not give them."""

    drain_timeout_ms: Count = 60_000
    drain_overdue: DrainOverdue = DrainOverdue.WAIT


class DeploymentView(msgspec.Struct, frozen=True):
    """The fields of a deployment that an agent needs; others are ignored."""

    name: str
    model: str
    primary: SideView
    standby: SideView | None
    version: str
    previous: str
    rollout_id: str
    order_revision: Count
    policy: PolicyView = PolicyView()
    serving_side: SideName = SideName.PRIMARY
    failover: dict[str, Any] | None = None

    @property
    def decided_side(self) -> SideName | None:
        """The side that a fail-over named, None while there was none: then both sides answer."""
        return None if self.failover is None else self.serving_side

    def side_of(self, node: str) -> SideName | None:
        if node in self.primary.nodes:
            return SideName.PRIMARY
        return SideName.STANDBY if self.standby is not None and node in self.standby.nodes else None


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


class Desired:
    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.generation = 0
        self._deployments: dict[str, DeploymentView] = {}
        self._rollouts: dict[str, RolloutView] = {}  # by deployment, the last one heard of

    def replace(self, generation: int, deployments: Iterable[DeploymentView], rollouts: Iterable[RolloutView]) -> None:
        """Everything anew, from a list."""
        self.generation = generation
        self._deployments = {item.name: item for item in deployments}
        self._rollouts = {item.deployment: item for item in rollouts}

    def apply(self, generation: int, events: Iterable[Any]) -> None:
        """All events of one revision."""
        self.generation = max(self.generation, generation)
        for event in events:
            if event.kind == "deployment":
                self._deployments.pop(event.key, None)
                if event.op == "put":
                    self._deployments[event.key] = read(event.value, DeploymentView)
            elif event.kind == "rollout" and event.op == "put":
                rollout = read(event.value, RolloutView)
                self._rollouts[rollout.deployment] = rollout

    def mine(self) -> list[DeploymentView]:
        """The deployments that list this node, by name."""
        return [item for _, item in sorted(self._deployments.items()) if item.side_of(self._identity.node) is not None]

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
