"""Brings versions into the store: the manifest from the control plane, checked against what was decided, then the bytes from its sources.

One fetch at a time for the whole node. A full quota or disk is answered by removing what no deployment needs, once; what is active,
previous or desired is never removed. Nothing of a manifest is believed before its digests give the checksum that the control plane decided.
Where bytes come from is in no digest: a fetch asks what the label is published with now, and takes the stored manifest only while nobody
answers. Several labels may share a checksum and with it the stored manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

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
MAX_ORIGINS = 1000  # remembered; asking once more is all that forgetting costs


class ManifestSource(Protocol):
    async def get_version(self, model: str, label: str) -> Mapping[str, Any]: ...
    async def get_manifest(self, model: str, label: str) -> Mapping[str, Any]: ...


class StoreProvider:
    def __init__(self, store: Store, fetcher: Fetcher, plane: ManifestSource, keep: Callable[[], frozenset[str] | None]) -> None:
        """`keep` names the checksums that must stay, None while that is not known."""
        self._store = store
        self._fetcher = fetcher
        self._plane = plane
        self._keep = keep
        self._turn = asyncio.Lock()
        self._origins: dict[str, tuple[str, str, str]] = {}  # checksum -> (model, label, manifest digest) of the stored manifest

    async def manifest(self, target: Target) -> Manifest:
        """What the version consists of. Where its bytes come from may be out of date."""
        return await self._stored(target) or await self._published(target)

    async def fetch(self, target: Target, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
        async with self._turn:
            if cancelled():
                raise Cancelled
            return await self._fetch(target, elsewhere, cancelled)

    async def ready_files(self, target: Target, cancelled: Callable[[], bool]) -> None:
        """To be called before modules are made of a version: its files that hold no weights are verified now, mended or fetched again."""
        async with self._turn:
            manifest = await self.manifest(target)
            try:
                await asyncio.to_thread(self._store.materialize, target.checksum, manifest)
            except BlobMismatch as cause:
                log.warning("files_fetched_again", version=target.label, reason=cause.detail)
                files = {file.sha256 for file in manifest.files}
                tensors = frozenset(tensor.sha256 for tensor in manifest.tensors)
                await self._fetch(target, tensors - files, cancelled)

    async def _fetch(self, target: Target, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
        manifest = await self._published(target)
        received = 0
        for _ in range(MAX_TRIES):
            try:
                received += await asyncio.to_thread(self._fetcher.fetch, manifest, elsewhere, cancelled)
                await asyncio.to_thread(self._store.materialize, target.checksum, manifest)
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
        keep = self._keep()
        if keep is None:
            return False
        freed = await asyncio.to_thread(self._store.collect, keep | {target.checksum})
        log.info("store_collected", freed_bytes=freed, kept_versions=len(keep) + 1)
        return freed > 0

    async def _stored(self, target: Target) -> Manifest | None:
        found = await asyncio.to_thread(self._store.manifest, target.checksum)
        return None if found is None or fault_of(found, target) else found

    async def _published(self, target: Target) -> Manifest:
        """As the label has it now, and from here on in the store; what is there already while the control plane does not answer."""
        stored = await self._stored(target)
        try:
            version = await self._plane.get_version(target.model, target.label)
            origin = target.model, target.label, str(version["manifest_digest"])
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
