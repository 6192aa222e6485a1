"""From what members say to what a deployment's nodes should hold. Pure.

A deployment is switching from its last switch order until the version is active everywhere; in between its nodes may lawfully serve either
version. How many models a node should have active follows from all deployments that name it, so the whole list is needed even to check one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from consistency.entries import root
from consistency.findings import NodePlace, Target, TensorSpec
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest


class SideSeen(msgspec.Struct, frozen=True):
    zone: str
    nodes: tuple[str, ...]


class VersionSeen(msgspec.Struct, frozen=True):
    """The fields of a version that a check needs."""

    number: int
    checksum: str
    vector_root: str
    config_digest: str
    tensor_count: int


class DeploymentSeen(msgspec.Struct, frozen=True):
    """The fields of a deployment that a check needs."""

    name: str
    model: str
    primary: SideSeen
    standby: SideSeen | None
    version: str
    previous: str
    rollout_id: str
    order_revision: int
    activated_revision: int
    serving: VersionSeen | None = None  # of `version`; members of earlier builds leave it out

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.primary.nodes, *(self.standby.nodes if self.standby is not None else ()))

    @property
    def in_flight(self) -> bool:
        """Ordered to switch, and not active everywhere yet."""
        return self.order_revision > self.activated_revision

    def places(self) -> Iterator[tuple[str, str, str]]:
        """(node, side, zone)"""
        for side, seen in (("primary", self.primary), ("standby", self.standby)):
            if seen is not None:
                yield from ((node, side, seen.zone) for node in seen.nodes)


class Listed(NamedTuple):
    """A deployment and the state that it was read from."""

    seen: DeploymentSeen
    revision: int
    generation: int


class ListPage(msgspec.Struct, frozen=True):
    """Of a list of the members."""

    items: tuple[dict[str, Any], ...]
    next: str | None = None


class _NodeSeen(msgspec.Struct, frozen=True):
    node: str
    url: str | None = None  # none: nobody knows where it listens


class _NodesSeen(msgspec.Struct, frozen=True):
    items: tuple[_NodeSeen, ...]


class _Counters(msgspec.Struct, frozen=True):
    lag_ms: Annotated[int, Meta(ge=-1, le=1 << 40)] = -1  # not known


class _Attested(msgspec.Struct, frozen=True):
    node: str
    stage: str
    counters: _Counters = _Counters()


class _RolloutSeen(msgspec.Struct, frozen=True):
    to_version: str
    attestations: tuple[_Attested, ...] = ()


Counts = Mapping[str, tuple[int, int]]


def page_of(body: Mapping[str, Any]) -> ListPage:
    """Raises RaftmetaError internal, as all of these do, when the body has another form."""
    seen: ListPage = _convert(body, ListPage, "a page of a list")
    return seen


def urls_of(body: Mapping[str, Any]) -> dict[str, str]:
    """Where nodes listen, as far as that is known."""
    seen: _NodesSeen = _convert(body, _NodesSeen, "a list of nodes")
    return {item.node: item.url for item in seen.items if item.url}


def deployment_of(body: Mapping[str, Any]) -> DeploymentSeen:
    seen: DeploymentSeen = _convert(body, DeploymentSeen, "a deployment")
    return seen


def version_of(body: Mapping[str, Any]) -> VersionSeen:
    seen: VersionSeen = _convert(body, VersionSeen, "a version")
    return seen


def active_models(deployments: Iterable[DeploymentSeen]) -> Counts:
    """node -> how many models these deployments make active on it, at least and at most."""
    counts: dict[str, tuple[int, int]] = {}
    for deployment in deployments:
        least, most = _active_models(deployment)
        for node, _, _ in deployment.places():
            before = counts.get(node, (0, 0))
            counts[node] = before[0] + least, before[1] + most
    return counts


def place_nodes(deployment: DeploymentSeen, before: Counts, after: Counts) -> tuple[NodePlace, ...]:
    """`before`, `after`: the counts when the check began and ended; a node may have counted at any moment in between."""

    def place(node: str, side: str, zone: str) -> NodePlace:
        (least, most), (least_then, most_then) = before.get(node, (0, 0)), after.get(node, (0, 0))
        return NodePlace(node, side, zone, min(least, least_then), max(most, most_then))

    return tuple(place(*at) for at in deployment.places())


def target_of(listed: Listed, places: tuple[NodePlace, ...], version: VersionSeen | None) -> Target:
    """`version` is the one that serves, None when nothing was activated yet."""
    deployment = listed.seen
    switching = ""
    if deployment.in_flight:
        switching = f"a switch to {deployment.version!r} is in progress (rollout {deployment.rollout_id}); check again when it is done"
    made = Target(
        deployment.name,
        deployment.model,
        deployment.version,
        places,
        switching=switching,
        order_revision=deployment.order_revision,
        started_revision=listed.revision,
        revision=listed.revision,
        generation=listed.generation,
    )
    return made if version is None else msgspec.structs.replace(made, **msgspec.structs.asdict(version))


def attested_lags(rollout: Mapping[str, Any], version: str) -> dict[str, int]:
    """node -> lag in ms, from the rollout that brought this version; empty when it brought another."""
    seen: _RolloutSeen = _convert(rollout, _RolloutSeen, "a rollout")
    if seen.to_version != version:
        return {}
    return {item.node: item.counters.lag_ms for item in seen.attestations if item.stage == "active"}


def tensors_of(manifest: Mapping[str, Any], target: Target) -> dict[str, TensorSpec]:
    """The tensors of the manifest. Raises RaftmetaError integrity when they do not make the version's vector root."""
    seen = _convert(manifest, Manifest, "a manifest")
    found = root({tensor.name: tensor.entry for tensor in seen.tensors})
    if found != target.vector_root:
        what = f"manifest of {target.model}/{target.version}"
        raise RaftmetaError("integrity", f"{what}: its entries make the root {found}, the version has {target.vector_root}")
    return {tensor.name: TensorSpec(tensor.entry, tensor.dtype, tensor.shape, tensor.size_bytes, tensor.sha256) for tensor in seen.tensors}


def moved(before: DeploymentSeen, after: DeploymentSeen) -> bool:
    """Whether the deployment got another order, or other nodes, in between."""
    same = (before.version, before.order_revision, set(before.places())) == (after.version, after.order_revision, set(after.places()))
    return after.in_flight or not same


def _active_models(deployment: DeploymentSeen) -> tuple[int, int]:
    """How many models the deployment makes active on each of its nodes, at least and at most."""
    if not deployment.version:
        return 0, 0
    first_ever = deployment.in_flight and not deployment.previous
    return (0 if first_ever else 1), 1


def _convert(body: Mapping[str, Any], shape: Any, what: str) -> Any:
    try:
        return msgspec.convert(dict(body), shape)
    except msgspec.ValidationError as cause:
        raise RaftmetaError("internal", f"the member's answer is not {what}: {cause}") from cause
