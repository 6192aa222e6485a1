"""What is done about damaged blocks of the memory that serves: in place while its requests wait, or else by the other slot.

From the moment damage is known requests of the deployment are held, and what workers compute for it counts for nothing: an answer from
damaged memory is a wrong answer. The blocks come from the tensor's blob, which is hashed whole while they are read out of it, and fetched
again if it is not what it was. What cannot be mended in place within a bound is given up: the slot serves nobody any more, and the plan of
the deployment stages the version into the other slot and switches. Requests wait for that too, for a while, and are refused after it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from consistency.vector import BLOCK_BYTES
from node_agent import pause, scrub
from node_agent.active_memory import ActiveMemory, Fix, Watched
from node_agent.fetch import BlobsRotten, FetchFailed
from node_agent.plan import Target
from node_agent.refusal import Refusal
from node_agent.runtime import log
from node_agent.scrub import Remedy
from raftmeta.core.errors import RaftmetaError

LIMIT_S: Final = 10.0  # that requests wait for a repair, the blob's way included; a third of the time that they have
RESTAGE_S: Final = 10.0  # that they wait for the other slot after that
LOOK_S: Final = 0.05
CHUNK_BYTES: Final = 16 * BLOCK_BYTES
FAULTS = (Refusal, FetchFailed, BlobsRotten, RaftmetaError, OSError, TimeoutError)

Damage = Mapping[str, Sequence[int]]  # tensor -> blocks


class Blobs(Protocol):
    """The store, as far as a repair uses it."""

    def path(self, sha256: str) -> Path: ...
    def discard(self, sha256: str) -> None: ...


class Provider(Protocol):
    async def fetch(self, target: Target, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int: ...


class Mended(NamedTuple):
    remedy: Remedy
    why: str = ""  # it could not be repaired in place


@dataclass(frozen=True)
class Mender:
    """Of one deployment."""

    deployment: str
    model: str
    memory: ActiveMemory
    front: pause.Front
    blobs: Blobs
    provider: Provider
    kick: Callable[[], None]  # the plan of the deployment looks again
    limit_s: float = LIMIT_S
    restage_s: float = RESTAGE_S
    most_in_place: int = scrub.MAX_IN_PLACE_BLOCKS  # blocks; more go by the other slot

    async def mend(self, watched: Watched, tensors: Sequence[str], found: Callable[[Damage], None]) -> Mended:
        """`tensors` hold damage; `found` hears of every damaged block of them while requests already wait."""
        async with pause.paused(self.front, self.deployment) as held:
            try:
                async with asyncio.timeout(self.limit_s):
                    damage = {name: blocks for name in tensors if (blocks := await asyncio.to_thread(self.memory.damaged, watched, name))}
                    if not damage or not self.memory.is_current(watched):
                        return Mended(Remedy.NOTHING)
                    await self._tell(found, damage)
                    await self._in_place(watched, damage, held)
                    return Mended(Remedy.REPAIR)
            except FAULTS as cause:
                why = str(cause) or f"it took longer than {self.limit_s:g} s"
                if await self._give_up(watched, tensors, why):
                    self.kick()
                    await self._other_slot()
                    return Mended(Remedy.RESTAGE, why)
                return Mended(Remedy.REPAIR)
            except BaseException:  # what nobody foresaw, and control that stops: requests are let go, so nobody may read this memory
                self.memory.condemn(watched, "")
                raise

    async def _tell(self, found: Callable[[Damage], None], damage: Damage) -> None:
        """What cannot be written down is mended all the same."""
        try:
            await asyncio.to_thread(found, damage)
        except (RaftmetaError, OSError) as cause:
            log.error("damage_not_noted", deployment=self.deployment, reason=str(cause))

    async def _give_up(self, watched: Watched, tensors: Sequence[str], why: str) -> bool:
        """False when a repair that nobody waited for any more came to its end: what serves is right."""
        try:
            without = await asyncio.to_thread(self.memory.prepare, watched, tensors)
            if await asyncio.to_thread(self.memory.is_repaired, watched, tensors):
                return False
            given_up = await asyncio.to_thread(self.memory.condemn, watched, without)
        except BaseException:
            self.memory.condemn(watched, "")
            raise
        log.error("memory_given_up" if given_up else "memory_replaced", deployment=self.deployment, tensors=list(tensors), reason=why)
        return True

    async def _other_slot(self) -> None:
        """Until something verified serves, or requests have waited long enough."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.restage_s):
                while await asyncio.to_thread(self.memory.watched) is None:
                    await asyncio.sleep(LOOK_S)

    async def _in_place(self, watched: Watched, damage: Damage, held: pause.Pause) -> None:
        """Raises one of FAULTS."""
        count = sum(map(len, damage.values()))
        if scrub.remedy(count, self.most_in_place) is Remedy.RESTAGE:
            raise Refusal("slot_busy", "damaged blocks", f"at most {self.most_in_place}", f"{count} in {len(damage)} tensors")
        fixes = [fix for name, blocks in damage.items() for fix in await self._fixes(watched, name, blocks)]
        without = await asyncio.to_thread(self.memory.prepare, watched, list(damage))
        while True:
            until_ns = await held.idle()
            try:
                await asyncio.to_thread(self.memory.repair, watched, fixes, without, until_ns)
                return
            except Refusal as refusal:
                again = self.memory.as_it_is(watched) if refusal.kind == "slot_busy" else None
                if again is None:
                    raise
                watched = again

    async def _fixes(self, watched: Watched, tensor: str, blocks: Sequence[int]) -> list[Fix]:
        sha256 = watched.held[tensor]
        found = await asyncio.to_thread(read_blocks, self.blobs.path(sha256), sha256, blocks)
        if found is None:
            found = await self._fetched_blocks(watched, tensor, blocks)
        return [Fix(tensor, block, functools.partial(_copy, data)) for block, data in found.items()]

    async def _fetched_blocks(self, watched: Watched, tensor: str, blocks: Sequence[int]) -> dict[int, bytes]:
        """Out of the blob as a source has it. Something else of the version that no source has keeps nobody from using it."""
        sha256, record = watched.held[tensor], watched.record
        log.warning("blob_fetched_again", deployment=self.deployment, tensor=tensor, sha256=sha256)
        self.blobs.discard(sha256)
        target = Target(self.model, record.version, record.checksum, record.vector_root)
        why: Exception = Refusal("source_failed", f"tensor {tensor!r}", f"a blob {sha256}", "none that is whole", "fill")
        try:
            await self.provider.fetch(target, frozenset(watched.held.values()) - {sha256}, lambda: False)
        except (FetchFailed, RaftmetaError) as cause:
            why = cause
        found = await asyncio.to_thread(read_blocks, self.blobs.path(sha256), sha256, blocks)
        if found is None:
            raise why
        return found


def read_blocks(path: Path, sha256: str, blocks: Sequence[int]) -> dict[int, bytes] | None:
    """These blocks of a blob, out of the bytes that were hashed. None when it is missing or not what its name says."""
    digest = hashlib.sha256()
    wanted = set(blocks)
    found: dict[int, bytes] = {}
    try:
        with open(path, "rb", buffering=0) as file:
            first = 0
            while chunk := _read_full(file, CHUNK_BYTES):
                digest.update(chunk)
                for block in wanted.intersection(range(first, first + CHUNK_BYTES // BLOCK_BYTES)):
                    begin = (block - first) * BLOCK_BYTES
                    if begin < len(chunk):
                        found[block] = chunk[begin : begin + BLOCK_BYTES]
                first += CHUNK_BYTES // BLOCK_BYTES
    except FileNotFoundError:
        return None
    return found if digest.hexdigest() == sha256 and found.keys() == wanted else None


def _read_full(file: object, size: int) -> bytes:
    """Fewer bytes only at the end of the file."""
    parts = b""
    while len(parts) < size and (more := file.read(size - len(parts))):  # type: ignore[attr-defined]
        parts += more
    return parts


def _copy(data: bytes, into: memoryview) -> None:
    into[:] = data
