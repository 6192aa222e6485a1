"""Brings versions into the store: the manifest from the control plane, checked against what was decided, then the bytes from its sources.

Fetches of one version come one after another, those of several beside each other: a slow source keeps nobody waiting but who wants its
version. What needs no fetch waits for none. A full quota or disk is answered by removing what no deployment needs, once; what is active,
previous or desired is never removed. Nothing of a manifest is believed before its digests give the checksum that the control plane decided.
Where bytes come from is in no digest: a fetch asks what the label is published with now, and takes the stored manifest only while nobody
answers. Several labels may share a checksum and with it the stored manifest.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from node_agent.desired import read
from node_agent.engine import known
from node_agent.fetch import INTEGRITY_MISMATCH, BlobsRotten, Cancelled, Fetcher, FetchFailed
from node_agent.plan import Target
from node_agent.report import describe
from node_agent.runtime import log
from node_agent.store import BlobMismatch, Store, blobs_of, check_blob
from raftmeta.core import manifest as manifests
from raftmeta.core.errors import ErrorClass, RaftmetaError
from raftmeta.core.manifest import Manifest

_FULL = ("quota_exceeded", "disk_full")
MAX_TRIES = 3  # of a fetch: one finds blobs that rotted, one finds the disk full
MAX_FETCHES = 64  # beside each other
LOOK_S = 0.1  # between looks whether a wait is still wanted
MAX_ORIGINS = 1000  # remembered; asking once more is all that forgetting costs


class VersionView(msgspec.Struct, frozen=True):
    """What is taken from a version's record."""

    manifest_digest: str


class ManifestSource(Protocol):
    async def get_version(self, model: str, label: str) -> Mapping[str, Any]: ...
    async def get_manifest(self, model: str, label: str) -> Mapping[str, Any]: ...


class StoreProvider:
    def __init__(
        self, store: Store, fetcher: Fetcher, plane: ManifestSource, keep: Callable[[], frozenset[str] | None], engines: Sequence[str]
    ) -> None:
        """`keep` names the checksums that must stay, None while that is not known; `engines` those that this node has."""
        self._store = store
        self._fetcher = fetcher
        self._plane = plane
        self._keep = keep
        self._engines = engines
        self._fetches: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by checksum: who fetches
        self._files: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # the same for who writes its directory
        self._room = asyncio.Lock()  # nothing begins while what nobody needs is removed
        self._wanted: Counter[str] = Counter()  # checksums that are being fetched
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "fetch")  # of their own: whatever they wait for, blocking work goes on
        self._origins: dict[str, tuple[str, str, str]] = {}  # checksum -> (model, label, manifest digest) of the stored manifest

    async def manifest(self, target: Target) -> Manifest:
        """What the version consists of. Where its bytes come from may be out of date."""
        return await self._stored(target) or await self._published(target)

    async def fetch(self, target: Target, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
        stopped = threading.Event()
        try:
            async with _turn(self._fetches, target.checksum, cancelled):
                manifest = await self._published(target)
                known.require(manifest.engine, self._engines, target.label, "plan")  # before its bytes come
                async with self._begun(target, manifest):
                    return await self._fetch(target, manifest, elsewhere, lambda: cancelled() or stopped.is_set())
        finally:
            stopped.set()  # a thread that nobody waits for any more

    @asynccontextmanager
    async def _begun(self, target: Target, manifest: Manifest) -> AsyncIterator[None]:
        """What comes meanwhile is not taken for what nobody needs."""
        async with self._room:
            if await self._stored(target) is None:  # removed just now
                await asyncio.to_thread(self._store.put_manifest, target.checksum, manifest)
            self._wanted[target.checksum] += 1
        try:
            yield
        finally:
            self._wanted[target.checksum] -= 1
            self._wanted += Counter()  # forget what is at zero

    async def ready_files(self, target: Target, cancelled: Callable[[], bool]) -> None:
        """To be called before modules are made of a version: its files that hold no weights are verified now, mended or fetched again."""
        manifest = await self.manifest(target)
        try:
            await self._materialize(target, manifest, cancelled)
        except BlobMismatch as cause:
            log.warning("files_fetched_again", version=target.label, reason=cause.detail)
            files = {file.sha256 for file in manifest.files}
            tensors = frozenset(tensor.sha256 for tensor in manifest.tensors)
            await self.fetch(target, tensors - files, cancelled)

    async def _materialize(self, target: Target, manifest: Manifest, cancelled: Callable[[], bool]) -> None:
        async with _turn(self._files, target.checksum, cancelled):
            await asyncio.to_thread(self._store.materialize, target.checksum, manifest)

    async def _fetch(self, target: Target, manifest: Manifest, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
        received = 0
        for _ in range(MAX_TRIES):
            try:
                running = asyncio.get_running_loop().run_in_executor(self._threads, self._fetcher.fetch, manifest, elsewhere, cancelled)
                received += await running
                await self._materialize(target, manifest, cancelled)
                await asyncio.to_thread(self._store.sync)
                return received
            except BlobMismatch as cause:
                log.warning("files_fetched_again", version=target.label, reason=cause.detail)
            except RaftmetaError as error:
                if error.code not in _FULL or not await self._make_room(target):
                    raise
        raise BlobsRotten(f"files of {describe(target)} changed on the disk of this node as often as they were fetched: {MAX_TRIES} times")

    async def discard_rotten(self, target: Target) -> None:
        manifest = await self.manifest(target)
        count = await asyncio.to_thread(self._discard_rotten, manifest)
        if count:
            raise BlobsRotten(f"{count} blobs of {describe(target)} had changed on the disk of this node; they are fetched again")

    def _discard_rotten(self, manifest: Manifest) -> int:
        rotten = [s for s, size in dict(blobs_of(manifest)).items() if self._store.has(s, size) and not check_blob(self._store.path(s), s)]
        for sha256 in rotten:
            self._store.discard(sha256)
        return len(rotten)

    async def _make_room(self, target: Target) -> bool:
        async with self._room:
            keep = self._keep()
            if keep is None:
                return False
            keep |= {target.checksum, *self._wanted}
            freed = await asyncio.to_thread(self._store.collect, keep)
        log.info("store_collected", freed_bytes=freed, kept_versions=len(keep))
        return freed > 0

    async def _stored(self, target: Target) -> Manifest | None:
        found = await asyncio.to_thread(self._store.manifest, target.checksum)
        return None if found is None or fault_of(found, target) else found

    async def _published(self, target: Target) -> Manifest:
        """As the label has it now, and from here on in the store; what is there already while the control plane does not answer."""
        stored = await self._stored(target)
        try:
            version = read(await self._plane.get_version(target.model, target.label), VersionView)
            origin = target.model, target.label, version.manifest_digest
            if stored is not None and self._origins.get(target.checksum) == origin:
                return stored
            reply = await self._plane.get_manifest(target.model, target.label)
        except RaftmetaError as error:
            if stored is None or error.info.error_class is not ErrorClass.UNAVAILABLE:
                raise
            log.warning("stored_manifest_used", version=target.label, reason=str(error))
            return stored
        found = _read(reply, target)
        await asyncio.to_thread(self._store.put_manifest, target.checksum, found)
        if len(self._origins) >= MAX_ORIGINS:
            self._origins.clear()
        self._origins[target.checksum] = origin
        return found


@asynccontextmanager
async def _turn(locks: WeakValueDictionary[str, asyncio.Lock], checksum: str, cancelled: Callable[[], bool]) -> AsyncIterator[None]:
    """Raises Cancelled, also while it waits."""
    lock = locks.setdefault(checksum, asyncio.Lock())
    while True:
        if cancelled():
            raise Cancelled
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await lock.acquire()
                break
    try:
        yield
    finally:
        lock.release()


def _read(reply: Mapping[str, Any], target: Target) -> Manifest:
    try:
        manifest = msgspec.convert(dict(reply), Manifest)
    except msgspec.ValidationError as cause:
        raise RaftmetaError("bad_json", f"the control plane sent no manifest for {describe(target)}: {cause}") from cause
    fault = fault_of(manifest, target)
    if fault:
        raise FetchFailed(INTEGRITY_MISMATCH, f"manifest of {describe(target)}: {fault}")
    return manifest


def fault_of(manifest: Manifest, target: Target) -> str:
    """Why this is not the manifest that was decided, empty if it is. Its sources are judged by who opens them, one by one."""
    faults = manifests.faults(msgspec.structs.replace(manifest, sources=()))
    if faults:
        return faults[0]
    found = manifests.checksum(manifests.config_digest(manifest), manifests.weights_digest(manifest))
    if found != target.checksum:
        return f"its digests give the checksum {found}, decided was {target.checksum}"
    if manifest.vector_root != target.vector_root:
        return f"its vector root is {manifest.vector_root}, decided was {target.vector_root}"
    return ""
