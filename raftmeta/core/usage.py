"""Which deployments need a version: an index for the time of one batch.

Made when the first version of a batch is deleted, in one walk over the deployments, and kept up by the events of the batch after that, so
that many deletions in one entry do not walk over all deployments each. It is derived and enters no hash. It names who needs the version or
did so at some time in this batch: whoever asks looks at the deployment, which also makes what was taken back harmless.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from raftmeta.core.events import Event
from raftmeta.core.state import State, version_key
from raftmeta.core.types import Deployment, Rollout, RolloutStatus


class Usage:
    __slots__ = ("_events", "_names", "_seen")

    def __init__(self, base: State, events: list[Event]) -> None:
        """`events`: of all that changed since the base, also later; only what came after a look is ever taken back."""
        self._events = events
        self._seen = 0
        self._names: dict[str, list[str]] = {}  # deployments by "model/label", in order
        for name in base.deployment_names:
            deployment = base.deployments[name]
            self._add_deployment(deployment)
            rollout = base.rollouts.get(deployment.rollout_id)
            if rollout is not None and rollout.status is RolloutStatus.RUNNING:
                self._add(rollout.model, rollout.to_version, name)

    def candidates(self, model: str, label: str) -> Sequence[str]:
        """Names of the deployments that may need the version, in order. Nobody else does."""
        events = self._events
        for place in range(self._seen, len(events)):
            value = events[place].value
            if isinstance(value, Deployment):
                self._add_deployment(value)
            elif isinstance(value, Rollout):
                self._add(value.model, value.to_version, value.deployment)
        self._seen = len(events)
        return self._names.get(version_key(model, label), ())

    def _add_deployment(self, deployment: Deployment) -> None:
        self._add(deployment.model, deployment.version, deployment.name)
        self._add(deployment.model, deployment.previous, deployment.name)

    def _add(self, model: str, label: str, name: str) -> None:
        """ "" is no label."""
        if not label:
            return
        names = self._names.setdefault(version_key(model, label), [])
        place = bisect_left(names, name)
        if names[place : place + 1] != [name]:
            names.insert(place, name)
