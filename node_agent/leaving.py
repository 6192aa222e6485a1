"""Gives up deployments that no longer list this node, beside everything else, and as often as it takes.

The record says first that a deployment leaves: nobody answers for it from then on, and a control that begins goes on with it. Then workers
forget it, its memory goes, and its record goes last. So whatever fails or ends in between leaves it known what is still to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from node_agent import tasks
from node_agent.journal import Journal
from node_agent.runtime import log
from node_agent.trouble import STEP_FAULTS
from node_agent.troubles import Troubles

AGAIN_S = 1.0


class Serving(Protocol):
    async def release(self, slot: int | None) -> None: ...
    def destroy(self) -> None: ...


class Leaving:
    def __init__(self, journal: Journal, troubles: Troubles) -> None:
        self._journal = journal
        self._troubles = troubles
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, deployment: str) -> bool:
        return deployment in self._tasks

    def begin(self, deployment: str, serving: Serving, tending: Sequence[asyncio.Task[None]]) -> None:
        """`tending`: what still works on it, which is ended first."""
        self._journal.keep(deployment, lambda record: msgspec.structs.replace(record, leaving=True))
        self._tasks[deployment] = asyncio.create_task(self._give_up(deployment, serving, tending), name=f"leave {deployment}")

    async def stop(self) -> None:
        await tasks.end(self._tasks.values())

    async def _give_up(self, deployment: str, serving: Serving, tending: Sequence[asyncio.Task[None]]) -> None:
        await tasks.end(tending)
        await self._until_done(deployment, lambda: serving.release(None))
        await self._until_done(deployment, lambda: asyncio.to_thread(serving.destroy))
        await self._until_done(deployment, lambda: asyncio.to_thread(self._journal.drop, deployment))
        del self._tasks[deployment]
        self._troubles.note(deployment, "leave", "")
        log.info("deployment_given_up", deployment=deployment)

    async def _until_done(self, deployment: str, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await step()
            except Exception as cause:  # noqa: BLE001 - the outermost loop of a deployment
                if not isinstance(cause, STEP_FAULTS):
                    log.error("leaving_failed", deployment=deployment, exc_info=True)
                self._troubles.note(deployment, "leave", f"{type(cause).__name__}: {cause}")
            await asyncio.sleep(AGAIN_S)
