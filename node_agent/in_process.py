"""The serving port over our own slots: the station's shared memory, and the workers and the prober that compute from it.

Adds no rule of its own. Whoever calls sees versions in slots; that workers forget a slot before it is rewritten, and give up the arena
before another one takes its place, is settled here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from node_agent.crew import Crew
from node_agent.journal import Proof
from node_agent.plan import Order, Target
from node_agent.refusal import Refusal
from node_agent.runtime import log
from node_agent.serving import (
    Abilities,
    Digests,
    DrainKnown,
    Evidence,
    Holder,
    Proven,
    Reading,
    SlotLook,
    SlotsSeen,
    Staging,
    Switched,
    VectorFrom,
)
from node_agent.station import Station
from raftmeta.core.types import StageCounters

POLL_S = 0.005  # between looks at who uses a slot


class InProcess:
    abilities = Abilities(VectorFrom.MEMORY, DrainKnown.COUNTED, slots=2)

    def __init__(self, station: Station, crew: Crew, kernel: str) -> None:
        """`kernel`: what computes on this node, as probes record it."""
        self.station = station
        self.kernel = kernel
        self._name = station.name
        self._crew = crew

    # --- looking

    def slots(self) -> tuple[SlotLook, ...]:
        active = self.station.active
        return tuple(SlotLook(self.station.slot_record(slot), slot == active) for slot in (0, 1))

    def look(self, change: str | None) -> SlotsSeen:
        return self.station.look(change, lambda slot, target: self._crew.loaded(self._name, slot, target))

    def held(self) -> frozenset[str]:
        return self.station.held_by_active()

    def cost(self, target: Target, slot: int, order: Order) -> StageCounters:
        return self.station.staging_cost(target, slot, order)

    def vector(self, tensor: str = "") -> Reading | None:
        return self.station.vector(tensor)

    def proven(self) -> Proven | None:
        return self.station.proven()

    def digests(self, after: str, limit_bytes: int, given_up: Callable[[], bool]) -> Digests | None:
        return self.station.digests(after, limit_bytes, given_up)

    def evidence(self) -> Evidence | None:
        return self.station.evidence()

    # --- doing

    async def drain(self, slot: int, limit_s: float) -> None:
        """What is in the gate first, then what computes beside it: a worker answers for its slot once it computes nothing.

        A worker that is busy elsewhere is waited for as long as a worker may take to answer, whatever the limit.
        """
        deadline = time.monotonic() + limit_s
        while not self.station.drained(slot) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self.station.require_drained(slot)
        self.station.forget_warm(slot)
        forgetting = asyncio.ensure_future(self._crew.release(self._name, slot))
        try:
            await asyncio.wait({forgetting}, timeout=max(POLL_S, deadline - time.monotonic()))
            while not forgetting.done():
                if held := ", ".join(map(str, self.holders(slot))):
                    raise Refusal("slot_busy", f"slot {slot}", "no request beside the gate", held)
                await asyncio.wait({forgetting}, timeout=POLL_S)
            forgetting.result()
        finally:
            forgetting.cancel()

    async def cancel(self, slot: int) -> None:
        """A worker cannot interrupt what it computes: it answers the request with its end, and ends."""
        if slot == self.station.active:
            raise Refusal("slot_active", f"slot {slot}", "a slot that is not active", "the active slot")
        for held in self.station.held(slot):
            if not await self._crew.cancel(self._name, slot, held.worker):
                log.error("worker_killed", deployment=self._name, worker=held.worker, reason="it did not answer when it was told to end")
                self.station.end_holder(slot, held.worker)

    def holders(self, slot: int) -> tuple[Holder, ...]:
        return tuple(Holder(f"worker {held.worker}", held.seconds) for held in self.station.held(slot))

    async def stage(self, work: Staging) -> StageCounters:
        if not await asyncio.to_thread(self.station.has_room, work.manifest):
            await self._crew.release(self._name, -1)
            await asyncio.to_thread(self.station.make_room, work.manifest)
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(self.station.stage, work, given_up.is_set)
        finally:
            given_up.set()  # a thread does not end with the task that waits for it

    async def verify(self, target: Target, slot: int, change: str) -> None:
        await asyncio.to_thread(self.station.verify, target, slot, change)

    async def probe(self, target: Target, slot: int) -> Proof:
        found = await self._crew.prove(self._name, slot, target)
        return Proof(target.checksum, self.kernel, found.warm_ms, found.peak_bytes, found.derived, found.measured)

    async def warm(self, target: Target, slot: int, change: str) -> None:
        self.station.note_warm(slot, change, await self._crew.load(self._name, slot, target))

    async def switch(self, target: Target, slot: int) -> Switched:
        done = await asyncio.to_thread(self.station.switch, target, slot)
        return Switched(done.epoch, done.call_us)

    async def answering(self, target: Target, limit_s: float) -> None:
        await self._crew.acknowledged(self._name, target, limit_s)

    async def release(self, slot: int | None) -> None:
        if slot is not None:
            self.station.forget_warm(slot)
        await self._crew.release(self._name, -1 if slot is None else slot)

    def close(self) -> None:
        self.station.close()

    def destroy(self) -> None:
        self.station.destroy()
