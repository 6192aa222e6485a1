"""The moves of a drill and the way back: whatever ends it early, the side that served before it serves again, or who serves now is said.

A decision that is on its way is waited for, since nobody could tell afterwards what became of it. Which side serves is read from the
members and never concluded. The way back is tried a bounded number of times, each after a check, and nothing is forced; it is not taken
when somebody else gave an order since. Being told to stop once leads to the way back, twice ends that too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from consistency.drill import Move
from consistency.drill_run import OTHER, Load
from raftmeta.core.errors import RaftmetaError

FENCE_S = 30.0  # for every node of the old side to refuse
MAX_BACK = 5  # tries to go back, and looks for a decision that may still come
BACK_PAUSE_S = 3.0  # between them


class Members(Protocol):
    """Both raise RaftmetaError."""

    async def get_deployment(self, name: str, /) -> Mapping[str, Any]: ...
    async def fail_over(self, deployment: str, body: Mapping[str, Any], /) -> Mapping[str, Any]: ...


@dataclass
class Rehearsal:
    members: Members
    load: Load
    first: str  # side that served before
    require_allowed: Callable[[str], Awaitable[None]]  # for a side to serve; raises RaftmetaError with what speaks against it
    say: Callable[[str], None]
    steady_s: float
    command_back: str  # for people, who have to go back themselves
    stay: bool = False  # the other side is to serve from then on
    pause_s: float = BACK_PAUSE_S
    moves: list[Move] = field(default_factory=list)
    _deciding: asyncio.Task[None] | None = None
    _unknown_to: str = ""  # side of the last decision, while it is not known whether it was taken

    async def run(self, stop: asyncio.Event) -> str:
        """Why it ended early, and who serves; "" when it went as it should. Raises what nobody expected, after the way back."""
        ended = asyncio.Event()
        asking = asyncio.create_task(self.load.run(ended))
        doing = asyncio.create_task(self._rehearse())
        try:
            await _any(stop, doing, asking)
            await _cancelled(doing)
            fault = _fault(doing) or _fault(asking)
            why = "" if fault is None else _said(fault)
            if doing.cancelled() and not why:
                why = "it was told to stop" if stop.is_set() else "the requests ended"
            stop.clear()  # told once more, the way back ends as well
            trouble = await self._settled(why, stop)
        finally:
            ended.set()
            await asyncio.wait({asking})
        fault = fault or _fault(asking)
        if fault is not None and not isinstance(fault, RaftmetaError):
            fault.add_note(f"{self.load.deployment}: {trouble}")
            raise fault
        return trouble

    async def _rehearse(self) -> None:
        for to in (OTHER[self.first],) if self.stay else (OTHER[self.first], self.first):
            self.say(f"{self.load.deployment}: the {OTHER[to]} side serves under {self.load.rate:g} requests/s")
            await asyncio.sleep(self.steady_s)
            await self._move(to)
        await asyncio.sleep(self.steady_s)

    async def _move(self, to: str) -> None:
        await self.require_allowed(to)
        self.say(f"{self.load.deployment}: letting the {to} side serve")
        self._deciding = asyncio.create_task(self._decide(to))
        await asyncio.shield(self._deciding)
        refused = await self.load.until_refused(OTHER[to], FENCE_S)
        self.moves[-1] = replace(self.moves[-1], refused_s=refused)

    async def _decide(self, to: str) -> None:
        asked_s = time.monotonic()
        self._unknown_to = to
        try:
            decided = await self.members.fail_over(self.load.deployment, {"to": to, "expected_serving_side": OTHER[to]})
        except RaftmetaError as error:
            if error.code != "unknown_outcome":
                self._unknown_to = ""
            raise
        # Before the reply is understood it is not known what is decided: the way back is open until the move stands.
        order = _revision_of(decided)
        self.moves.append(Move(to, OTHER[to], asked_s, time.monotonic(), order))
        self._unknown_to = ""

    # --- the end

    async def _settled(self, why: str, stop: asyncio.Event) -> str:
        """Goes back where it has to, and says why it ended and who serves then; "" when that is who should, and nothing was amiss."""
        await self._decided()
        if self._deciding is None:
            return why and f"{why}; nothing was decided, and the {self.first} side serves unless somebody else decides"
        against = ""
        if not self.stay:
            going = asyncio.create_task(self._go_back())
            await _any(stop, going)
            await _cancelled(going)
            await self._decided()
            against = "it was told to stop again" if going.cancelled() else going.result()
        return await self._who_serves(why, against)

    async def _go_back(self) -> str:
        """Until the first side serves. Why it does not, "" when it does."""
        against = ""
        for turn in range(MAX_BACK):
            if turn:
                await asyncio.sleep(self.pause_s)
            try:
                seen = await self.members.get_deployment(self.load.deployment)
                if side_of(seen) != self.first:
                    if not self._unknown_to and not (self.moves and _revision_of(seen) == self.moves[-1].order_revision):
                        return "somebody else gave an order since"
                    await self._move(self.first)
                elif self._unknown_to == OTHER[self.first]:  # that may still come
                    continue
                self._unknown_to = ""
                return ""
            except Exception as error:  # noqa: BLE001 whatever is wrong, the way back is tried again, and then it is said who serves
                against = _said(error)
                self.say(f"{self.load.deployment}: not back yet: {against}")
        return against

    async def _who_serves(self, why: str, against: str) -> str:
        wanted = OTHER[self.first] if self.stay else self.first
        try:
            now = side_of(await self.members.get_deployment(self.load.deployment))
        except RaftmetaError as error:
            told = "; ".join(filter(None, (why, against, f"the members do not say which side serves: {error}")))
            return f"{told}; `raftmeta status` shows it; to go back: {self.command_back}"
        unknown = (
            "; whether the last decision still comes is not known, `raftmeta status` shows it" if self._unknown_to not in ("", now) else ""
        )
        if now == wanted:
            return f"{why or 'not every decision was answered'}; the {now} side serves{unknown}" if why or unknown else ""
        told = "; ".join(filter(None, dict.fromkeys((why, against))))
        if self.stay:
            return f"{told or 'somebody else gave an order'}; the {now} side serves{unknown}"
        return f"{told or 'somebody else gave an order'}; THE {now.upper()} SIDE SERVES NOW{unknown}; to go back: {self.command_back}"

    async def _decided(self) -> None:
        """Waits for a decision that is on its way; the client's own deadline ends it."""
        if self._deciding is not None:
            await asyncio.wait({self._deciding})
            _fault(self._deciding)  # whoever waited for it was told; nobody else has to be


def side_of(reply: Mapping[str, Any]) -> str:
    """That serves. Raises RaftmetaError."""
    side = reply.get("serving_side")
    if side not in OTHER:
        raise RaftmetaError("internal", f"a member's reply has {str(side)[:40]!r} as its serving_side, expected one of {', '.join(OTHER)}")
    return str(side)


def _revision_of(reply: Mapping[str, Any]) -> int:
    """Of the last order. Raises RaftmetaError."""
    revision = reply.get("order_revision")
    if type(revision) is not int:
        raise RaftmetaError("internal", f"a member's reply has {str(revision)[:40]!r} as its order_revision, expected a whole number")
    return revision


async def _any(stop: asyncio.Event, *tasks: asyncio.Task[Any]) -> None:
    """Waits until one of them is done, or somebody says stop."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancelled(stopping)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Ended, however that may be."""
    task.cancel()
    await asyncio.wait({task})


def _fault(task: asyncio.Task[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _said(fault: BaseException) -> str:
    return str(fault) if isinstance(fault, RaftmetaError) else f"{type(fault).__name__}: {fault}"
