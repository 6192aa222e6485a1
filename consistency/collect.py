"""The check of a fleet: asks members what was decided and every agent what it holds, then lets the pure rules judge.

Roots first, from all nodes at once; entries only of nodes whose root differs, block checks only of tensors that differ. A node that cannot
be asked is a reason in the verdict, never the end of the check. The deployment is read again at the end: if it was switched meanwhile, what
the nodes said belongs to two decisions and is not judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from consistency import compare, target
from consistency.agents import AgentFault
from consistency.findings import Answer, Limits, NodePlace, NodeVector, Target, Verdict
from consistency.target import DeploymentSeen
from consistency.vector import Words
from raftmeta.client import Page, Reply, all_items
from raftmeta.core.errors import ErrorClass, RaftmetaError

MAX_AT_ONCE = 8  # deployments; agents have a limit of their own
HEAR_S = 5.0  # two heartbeats of a node: a member that has just started knows only the nodes that it heard of since
LOOK_S = 0.25


class Members(Protocol):
    """What a check needs of the client SDK."""

    async def get_deployment(self, name: str, /) -> Reply: ...
    async def list_deployments(self, page: Page, /) -> Reply: ...
    async def get_version(self, model: str, label: str, /) -> Reply: ...
    async def get_manifest(self, model: str, label: str, /) -> Reply: ...
    async def get_rollout(self, rollout_id: str, /) -> Reply: ...
    async def nodes(self) -> Reply: ...


class Agents(Protocol):
    """What a check needs of the nodes. Both raise AgentFault."""

    async def vector(self, url: str, deployment: str, entries: bool) -> NodeVector: ...
    async def blocks(self, url: str, deployment: str, tensor: str) -> Words: ...


def _quiet(_: str) -> None: ...


@dataclass(frozen=True)
class Checker:
    members: Members
    agents: Agents
    limits: Limits = field(default_factory=Limits)
    say: Callable[[str], None] = _quiet  # told what is being done
    hear_s: float = HEAR_S  # how long a node that no member has heard of is waited for

    async def check(self, names: Sequence[str]) -> list[Verdict]:
        """A verdict for each deployment, in the order of the names; of all deployments when none is named."""
        deployments = {seen.name: seen async for seen in self._deployments()}
        for name in names:
            if name not in deployments:
                raise RaftmetaError("unknown_deployment", f"no deployment is called {name!r}")
        urls = await self._urls({node for name in names or deployments for node in deployments[name].nodes})
        turn = asyncio.Semaphore(MAX_AT_ONCE)

        async def one(name: str) -> Verdict:
            deployment = deployments[name]
            async with turn:
                try:
                    return await _Check(self, urls, deployments).run(deployment)
                except RaftmetaError as error:
                    if error.info.error_class is not ErrorClass.UNAVAILABLE:
                        raise
                    return compare.gave_up(target.target_of(deployment, (), None), error)

        return await _all(one(name) for name in names or sorted(deployments))

    async def _urls(self, expected: set[str]) -> dict[str, str]:
        """Where nodes listen, once all that are expected have been heard of or had the time to say so."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.hear_s
        while True:
            urls = {str(item["node"]): str(item["url"]) for item in (await self.members.nodes())["items"]}
            unheard = sorted(expected - urls.keys())
            if not unheard or loop.time() >= until:
                return urls
            self.say(f"waiting for a member to hear of {', '.join(unheard[:3])}{' and others' if len(unheard) > 3 else ''}")
            await asyncio.sleep(LOOK_S)

    async def _deployments(self) -> Any:
        async for item in all_items(self.members.list_deployments):
            yield target.deployment_of(item)


@dataclass(frozen=True)
class _Check:
    """One deployment."""

    checker: Checker
    urls: Mapping[str, str]  # node -> where it listens
    deployments: Mapping[str, DeploymentSeen]

    async def run(self, deployment: DeploymentSeen) -> Verdict:
        wanted = await self._target(deployment)
        self.checker.say(f"{wanted.deployment}: reading the memory of {len(wanted.places)} nodes")
        answers = await _all(self._ask(place, wanted.deployment) for place in wanted.places)
        suspects = compare.needing_entries(wanted, answers)
        blocks: dict[tuple[str, str], Words] = {}
        if suspects:
            self.checker.say(f"{wanted.deployment}: {len(suspects)} of {len(answers)} nodes differ; asking which tensors")
            manifest = await self.checker.members.get_manifest(wanted.model, wanted.version)
            wanted = msgspec.structs.replace(wanted, tensors=target.tensors_of(manifest, wanted))
            answers = await _all(self._ask_entries(answer, wanted.deployment, suspects) for answer in answers)
            blocks = await self._ask_blocks(wanted.deployment, compare.needing_blocks(wanted, answers))
        again = await self.checker.members.get_deployment(deployment.name)
        if not wanted.switching and target.moved(deployment, target.deployment_of(again)):
            wanted = msgspec.structs.replace(wanted, switching="the deployment was switched or changed while it was checked; check again")
        wanted = msgspec.structs.replace(wanted, revision=again.revision, generation=again.generation)
        return compare.compare(compare.Scene(wanted, answers, blocks, self.checker.limits))

    async def _target(self, deployment: DeploymentSeen) -> Target:
        members, lags, version = self.checker.members, {}, None
        if deployment.version:
            version = await members.get_version(deployment.model, deployment.version)
            rollout = await members.get_rollout(deployment.rollout_id) if deployment.rollout_id else {}
            lags = target.attested_lags(rollout, deployment.version)
        places = target.place_nodes(deployment, self.deployments.values(), lags)
        return target.target_of(deployment, places, version)

    async def _ask(self, place: NodePlace, deployment: str) -> Answer:
        url = self.urls.get(place.node)
        if not url:
            return Answer(place, None, "unknown_node", "no member has heard of this node")
        try:
            given = await self.checker.agents.vector(url, deployment, entries=False)
        except AgentFault as fault:
            return Answer(place, None, fault.code, fault.detail)
        if (given.node, given.deployment) != (place.node, deployment):
            found = f"{given.node!r} for {given.deployment!r}"
            return Answer(place, None, "bad_answer", f"asked {place.node!r} for {deployment!r}, the answer is of {found}")
        return Answer(place, given)

    async def _ask_entries(self, answer: Answer, deployment: str, suspects: Sequence[str]) -> Answer:
        first = answer.vector
        if first is None or first.node not in suspects:
            return answer
        try:
            second = await self.checker.agents.vector(self.urls[first.node], deployment, entries=True)
        except AgentFault as fault:
            return msgspec.structs.replace(answer, code=fault.code, detail=fault.detail)
        if second.identity != first.identity or second.node != first.node:
            return Answer(answer.place, None, "changed_meanwhile", "the node switched or restarted between two questions")
        # The first root stays: entries that do not add up to it are a finding.
        return msgspec.structs.replace(answer, vector=msgspec.structs.replace(first, entries=second.entries))

    async def _ask_blocks(self, deployment: str, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Words]:
        """What cannot be had is left out: the finding then names the tensor and no block."""

        async def one(node: str, tensor: str) -> Words | None:
            try:
                return await self.checker.agents.blocks(self.urls[node], deployment, tensor)
            except AgentFault:
                return None

        given = await _all(one(node, tensor) for node, tensor in wanted)
        return {key: checks for key, checks in zip(wanted, given, strict=True) if checks is not None}


async def _all(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Results in order; the first error ends all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run(item)) for item in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


async def _run(item: Awaitable[Any]) -> Any:
    return await item
