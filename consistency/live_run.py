"""Live probes as they run: questions at a rate to a node of each side, and what follows from a difference.

Open loop: a question is due when its time has come, whatever became of those before; what could not be asked because too many are on their
way is counted. What each node has applied is read all the time, so that it is known from before a question was asked.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from consistency.agent_answers import AgentFault
from consistency.applied import Applied
from consistency.inference import Output
from consistency.live import MEMBERS, Heard, Judgement, Kind, Ledger, Moment, Order, Question, judge
from consistency.live_agents import Standing
from consistency.open_loop import Due, open_loop
from consistency.two_sides import TOKEN_HINT, Sides
from raftmeta.core.errors import RaftmetaError

POLL_S = 1.0
MAX_IN_FLIGHT = 64
UNFIT = 3  # questions that a model has to refuse, and none answered, before the others are not asked
BEHIND_S = 1.0  # by which questions may be late before they are left out


class Agents(Protocol):
    async def infer(self, url: str, deployment: str, body: bytes) -> tuple[str, tuple[Output, ...]]: ...
    async def standing(self, url: str, deployment: str) -> Standing: ...


Act = Callable[[Question, Heard, Heard, Judgement], Awaitable[None]]  # what follows from a difference


@dataclass
class Probing:
    sides: Sides
    agents: Agents
    ledger: Ledger
    questions: Iterator[Question]
    dtypes: Callable[[str], Awaitable[Sequence[str]]]  # of the tensors of a version, by its label. Raises RaftmetaError
    act: Act
    rate: float  # samples a second
    sources: int = 0  # questions that there are, 0: drawn without end
    skipped: int = 0  # samples that were due and not asked
    order: Order | None = None  # of the members, the last that was heard; whoever hears another sets it
    refused: str = ""  # why it ended by itself: nobody here would be answered, however long it asked
    _unfit: int = 0  # questions in a row that a node called wrong, from the first one on; -1 once one was answered
    _stop: asyncio.Event | None = None
    _standings: dict[str, Standing] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; questions on their way are waited for."""
        pairs = itertools.cycle(itertools.product(self.sides.primary, self.sides.standby))

        def begin(due_s: float, on_its_way: int) -> Due:
            question, now_s = next(self.questions), time.monotonic()
            is_late = now_s - due_s > BEHIND_S
            next_s = now_s if is_late else due_s + question.rows / self.rate
            if is_late or on_its_way >= MAX_IN_FLIGHT:
                self.skipped += question.rows
                return Due(None, next_s)
            return Due(self._ask(question, *next(pairs)), next_s)

        self._stop = stop
        await self._poll()
        polling = asyncio.create_task(self._keep_polling())
        try:
            await open_loop(stop, begin)
        finally:
            polling.cancel()
            await asyncio.wait({polling})
        if not polling.cancelled():
            polling.result()  # it ended before: for a fault that nobody expected

    async def _ask(self, question: Question, primary: str, standby: str) -> None:
        before, order = {node: self._standings.get(node) for node in (primary, standby)}, self.order
        first, second = await asyncio.gather(self._hear(primary, question), self._hear(standby, question))
        if first.outputs is not None and second.outputs is not None and first.version != second.version:
            first, second = await asyncio.gather(self._place(first, before[primary]), self._place(second, before[standby]))
        judged = await self._judged(question, first, second)
        difference = self.ledger.add(question, first, second, judged, Moment(time.monotonic(), time.time_ns() // 1_000_000, order))
        if difference is not None:
            await self.act(question, first, second, difference)

    async def _judged(self, question: Question, first: Heard, second: Heard) -> Judgement:
        dtypes: Sequence[str] = ()
        if first.version and first.version == second.version:
            try:
                dtypes = await self.dtypes(first.version)
            except RaftmetaError as error:
                return Judgement(Kind.UNANSWERED, detail=f"{first.version} is not known here: {error}", silent=MEMBERS)
        return judge(question, first, second, dtypes)

    async def _hear(self, node: str, question: Question) -> Heard:
        known = self._standings.get(node)
        applied: Applied = {} if known is None else known.applied
        try:
            version, outputs = await self.agents.infer(self.sides.urls[node], self.sides.deployment, question.body)
        except AgentFault as fault:
            self._weigh(node, fault)
            return Heard(node, "", applied, None, f"{fault.code}: {fault.detail}")
        self._unfit = -1
        return Heard(node, version, applied, outputs)

    def _weigh(self, node: str, fault: AgentFault) -> None:
        """Ends the run where asking on is of no use."""
        if fault.status in (401, 403):
            why = TOKEN_HINT
        elif fault.status == 400 and self._unfit >= 0:
            self._unfit += 1
            # Both sides are asked each of them.
            if self._unfit < 2 * min(self.sources or UNFIT, UNFIT):
                return
            why = "every question so far was refused like this: do they fit the model?"
        else:
            return
        self.refused = self.refused or f"{node}: {fault.detail}; {why}"
        if self._stop is not None:
            self._stop.set()

    async def _place(self, heard: Heard, before: Standing | None) -> Heard:
        """What the node has applied now, and whether it had before it was asked; one that does not say is not settled."""
        try:
            after = await self._look(heard.node)
        except AgentFault as fault:
            return heard._replace(applied={}, settled=False, fault=f"{fault.code}: {fault.detail}")
        settled = before == after and bool(after.applied) and after.version == heard.version
        return heard._replace(applied=after.applied, settled=settled)

    async def _look(self, node: str) -> Standing:
        found = await self.agents.standing(self.sides.urls[node], self.sides.deployment)
        self._standings[node] = found
        self.ledger.looked(node, found.applied)
        return found

    async def _poll(self) -> None:
        async def one(node: str) -> None:
            try:
                await self._look(node)
            except AgentFault:
                self._standings.pop(node, None)

        await asyncio.gather(*(one(node) for node in self.sides.urls))

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._poll()
