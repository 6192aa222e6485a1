"""What control answers to questions for the content of slots: vectors of one deployment or of all, block checks, digests.

Everything is computed from the memory that serves, when it is asked for. Only a question that says how old an answer may be gets an earlier
reading, with its age by this node's monotonic clock; a reading that did not compare is never kept for that. Deployments are read one after
the other, also those of different questions (`readings`), and one that cannot be read is a fault in its own place.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from consistency import block_sidecar
from consistency.vector import Words, pack_blocks
from node_agent.device.port import SlotRecord
from node_agent.messages import Fault, GetDigests, GetVector, GetVectors, Json, Reply
from node_agent.readings import Readings, TooManyReadings
from node_agent.report import NodeFacts
from node_agent.serving import Digests, Reading, VectorFrom
from node_agent.store import Store
from node_agent.tend import Tender
from node_agent.trouble import STEP_FAULTS
from raftmeta.core import block_file
from raftmeta.core.errors import RaftmetaError

T = TypeVar("T")


class Deployments(Protocol):
    @property
    def tenders(self) -> Mapping[str, Tender]: ...


class _Left(Exception):
    """The deployment left this node, and its memory with it, while it was read."""


class _Seen(NamedTuple):
    """One slot that serves, and what its memory was found to hold."""

    record: SlotRecord
    slot: int
    epoch: int
    root: str
    vector_from: VectorFrom
    began_ns: int  # of the reading, by our clock
    reading: Reading | None  # None: an earlier one, of which the root alone is known
    config_digest: str


class VectorAnswers:
    def __init__(self, deployments: Deployments, facts: NodeFacts, store: Store, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._deployments = deployments
        self._facts = facts
        self._store = store
        self._clock_ns = clock_ns
        self._readings = Readings(clock_ns)

    async def answer(self, call: GetVector | GetVectors | GetDigests) -> Reply:
        try:
            match call:
                case GetVectors():
                    return await self._all(call)
                case GetVector():
                    return await self._one(call)
                case GetDigests():
                    return await self._digests(call)
        except TooManyReadings as cause:
            return Fault(call.number, 503, "overloaded", str(cause))
        except _Left as cause:
            return Fault(call.number, 404, "unknown_deployment", str(cause))

    async def _all(self, call: GetVectors) -> Reply:
        looks: list[tuple[str, Tender, _Seen]] = []
        faults: dict[str, Any] = {}
        until_ns = self._until_ns(call.wait_s)
        for name in dict.fromkeys(call.deployments) or sorted(self._deployments.tenders):
            tender = self._deployments.tenders.get(name)
            if self._clock_ns() > until_ns:
                faults[name] = _not_in_time(name, call.wait_s)
                continue
            if tender is None:
                faults[name] = _unknown(name)
                continue
            try:
                seen = await self._look(name, tender, call.max_age_ms, until_ns)
                if seen is None and self._clock_ns() > until_ns:
                    faults[name] = _not_in_time(name, call.wait_s)
                elif seen is None:
                    faults[name] = {"code": "starting", "detail": f"{name}: no verified version serves right now"}
                else:
                    looks.append((name, tender, seen))
            except _Left:
                faults[name] = _unknown(name)
            except TooManyReadings as cause:
                faults[name] = {"code": "overloaded", "detail": f"{name}: {cause}"}
            except STEP_FAULTS as cause:
                faults[name] = {"code": "unreadable", "detail": f"{name}: {type(cause).__name__}: {cause}"[:1000]}
        here = [look for look in looks if self._is_here(look[0], look[1])]  # others left while the next ones were read
        faults |= {name: _unknown(name) for name, tender, _ in looks if not self._is_here(name, tender)}
        body = {
            "node": self._facts.node,
            "zone": self._facts.zone,
            "boot_id": self._facts.boot_id,
            "active_models": self._active_models(),
            "vectors": {name: self._vector(tender, seen) for name, tender, seen in here},  # with their ages as they are now
            "faults": faults,
        }
        return Json(call.number, msgspec.json.encode(body))

    async def _one(self, call: GetVector) -> Reply:
        tender = self._deployments.tenders.get(call.deployment)
        if tender is None:
            return _not_here(call.number, call.deployment)
        until_ns = self._until_ns(call.wait_s)
        if call.blocks:
            read = functools.partial(self._published if call.published else self._in_memory, tender, call)
            found = await self._share(call.deployment, tender, (id(tender), call.blocks, call.published), until_ns, read)
            if found is None:
                return _late(call)
            if isinstance(found, Fault):
                return msgspec.structs.replace(found, number=call.number)  # perhaps of another question that shared the reading
            blocks = base64.b64encode(pack_blocks(found)).decode()
            return Json(call.number, msgspec.json.encode({"tensor": call.blocks, "blocks": blocks}))
        seen = await self._look(call.deployment, tender, None, until_ns)
        if seen is None and self._clock_ns() > until_ns:
            return _late(call)
        if seen is None:
            return _serves_nothing(call.number, call.deployment)
        assert seen.reading is not None
        body = {
            "node": self._facts.node,
            "zone": self._facts.zone,
            "boot_id": self._facts.boot_id,
            "deployment": call.deployment,
            **self._vector(tender, seen),
            "active_models": self._active_models(),
        }
        if call.entries:
            body["entries"] = seen.reading.entries
        return Json(call.number, await asyncio.to_thread(msgspec.json.encode, body))

    def _in_memory(self, tender: Tender, call: GetVector) -> Words | Fault:
        """Block checks of one tensor in the memory that serves. Blocks while it is read."""
        reading = tender.serving.vector(call.blocks)
        if reading is None:
            return _serves_nothing(call.number, call.deployment)
        found = reading.vectors.get(call.blocks)
        if found is None:
            return Fault(call.number, 404, "not_found", f"{call.deployment}: no tensor {call.blocks[:200]!r} in the slot that serves")
        return found.blocks

    def _published(self, tender: Tender, call: GetVector) -> Words | Fault:
        """The same as they were published with the version that serves; they hash to its manifest's entry. Blocks."""
        record = next((slot.record for slot in tender.serving.slots() if slot.active), None)
        if record is None:
            return _serves_nothing(call.number, call.deployment)
        manifest = self._store.manifest(record.checksum)
        file = None if manifest is None else block_file.find(manifest)
        if manifest is None or file is None or not self._store.has(file.sha256, file.size_bytes):
            return Fault(call.number, 404, "not_found", f"{call.deployment}: no file of block checks of version {record.version!r} is here")
        try:
            with block_sidecar.read(self._store.path(file.sha256), manifest) as checks:
                if call.blocks not in checks:
                    return Fault(
                        call.number, 404, "not_found", f"{call.deployment}: {record.version!r} has no tensor {call.blocks[:200]!r}"
                    )
                return checks[call.blocks]
        except RaftmetaError as cause:
            return Fault(call.number, 503, "unreadable", f"{call.deployment}: {cause}"[:1000])

    async def _digests(self, call: GetDigests) -> Reply:
        tender = self._deployments.tenders.get(call.deployment)
        if tender is None:
            return _not_here(call.number, call.deployment)
        if tender.serving.abilities.vector_from is not VectorFrom.MEMORY:
            detail = f"{call.deployment}: a server owns the memory that serves, and this node cannot read it"
            return Fault(call.number, 409, "attested", detail)
        given_up, until_ns = threading.Event(), self._until_ns(call.wait_s)
        is_over = lambda: given_up.is_set() or self._clock_ns() > until_ns  # noqa: E731
        try:
            read = functools.partial(tender.serving.digests, call.after, call.limit_bytes, is_over)
            found = await self._share(call.deployment, tender, given_up, until_ns, read)
        finally:
            given_up.set()  # a call that nobody waits for any more reads no further
        if found is None:
            return _serves_nothing(call.number, call.deployment)
        return Json(call.number, msgspec.json.encode(self._digests_body(call.deployment, found)))

    async def _look(self, name: str, tender: Tender, max_age_ms: int | None, until_ns: int) -> _Seen | None:
        """None while nothing serves, or when memory was not read by then. Raises _Left, TooManyReadings, and what reading does."""
        if max_age_ms is not None:
            proven = tender.serving.proven()
            if proven is not None and proven.age_ms <= max_age_ms:
                began_ns = self._clock_ns() - proven.age_ms * 1_000_000
                digest = await asyncio.to_thread(self._config_digest, proven.record.checksum)
                return _Seen(proven.record, proven.slot, proven.epoch, proven.root, VectorFrom.MEMORY, began_ns, None, digest)
        return await self._share(name, tender, (id(tender), "", False), until_ns, functools.partial(self._read, tender))

    async def _share(self, name: str, tender: Tender, key: Hashable, until_ns: int, read: Callable[[], T]) -> T | None:
        """As of `Readings`; what is read of a deployment that leaves meanwhile is for nobody. Raises _Left too."""
        try:
            found = await self._readings.share(key, until_ns, read)
        except (RaftmetaError, OSError, ValueError) as cause:  # a mapping that was closed is a ValueError
            if self._is_here(name, tender):
                raise
            raise _Left(_unknown(name)["detail"]) from cause
        if not self._is_here(name, tender):
            raise _Left(_unknown(name)["detail"])
        return found

    def _is_here(self, name: str, tender: Tender) -> bool:
        return self._deployments.tenders.get(name) is tender

    def _read(self, tender: Tender) -> _Seen | None:
        """Blocks while memory and files are read."""
        began_ns = self._clock_ns()
        reading = tender.serving.vector()
        if reading is None:
            return None
        digest = self._config_digest(reading.record.checksum)
        return _Seen(reading.record, reading.slot, reading.epoch, reading.root, reading.vector_from, began_ns, reading, digest)

    def _vector(self, tender: Tender, seen: _Seen) -> dict[str, Any]:
        record = tender.remembered.record
        age_ms = -(-(self._clock_ns() - seen.began_ns) // 1_000_000)
        return {
            "model": record.model,
            "version": seen.record.version,
            "checksum": seen.record.checksum,
            "slot": seen.slot,
            "epoch": seen.epoch,
            "vector_root": seen.root,
            "vector_from": seen.vector_from.value,
            "config_digest": seen.config_digest,
            "computed_at_ms": time.time_ns() // 1_000_000 - age_ms,
            "age_ms": age_ms,
            "lag_ms": record.lag_ms,
            "switching": not tender.look().ready,
        }

    def _digests_body(self, deployment: str, found: Digests) -> dict[str, Any]:
        return {
            "node": self._facts.node,
            "boot_id": self._facts.boot_id,
            "deployment": deployment,
            "checksum": found.record.checksum,
            "slot": found.slot,
            "epoch": found.epoch,
            "sha256": found.sha256,
            "following": found.following,
        }

    def _config_digest(self, checksum: str) -> str:
        """Of the files as they lie there now; "" when the manifest is not there. Blocks while files are read."""
        found = self._store.beside.digests(checksum)
        return "" if found is None else found.config

    def _until_ns(self, wait_s: float) -> int:
        """Memory is read only for who still waits for the answer."""
        return self._clock_ns() + round(wait_s * 1e9)

    def _active_models(self) -> int:
        return sum(any(slot.active for slot in tender.serving.slots()) for tender in self._deployments.tenders.values())


def _unknown(deployment: str) -> dict[str, str]:
    return {"code": "unknown_deployment", "detail": f"deployment {deployment!r} is not on this node"}


def _not_here(number: int, deployment: str) -> Fault:
    unknown = _unknown(deployment)
    return Fault(number, 404, unknown["code"], unknown["detail"])


def _not_in_time(deployment: str, wait_s: float) -> dict[str, str]:
    return {"code": "timed_out", "detail": f"{deployment}: not read within {wait_s:g} s"}


def _late(call: GetVector) -> Fault:
    late = _not_in_time(call.deployment, call.wait_s)
    return Fault(call.number, 503, late["code"], late["detail"])


def _serves_nothing(number: int, deployment: str) -> Fault:
    return Fault(number, 503, "starting", f"{deployment}: no verified version serves right now")
