"""A client under a drill: requests at a rate to the side that it believes to serve, each with one retry on the other.

It knows of a fail-over only what a router would: that a node refuses, or does not answer. The side that answered a retry is believed from
then on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from consistency.agent_answers import AgentFault
from consistency.drill import Asked, Try
from consistency.inference import Output
from consistency.live import Question
from consistency.node_http import FENCED
from consistency.open_loop import Due, open_loop

OTHER = {"primary": "standby", "standby": "primary"}
LOOK_S = 0.02  # between questions to a node of the old side that has not refused yet


class Agents(Protocol):
    async def infer(self, url: str, deployment: str, body: bytes) -> tuple[str, tuple[Output, ...]]:
        """Raises AgentFault."""


@dataclass
class Load:
    deployment: str
    urls: Mapping[str, Mapping[str, str]]  # side -> node -> where it listens
    agents: Agents
    questions: Iterator[Question]
    rate: float
    believes: str  # side
    asked: list[Asked] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; what is on its way is waited for."""
        turns = {side: itertools.cycle(nodes) for side, nodes in self.urls.items()}
        await open_loop(stop, lambda due_s, _: Due(self._ask(due_s, turns), due_s + 1 / self.rate))

    async def _ask(self, due_s: float, turns: Mapping[str, Iterator[str]]) -> None:
        body, side = next(self.questions).body, self.believes
        first = await self._try(side, next(turns[side]), body)
        tries = [first]
        if not first.answered:
            other = OTHER[side]
            tries.append(await self._try(other, next(turns[other]), body))
            if tries[-1].answered:
                self.believes = other
        self.asked.append(Asked(due_s, tuple(tries)))

    async def _try(self, side: str, node: str, body: bytes) -> Try:
        begun_s = time.monotonic()
        try:
            version, _ = await self.agents.infer(self.urls[side][node], self.deployment, body)
        except AgentFault as fault:
            return Try(node, side, begun_s, time.monotonic(), "", fault.code)
        return Try(node, side, begun_s, time.monotonic(), version)

    async def until_refused(self, side: str, limit_s: float) -> dict[str, float]:
        """When each node of a side was first seen refusing as fenced; nodes that do not within the time are left out."""
        found: dict[str, float] = {}
        body = next(self.questions).body

        async def one(node: str, url: str) -> None:
            while node not in found:
                try:
                    await self.agents.infer(url, self.deployment, body)
                except AgentFault as fault:
                    if fault.code == FENCED:
                        found[node] = time.monotonic()
                        return
                await asyncio.sleep(LOOK_S)

        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*(one(node, url) for node, url in self.urls[side].items()))
        except TimeoutError:
            pass
        return found
