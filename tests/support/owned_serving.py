"""The serving port over a server that owns its memory, as an adapter to such an engine would be written.

A slot is a name on the server: its number, the version, and which attempt it was. The newest attempt of this adapter, or after a crash the
one that serves or else the newest that the server lists, is what the slot holds; all others are strays, unloaded before the next load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from node_agent import probe
from node_agent.device.port import EMPTY_RECORD, SlotRecord, SlotState
from node_agent.journal import Proof
from node_agent.messages import Tensor
from node_agent.plan import Order, SlotSeen, Target
from node_agent.refusal import Refusal
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
from node_agent.store import Store
from raftmeta.core.manifest import Manifest
from raftmeta.core.types import StageCounters
from tests.support.owning_server import OwningServer, ServerRefused

POLL_S = 0.005
_KINDS = {"no_memory": "no_headroom", "busy": "slot_busy", "active": "slot_active", "not_ready": "slot_not_verified"}


class _Name(NamedTuple):
    slot: int
    checksum: str
    attempt: int

    @classmethod
    def parse(cls, name: str) -> _Name:
        slot, checksum, attempt = name.split("/")
        return cls(int(slot), checksum, int(attempt))

    def __str__(self) -> str:
        return f"{self.slot}/{self.checksum}/{self.attempt}"


class OwnedServing:
    kernel = "server 1"

    def __init__(self, server: OwningServer, store: Store, slots: int = 2) -> None:
        self.abilities = Abilities(VectorFrom.SERVER, DrainKnown.TOLD, slots)
        self._server = server
        self._store = store
        names = sorted(map(_Name.parse, server.held), key=lambda name: (str(name) == server.active, name.attempt))
        self._names = {name.slot: name for name in names}
        self._attempts = max((name.attempt for name in names), default=0)
        self._checked: dict[_Name, str] = {}  # name -> rollout that had it checked
        self._warmed: dict[_Name, str] = {}

    # --- looking

    def slots(self) -> tuple[SlotLook, ...]:
        return tuple(SlotLook(self._record(slot), slot == self._active()) for slot in (0, 1))

    def look(self, change: str | None) -> SlotsSeen:
        active = self._active()
        seen = [self._slot_seen(slot, None if slot == active else change) for slot in (0, 1)]
        return SlotsSeen((seen[0], seen[1]), active, self._server.switches)

    def held(self) -> frozenset[str]:
        return frozenset()  # nothing can be taken out of its memory

    def cost(self, target: Target, slot: int, order: Order) -> StageCounters:
        name, manifest = self._names.get(slot), self._manifest(target)
        total = sum(tensor.size_bytes for tensor in manifest.tensors)
        kept = total if name is not None and name.checksum == target.checksum else 0
        return StageCounters(
            bytes_total=total, bytes_read=total - kept, bytes_kept=kept, tensors_changed=0 if kept else len(manifest.tensors)
        )

    def vector(self, tensor: str = "") -> Reading | None:
        slot = self._active()
        if slot is None:
            return None
        attested = self._server.digest(self._server.active)
        record = msgspec.structs.replace(self._record(slot), vector_root=attested)
        return Reading(record, slot, self._server.switches, {}, VectorFrom.SERVER)

    def proven(self) -> Proven | None:
        return None

    def digests(self, after: str, limit_bytes: int, given_up: Callable[[], bool]) -> Digests | None:
        raise AssertionError("nobody but the server reads its memory")

    def evidence(self) -> Evidence | None:
        slot = self._active()
        name = None if slot is None else self._names.get(slot)
        if slot is None or name not in self._checked:
            return None
        return Evidence(self._record(slot), slot, self._server.switches, 0, {}, VectorFrom.SERVER)

    def holders(self, slot: int) -> tuple[Holder, ...]:
        name = self._names.get(slot)
        count = 0 if name is None else self._server.used_by(str(name))
        return (Holder(f"the server, in {count} streams that it does not name", None),) if count else ()

    # --- doing

    async def drain(self, slot: int, limit_s: float) -> None:
        self._require_standby(slot)
        deadline = time.monotonic() + limit_s
        while holders := self.holders(slot):
            if time.monotonic() >= deadline:
                raise Refusal("slot_busy", f"slot {slot}", "no stream", ", ".join(map(str, holders)))
            await asyncio.sleep(POLL_S)

    async def cancel(self, slot: int) -> None:
        self._require_standby(slot)
        if slot in self._names:
            self._server.abort_streams(str(self._names[slot]))

    async def stage(self, work: Staging) -> StageCounters:
        self._require_standby(work.slot)
        if self.abilities.slots < 2 and self._active() is not None:
            raise Refusal("no_second_slot", f"slot {work.slot}", "a second slot", "a server that holds one version", "plan")
        self._attempts += 1
        name = _Name(work.slot, work.target.checksum, self._attempts)
        with _refusals(f"slot {work.slot}"):
            await self._unload(work.slot)
            await self._server.load(str(name), work.target.label, work.target.checksum, self._tensors(work.manifest))
            attested = self._server.digest(str(name))
            self._names[work.slot] = name
            if attested != work.target.vector_root:
                await self._unload(work.slot)
                raise Refusal("vector_mismatch", f"slot {work.slot}, {work.target.label}", work.target.vector_root, attested, "verify")
        self._checked[name] = work.change
        return self.cost(work.target, work.slot, work.order)

    async def verify(self, target: Target, slot: int, change: str) -> None:
        name = self._need(slot, target)
        attested = self._server.digest(str(name))
        if attested != target.vector_root:
            if self._server.active == str(name):
                self._server.active = ""
            await self._unload(slot)
            raise Refusal("vector_mismatch", f"slot {slot}, {target.label}", target.vector_root, attested, "verify")
        self._checked[name] = change

    async def probe(self, target: Target, slot: int) -> Proof:
        name, manifest = self._need(slot, target), self._manifest(target)
        answer = (Tensor("y", "UINT8", (1,), self._server.infer(str(name))[1]),)
        measured = [found for asked in manifest.probes for found in probe.measure(asked, answer, ["U8"])]
        wrong = [found for found in measured if not found.holds]
        if wrong:
            raise Refusal(
                "probe_drift", f"probe {wrong[0].probe!r}", "what the publisher saw", wrong[0].note or str(wrong[0].value), "probe"
            )
        return Proof(target.checksum, self.kernel, 0, 0, {}, tuple(measured))

    async def warm(self, target: Target, slot: int, change: str) -> None:
        name = self._need(slot, target)
        with _refusals(f"slot {slot}"):
            await self._server.make_ready(str(name))
        self._warmed[name] = change

    async def switch(self, target: Target, slot: int) -> Switched:
        name = self._need(slot, target)
        if name not in self._checked or name not in self._warmed:
            raise Refusal("slot_not_verified", f"slot {slot}", f"{target.label}, checked and warmed since this began", "one that was not")
        with _refusals(f"slot {slot}"):
            return Switched(await self._server.switch(str(name)), 0.0)

    async def answering(self, target: Target, limit_s: float) -> None:
        label = self._server.infer()[0] if self._server.active else "nothing"
        if label != target.label:
            raise Refusal("engine_unavailable", "the server", f"answers of {target.label}", f"answers of {label}")

    async def release(self, slot: int | None) -> None:
        if slot is not None:
            self._require_standby(slot)
        with _refusals(f"slot {slot}"):
            for each in (0, 1) if slot is None else (slot,):
                if slot is None and each == self._active():
                    self._server.active = ""
                await self._unload(each)

    def close(self) -> None: ...

    def destroy(self) -> None:
        self._server.restart()

    # --- names

    def _active(self) -> int | None:
        return _Name.parse(self._server.active).slot if self._server.active else None

    def _require_standby(self, slot: int) -> None:
        if slot == self._active():
            raise Refusal("slot_active", f"slot {slot}", "a slot that is not active", "the active slot")

    def _slot_seen(self, slot: int, change: str | None) -> SlotSeen:
        record, name = self._record(slot), self._names.get(slot)
        counts = [name is not None and name in known and change in (None, known[name]) for known in (self._checked, self._warmed)]
        return SlotSeen(record.version, record.checksum, record.state, counts[0], counts[1])

    def _record(self, slot: int) -> SlotRecord:
        name = self._names.get(slot)
        held = None if name is None else self._server.held.get(str(name))
        if held is None:
            return EMPTY_RECORD
        return SlotRecord(SlotState.VERIFIED, held.label, held.checksum, vector_root=self._server.digest(str(name)))

    async def _unload(self, slot: int) -> None:
        """All that the server holds under this slot, strays of abandoned attempts included."""
        for name in [name for name in self._server.held if _Name.parse(name).slot == slot]:
            await self._server.unload(name)
        self._names.pop(slot, None)

    def _need(self, slot: int, target: Target) -> _Name:
        name, record = self._names.get(slot), self._record(slot)
        if name is None or (record.version, record.checksum) != (target.label, target.checksum):
            raise Refusal("slot_not_verified", f"slot {slot}", target.label, record.version or "nothing")
        return name

    def _manifest(self, target: Target) -> Manifest:
        found = self._store.manifest(target.checksum)
        if found is None:
            raise Refusal("source_failed", f"manifest of {target.label}", "one in the store", "none", "plan")
        return found

    def _tensors(self, manifest: Manifest) -> dict[str, bytes]:
        return {tensor.name: self._store.path(tensor.sha256).read_bytes() for tensor in manifest.tensors}


@contextmanager
def _refusals(subject: str) -> Iterator[None]:
    """What the server refuses, in the words of this agent."""
    try:
        yield
    except ServerRefused as cause:
        raise Refusal(_KINDS.get(cause.code, "engine_unavailable"), subject, "a server that does it", cause.detail) from cause
