"""The models of a node as the inference protocol sees them: what the record says should serve, against what the workers say they hold.

A model is a deployment of this node. A pinned path can ask for what some worker holds, verified and warm, in either slot. While no worker
has a version loaded nobody here knows its inputs, and that is said (503) instead of an empty list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from node_agent import answers
from node_agent.answers import Answer
from node_agent.dispatch import NOTHING_SERVES_RETRY_S
from node_agent.journal import DeploymentRecord, Follower
from node_agent.messages import Served, SlotServed, TensorSpec
from node_agent.routes import Route
from node_agent.serve import Header, ServeError

PLATFORM = "raftmeta"
NOT_LOADED_RETRY_S = 1  # of a client, while workers that were started again load
NO_VERSION_RETRY_S = 5
FENCED = "fenced"
FENCED_RETRY_S = 1  # of a client, elsewhere: its router should know by then
NO_VERSION = "no version was activated yet"
NOT_LOADED_YET = "no worker serves it yet"


class Worker(Protocol):
    @property
    def served(self) -> Sequence[Served]:
        """What it said last that it serves."""


class Models:
    def __init__(self, record: Follower, workers: Sequence[Worker]) -> None:
        self._record = record
        self._workers = workers

    def known(self, model: str) -> DeploymentRecord:
        """Raises ServeError 404."""
        found = self._record.deployments().get(model)
        if found is None or found.leaving:
            raise ServeError(404, f"no model {model!r} on this node")
        return found

    def why_node_not_ready(self) -> str:
        """Empty when every deployment has its committed version verified and serving."""
        record = self._record.record()
        if record is not None and record.cordoned:
            return f"cordoned: {record.cordoned}"
        deployments = {} if record is None else {name: each for name, each in record.deployments.items() if not each.leaving}
        if not deployments:
            return "no deployment lists this node, or the control plane was never reached"
        reasons = [f"{name}: {reason}" for name, record in sorted(deployments.items()) if (reason := self._why_not(record))]
        return "; ".join(reasons)

    def require_side(self, route: Route) -> None:
        """Raises ServeError 503 when a fail-over let the other side take requests."""
        record = self.known(route.model)
        if record.fenced_by is not None:
            header = b"x-raftmeta-serving-side", record.fenced_by.value.encode()
            raise ServeError(503, f"{FENCED}: {route.model}: {_fenced(record)}", FENCED_RETRY_S, code=FENCED, headers=(header,))

    def require_servable(self, route: Route) -> None:
        """For a request that would wait for nothing. Raises ServeError 503, or 409 when no slot holds the version that it pins."""
        record = self.known(route.model)
        if record.pin is None and not self._serving(route.model):
            raise ServeError(503, f"{route.model} has no version on this node yet", NO_VERSION_RETRY_S)
        if route.version:
            self._require_held(route)
        elif blocked := self.blocked(route.model):
            raise ServeError(503, f"{route.model}: {blocked}", NOTHING_SERVES_RETRY_S)

    def metadata(self, route: Route) -> Answer:
        record = self.known(route.model)
        if route.version:
            self._require_held(route)
        slot = self._slot(route)
        if slot is None:
            blocked = self.blocked(route.model)
            if record.pin is None and not blocked:
                raise ServeError(503, f"{route.model}: {NO_VERSION}", NO_VERSION_RETRY_S)
            retry_s = NOTHING_SERVES_RETRY_S if blocked else NOT_LOADED_RETRY_S
            raise ServeError(503, f"{route.model}: {blocked or NOT_LOADED_YET}, so what it takes is not known", retry_s)
        body = {
            "name": route.model,
            "versions": self._held(route.model),
            "platform": PLATFORM,
            "inputs": _listed(slot.inputs),
            "outputs": _listed(slot.outputs),
        }
        return answers.json(body, headers=(version_header(slot.label),))

    def ready(self, route: Route) -> Answer:
        """Whether a request to this path would be computed now; of a pinned version whatever else is not ready on the node."""
        record = self.known(route.model)
        status, reason = 503, ""
        if record.fenced_by is not None or not route.version:
            reason = self._why_not(record)
        elif self._slot(route) is None:
            knows = self._knows(route.model)
            status, reason = (409, self._not_held(route)) if knows else (503, NOT_LOADED_YET)
        body = {"name": route.model, "ready": not reason} | ({"reason": reason} if reason else {})
        return answers.json(body, status if reason else 200)

    # --- what workers say

    def _served(self, model: str) -> list[Served]:
        return [item for worker in self._workers for item in worker.served if item.deployment == model]

    def _serving(self, model: str) -> bool:
        return any(slot.slot == item.active for item in self._served(model) for slot in item.slots)

    def _held(self, model: str) -> list[str]:
        return sorted({slot.label for item in self._served(model) for slot in item.slots})

    def _knows(self, model: str) -> bool:
        """Some worker knows what the slots hold; one that is still loading says nothing yet."""
        return any((item.slots or item.blocked) and not item.is_loading for item in self._served(model))

    def _slot(self, route: Route) -> SlotServed | None:
        """What would answer a request to this path."""
        found = (
            slot
            for item in self._served(route.model)
            for slot in item.slots
            if (slot.label == route.version if route.version else slot.slot == item.active)
        )
        return next(found, None)

    def blocked(self, model: str) -> str:
        """Why no slot of the node can be entered, as far as the workers say. Empty when one can, or only workers are missing."""
        said = [item.blocked for item in self._served(model)]
        return said[0] if said and all(said) else ""

    def _why_not(self, record: DeploymentRecord) -> str:
        if record.fenced_by is not None:
            return f"{FENCED}: {_fenced(record)}"
        blocked = "" if record.pin is None else self.blocked(record.name)
        if blocked:
            return blocked
        if record.damage:
            return record.damage
        if record.behind:
            return "the committed version is not verified on this node yet"
        if not self._serving(record.name):
            return NO_VERSION if record.pin is None else NOT_LOADED_YET
        return ""

    def _require_held(self, route: Route) -> None:
        if self._knows(route.model) and self._slot(route) is None:
            raise ServeError(409, self._not_held(route))

    def _not_held(self, route: Route) -> str:
        return f"no slot of this node holds version {route.version}; held: {', '.join(self._held(route.model)) or 'none'}"


def _fenced(record: DeploymentRecord) -> str:
    return f"the {record.fenced_by} side takes requests since order {tuple(record.serving_order)}, this node is of the {record.side} side"


def version_header(label: str) -> Header:
    return b"x-raftmeta-version", label.encode()


def _listed(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "datatype": spec.datatype, "shape": spec.shape} for spec in specs]
