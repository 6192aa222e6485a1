"""The agent's one conversation with the control plane: list, watch, heartbeat; and a tender per deployment that acts on it.

A list gives everything at one revision, the watch continues from there, `compacted` means list again, at once after a watch that lasted
and else after a pause: a member may say so again and again. When the control plane does not answer, nothing stops: what serves goes on, and
a node that starts without it serves what it served last, and says so. Deployments that no longer list the node are given up only on the
word of a list or a change. Hearing waits for nothing but the node's own record: what members have to be asked for is `goals`, and giving up
is `leaving`. What goes wrong with one deployment is its own trouble.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from node_agent import report, tasks
from node_agent.contact import Contact, Members
from node_agent.desired import DeploymentView, Desired, Sides
from node_agent.evidence import Teller
from node_agent.fetch import FetchFailed
from node_agent.goals import Goals
from node_agent.journal import DeploymentRecord
from node_agent.leaving import Leaving
from node_agent.places import Places, new_record
from node_agent.plan import Goal, Order
from node_agent.prepared import Prepared
from node_agent.refusal import Refusal
from node_agent.remembered import Remembered
from node_agent.report import NodeFacts
from node_agent.runtime import log
from node_agent.taking import Means
from node_agent.tend import Tender
from node_agent.troubles import Troubles
from raftmeta.core.errors import RaftmetaError

WATCHED = ("deployments", "rollouts")
RETRY_S = 1.0
RELIST_S = 10.0  # until what could not be read is listed again, while the watch goes on
RECORD_S = 2.0  # between looks at the file of the node's record


class ControlPlane(Members, Protocol):
    """The calls of the client SDK that an agent makes."""

    def deployments(self) -> AsyncIterator[Mapping[str, Any]]:
        """Every deployment, page after page."""

    async def get_rollout(self, rollout_id: str) -> Mapping[str, Any]: ...
    async def get_version(self, model: str, label: str) -> Mapping[str, Any]: ...
    async def get_manifest(self, model: str, label: str) -> Mapping[str, Any]: ...
    async def attest(self, node: str, attestation: Mapping[str, Any]) -> object: ...
    async def record_evidence(self, node: str, evidence: Mapping[str, Any]) -> object: ...
    def watch(self, from_revision: int, resources: Sequence[str]) -> AsyncIterator[Any]:
        """Changes (generation, revision, events) and bookmarks. Raises RaftmetaError compacted."""


class Bounds(NamedTuple):
    max_deployments: int  # that this node takes part in
    start_wait_s: float  # for the control plane, before the pin is served


class Loop:
    _means: Means  # from the beginning of `run`: it in turn is made of `kick` and `keep`

    def __init__(self, facts: NodeFacts, desired: Desired, places: Places, plane: ControlPlane, bounds: Bounds) -> None:
        self._facts = facts
        self._desired = desired
        self._places = places
        self._plane = plane
        self._bounds = bounds
        self._teller = Teller(facts.node, facts.boot_id, places.store.beside)
        self._tenders: dict[str, Tender] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._listed = False
        self._troubles = Troubles()
        self._goals = Goals(desired, plane, self._troubles, self._want)
        self._leaving = Leaving(places.journal, self._troubles)
        self.contact = Contact(facts.node, plane, places.journal)

    @property
    def tenders(self) -> Mapping[str, Tender]:
        return self._tenders

    def status(self) -> dict[str, Any]:
        looks = [look._replace(trouble=self._trouble_of(look)) for look in self._looks()]
        cordoned = self._places.journal.record.cordoned
        return report.status(self._facts, looks, self.contact.look(), cordoned, self._troubles.others(self._tenders))

    def _trouble_of(self, look: report.Look) -> str:
        return "; ".join(filter(None, (self._troubles.of(look.deployment), look.trouble)))

    async def plans(self, version: str = "") -> dict[str, Any]:
        """By deployment: the steps that are left, with what they would move; with a version, as if it were activated now.

        Does none of them. The manifest of such a version is kept in the store, which forgets it when it makes room.
        """
        return {name: await self._plan_of(tender, version) for name, tender in sorted(self._tenders.items())}

    async def _plan_of(self, tender: Tender, label: str) -> dict[str, Any]:
        try:
            model = tender.remembered.record.model
            target = await self._goals.target(model, label) if label else None
            if target is not None:
                await self._means.provider.manifest(target)
            return await asyncio.to_thread(tender.preview, target)
        except (RaftmetaError, FetchFailed) as cause:
            code = cause.code if isinstance(cause, RaftmetaError) else ""
            return {"goal": "", "rollout": "", "steps": [], "refused": f"{label}: {cause}" if label else str(cause), "code": code}

    @property
    def cluster_id(self) -> str:
        """Of the control plane that this node listens to."""
        return str(self._places.journal.record.cluster_id)

    @property
    def is_cordoned(self) -> bool:
        return bool(self._places.journal.record.cordoned)

    def cordon(self, reason: str) -> None:
        """Durable. "" lifts it. What serves and what is staged goes on."""
        self._places.journal.cordon(reason)
        log.warning("cordoned" if reason else "uncordoned", reason=reason)

    async def pin(self, deployment: str, reason: str) -> dict[str, Any]:
        """Durable; "" lifts it. Raises RaftmetaError."""
        tender = self._tender_of(deployment)
        if not reason:
            await tender.unpin()
            return {"deployment": deployment, "pinned": "", "reason": ""}
        return {"deployment": deployment, "pinned": (await tender.pin(reason)).label, "reason": reason}

    async def abort(self, deployment: str, reason: str) -> dict[str, Any]:
        """Raises RaftmetaError."""
        return {"deployment": deployment, "rollout": await self._tender_of(deployment).abort(reason), "reason": reason}

    def _tender_of(self, deployment: str) -> Tender:
        found = self._tenders.get(deployment)
        if found is None:
            raise RaftmetaError(
                "unknown_deployment", f"{deployment[:140]!r} is not on this node; it has {', '.join(self._tenders) or 'none'}"
            )
        return found

    def kick(self) -> None:
        for tender in self._tenders.values():
            tender.kick()

    def keep(self) -> frozenset[str] | None:
        """Checksums that must stay in the store, None while not everything is known."""
        if not self._listed:
            return None
        wanted: set[str] = set()
        for name, tender in self._tenders.items():
            goal, record, previous = tender.goal, tender.remembered.record, self._goals.previous(name)
            if goal is None or goal.offline or previous is None:
                return None
            targets = [goal.committed, goal.change.to if goal.change else None, record.obeyed, record.pin]
            wanted.update(target.checksum for target in targets if target is not None)
            wanted.update(look.record.checksum for look in tender.serving.slots() if look.record.checksum)
            if previous:
                wanted.add(previous)
        return frozenset(wanted)

    async def run(self, means: Means) -> None:
        """Until cancelled."""
        self._means = means
        self._restore()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                group.create_task(self.contact.beat(self._heartbeat))
                group.create_task(self.contact.probe())
                group.create_task(self._start_alone())
                group.create_task(self._retry())
                group.create_task(self._watch_record())
                group.create_task(self._teller.run(self._plane, lambda: self._tenders))
        finally:
            tending = [task for each in self._tasks.values() for task in each]
            await asyncio.gather(tasks.end(tending), self._goals.stop(), self._leaving.stop())

    # --- following

    async def _follow(self) -> None:
        while True:
            listed_at = time.monotonic()
            try:
                await self._watch(await self._list())
            except RaftmetaError as error:
                if error.code == "compacted":
                    log.info("watch_compacted", reason=error.detail)
                    await asyncio.sleep(max(0.0, listed_at + RETRY_S - time.monotonic()))
                    continue
                self.contact.lost(error)
            await asyncio.sleep(RETRY_S)

    async def _list(self) -> int:
        """Everything anew. Gives the revision from which to watch: no later than any of the reads."""
        where = await self._plane.cluster()
        self.contact.refuse_strangers(where)
        records = [record async for record in self._plane.deployments()]
        self._desired.replace(where.generation, records)
        self.contact.heard(where.generation)
        self._listed = True
        self._hear()
        return where.revision

    async def _watch(self, revision: int) -> None:
        """Ends with the watch, or when it is time to list again what could not be read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RELIST_S if self._desired.faults() else None) as limit:
                async for item in self._plane.watch(revision, WATCHED):
                    events = getattr(item, "events", ())
                    if events:
                        self._desired.apply(item.generation, events)
                        self._hear()
                    if not self._desired.faults():
                        limit.reschedule(None)
                    elif limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time() + RELIST_S)

    def _hear(self) -> None:
        """The sides of all first, which wait for no member's answer; what members have to be asked for is begun."""
        self._troubles.note_all("record", self._desired.faults())
        for sides in self._desired.sides():
            self._hear_sides(sides)
        for gone in [name for name in self._tenders if not self._desired.stays(name)]:
            self._goals.forget(gone)
            self._leaving.begin(gone, self._tenders.pop(gone).serving, self._tasks.pop(gone))
        remembered = self._places.journal.record.deployments
        self._troubles.keep_only(lambda name: not name or name in remembered or self._desired.stays(name))
        self._goals.settle()

    def _want(self, item: DeploymentView, goal: Goal) -> None:
        """Raises RaftmetaError where the node's record cannot be written: nothing is done about an order before its sides were heard."""
        if item.name in self._leaving:
            raise RaftmetaError("starting", f"{item.name}: it left this node and came back; what is left of it is given up first")
        tender = self._tenders.get(item.name) or self._adopt(goal, item.model)
        if tender is not None and self._hear_sides(item):  # again for one that was adopted now
            tender.want(goal)

    def _hear_sides(self, item: Sides) -> bool:
        """Of which side this node is, and which one takes requests. False when that could not be written down.

        Durable before anything else is done about an order: a node that may not answer must not, whatever its plan waits for, and whether
        or not a member says what the order's version consists of. What is of an order below one that was heard says nothing of the sides.
        """
        tender, own = self._tenders.get(item.name), item.side_of(self._facts.node)
        if tender is None:
            return True
        memory, decided, order = tender.remembered, item.decided_side, Order(self._desired.generation, item.order_revision)
        why = ""
        try:
            if order >= max(memory.record.serving_order, memory.record.fence):
                if memory.record.side is not own:
                    memory.remember(side=own)
                if memory.hear_serving_side(decided, order):
                    fenced = memory.record.fenced_by is not None
                    log.warning("serving_side", deployment=item.name, serves="both" if decided is None else decided.value, fenced=fenced)
        except RaftmetaError as cause:
            why = str(cause)
        self._troubles.note(item.name, "sides", why)
        return not why

    # --- tenders

    def _restore(self) -> None:
        """Take over every deployment that this node has and nobody tends; what it should do comes later."""
        for name, record in sorted(self._places.journal.record.deployments.items()):
            if name not in self._tenders and name not in self._leaving and not record.leaving:
                self._take_over(record)

    def _adopt(self, goal: Goal, model: str) -> Tender | None:
        """A deployment that lists this node and has no tender yet."""
        name = goal.deployment
        if len(self._tenders) >= self._bounds.max_deployments:
            self._troubles.note(name, "take", f"this node takes part in its limit of {self._bounds.max_deployments}")
            return None
        journal = self._places.journal
        record = journal.deployment(name) or new_record(goal, model, self._places.store.root, self._facts.node)
        journal.put(record)
        return self._take_over(record)

    def _take_over(self, record: DeploymentRecord) -> Tender | None:
        """None where what an earlier control left cannot be had, or not yet: a killed one may be on its way out."""
        tender = None
        try:
            tender = self._start(record)
        except (Refusal, OSError) as cause:
            self._troubles.note(record.name, "take", str(cause))
        else:
            self._troubles.note(record.name, "take", "")
        return tender

    async def _retry(self) -> None:
        """What could not be done is tried again: nobody else would, while nothing changes for the deployment."""
        while True:
            await asyncio.sleep(RETRY_S)
            self._leave_on()
            if self._troubles:
                self._restore()
                if self._listed:
                    self._hear()

    def _leave_on(self) -> None:
        """What an earlier control did not bring to its end."""
        for name, record in sorted(self._places.journal.record.deployments.items()):
            if record.leaving and name not in self._leaving:
                try:
                    self._leaving.begin(name, self._means.serve(record), ())
                except (Refusal, OSError) as cause:
                    self._troubles.note(name, "leave", str(cause))

    async def _watch_record(self) -> None:
        """The front and the workers read the node's record, and a start of control needs it: it is made whole while this one knows it."""
        while True:
            await asyncio.sleep(RECORD_S)
            await asyncio.to_thread(self._places.journal.mend)

    def _start(self, record: DeploymentRecord) -> Tender:
        """Raises Refusal or OSError when what an earlier control left cannot be taken over."""
        name, serving = record.name, self._means.serve(record)
        remembered = Remembered(self._places.journal, name, self._places.clock_ns)
        tender = Tender(remembered, Prepared(self._places.store, serving.held), serving, self._means)
        self._tenders[name] = tender
        self._tasks[name] = [asyncio.create_task(_guarded(tender.run), name=f"tend {name}")]
        if (beside := self._means.beside(tender)) is not None:
            self._tasks[name].append(asyncio.create_task(_guarded(beside), name=f"beside {name}"))
        return tender

    async def _start_alone(self) -> None:
        """Without an answer in time, serve what served last."""
        await asyncio.sleep(self._bounds.start_wait_s)
        while True:
            for name, tender in self._tenders.items():
                if tender.goal is None:
                    self._serve_pin(name, tender)
            await asyncio.sleep(RETRY_S)  # one that could not be taken over at once may be there by now

    def _serve_pin(self, name: str, tender: Tender) -> None:
        record = tender.remembered.record
        target = record.obeyed if record.obeyed is not None and tender.prepared.covers(record.obeyed) else record.pin
        if target is not None:
            log.warning("serving_without_control_plane", deployment=name, version=target.label, silent_s=round(self.contact.silent_s, 1))
            tender.want(Goal(name, record.side, target, record.fence, None, offline=True))

    # --- saying what there is

    def _heartbeat(self) -> dict[str, Any]:
        return report.heartbeat(self._facts, self._looks(), self._places.journal.record.cordoned)

    def _looks(self) -> list[report.Look]:
        return [tender.look() for _, tender in sorted(self._tenders.items())]


async def _guarded(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Work that fails in a way nobody foresaw is logged and starts over: it looks at everything anew anyway."""
    while True:
        try:
            await run()
        except Exception:  # noqa: BLE001 - the outermost loop of a deployment
            log.error("tender_failed", exc_info=True)
            await asyncio.sleep(RETRY_S)
