"""Makes goals of what was heard: asks members what the labels and rollouts of this node's deployments name, and hands the goal on.

Deployments are settled beside each other, so one that no member can answer for keeps no other waiting. An answer that comes after more was
heard of its deployment counts for nothing. What could not be asked stands in the troubles, and is asked when `settle` is called again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from node_agent import tasks
from node_agent.desired import DeploymentView, Desired, RolloutView, read
from node_agent.plan import Goal, Target
from node_agent.runtime import log
from node_agent.troubles import Troubles
from raftmeta.core.errors import RaftmetaError

MAX_TARGETS = 1000  # remembered; asking once more is all that forgetting costs


class Plane(Protocol):
    async def get_rollout(self, rollout_id: str) -> Mapping[str, Any]: ...
    async def get_version(self, model: str, label: str) -> Mapping[str, Any]: ...


class VersionView(msgspec.Struct, frozen=True):
    checksum: str
    vector_root: str


class Goals:
    def __init__(self, desired: Desired, plane: Plane, troubles: Troubles, want: Callable[[DeploymentView, Goal], None]) -> None:
        """`want` may raise RaftmetaError: then it is called again at the next `settle`."""
        self._desired = desired
        self._plane = plane
        self._troubles = troubles
        self._want = want
        self._targets: dict[tuple[str, str, int], Target] = {}  # (model, label, order revision) -> bytes
        self._previous: dict[str, str] = {}  # deployment -> checksum that undo returns to, "" for none; missing while it is not known
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def settle(self) -> None:
        """Begins it for every deployment; one that is being settled sees by itself what changed."""
        for item in self._desired.mine():
            if item.name not in self._tasks:
                self._tasks[item.name] = asyncio.create_task(self._settle(item.name), name=f"settle {item.name}")

    async def stop(self) -> None:
        await tasks.end(self._tasks.values())

    def previous(self, deployment: str) -> str | None:
        """Checksum of the version that undo returns to, "" when there is none, None while that is not known."""
        return self._previous.get(deployment)

    def forget(self, deployment: str) -> None:
        self._previous.pop(deployment, None)

    async def target(self, model: str, label: str) -> Target:
        """What the label names now. Raises RaftmetaError."""
        version = read(await self._plane.get_version(model, label), VersionView)
        return Target(model, label, version.checksum, version.vector_root)

    async def _settle(self, name: str) -> None:
        try:
            while (item := self._desired.find(name)) is not None:
                stamp, why = self._desired.stamp(name), ""
                try:
                    await self._settle_once(item, stamp)
                except RaftmetaError as cause:
                    why = str(cause)
                except Exception as cause:  # noqa: BLE001 - the outermost loop of a deployment
                    log.error("goal_failed", deployment=name, exc_info=True)
                    why = f"{type(cause).__name__}: {cause}"
                if self._desired.stamp(name) == stamp:
                    self._troubles.note(name, "goal", why)
                    return
        finally:
            del self._tasks[name]

    async def _settle_once(self, item: DeploymentView, stamp: tuple[object, ...]) -> None:
        if self._desired.lacks_rollout(item):
            rollout = read(await self._plane.get_rollout(item.rollout_id), RolloutView)
            if self._desired.stamp(item.name) == stamp:
                self._desired.learn(item, rollout)
            return
        committed = await self._committed(item)
        if self._desired.stamp(item.name) != stamp:
            return
        if item.previous and self._known(item, item.previous) is None:
            self._previous.pop(item.name, None)  # nothing is collected until it is known
        self._want(item, self._desired.goal(item, committed))
        previous = await self._resolve(item, item.previous) if item.previous else None
        if self._desired.stamp(item.name) == stamp:
            self._previous[item.name] = previous.checksum if previous else ""

    async def _committed(self, item: DeploymentView) -> Target | None:
        if not item.version:
            return None
        return self._desired.known_target(item) or await self._resolve(item, item.version)

    async def _resolve(self, item: DeploymentView, label: str) -> Target:
        """Asked once of an order: a label may be published anew for a later one."""
        found = self._known(item, label)
        if found is None:
            found = await self.target(item.model, label)
            if len(self._targets) > MAX_TARGETS:
                self._targets.clear()
            self._targets[item.model, label, item.order_revision] = found
        return found

    def _known(self, item: DeploymentView, label: str) -> Target | None:
        return self._targets.get((item.model, label, item.order_revision))
