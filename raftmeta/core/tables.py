"""The maps of the state as mutable tables, for the time of one batch.

A table is a persistent map with the changes of the batch on top: a record is encoded once when it is put, and the map and the hash are
brought up to date once, by `finish`. Every change is noted in the ledger with what stood there before, so that a refusal takes it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from rpds import HashTrieMap

from raftmeta.core.events import DELETE, PUT, Event, Value
from raftmeta.core.state import (
    DIGEST_BYTES,
    MODEL,
    NO_VERSIONS,
    VERSION,
    ModelEntry,
    State,
    VersionItem,
    encode_record,
    leaf,
    version_image,
)
from raftmeta.core.types import ModelRecord, VersionRecord

BULK = 1_024  # entries written into a persistent map per call, which holds the interpreter lock for about 1.5 us each

R = TypeVar("R", bound=Value)
V = TypeVar("V")


class Undoable(Protocol):
    def undo(self, key: str, before: Any) -> None: ...


class Entry(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """A record with what the hash and the quota need of it, or the absence of one."""

    value: R | None
    image: bytes  # what stands for it in the hash
    size_bytes: int  # of key and value, for the quota


ABSENT: Entry[Any] = Entry(None, b"", 0)


class Ledger:
    """What all tables write to. It knows no table once a batch is over, so that a batch leaves no cycle for the collector."""

    __slots__ = ("events", "hash_sum", "revision", "size_bytes", "undo_log")

    def __init__(self, base: State) -> None:
        self.revision = base.revision
        self.size_bytes = base.size_bytes
        self.hash_sum = base.hash_sum
        self.events: list[Event] = []
        self.undo_log: list[tuple[Undoable, str, Any]] = []  # who takes it back, the key, what stood there


class Table(Generic[R]):
    """One map of the state with the changes of a batch on top."""

    __slots__ = ("base", "changed", "count", "event", "kind", "ledger", "original")

    def __init__(self, ledger: Ledger, base: Mapping[str, R], kind: bytes, event: str) -> None:
        self.ledger = ledger
        self.base = base
        self.kind = kind  # prefix in the hash
        self.event = event
        self.count = len(base)
        self.changed: dict[str, Entry[R]] = {}
        self.original: dict[str, Entry[R]] = {}  # what the state held of a changed key

    def get(self, key: str) -> R | None:
        entry = self.changed.get(key)
        return self.base.get(key) if entry is None else entry.value

    def put(self, key: str, value: R) -> None:
        """Write a record, whether the key is there or not."""
        image = encode_record(value)
        self._replace(key, Entry(value, image, len(key) + len(image)), PUT)

    def add(self, key: str, entry: Entry[R]) -> None:
        """Write a record under a key for which `get` just gave None: `put` without looking again."""
        ledger = self.ledger
        ledger.undo_log.append((self, key, self.changed.get(key)))
        ledger.size_bytes += entry.size_bytes
        ledger.events.append(Event(ledger.revision, self.event, key, PUT, entry.value))
        self.count += 1
        self.changed[key] = entry

    def delete(self, key: str) -> None:
        """Remove a record that is there."""
        self._replace(key, ABSENT, DELETE)

    def undo(self, key: str, before: Entry[R] | None) -> None:
        now = before or self._original(key)
        self.count += (self.changed[key].value is None) - (now.value is None)
        if before is None:
            del self.changed[key]
        else:
            self.changed[key] = before

    def entry_of(self, key: str, value: R) -> Entry[R]:
        """A record of the state as an entry."""
        image = encode_record(value)
        return Entry(value, image, len(key) + len(image))

    def _replace(self, key: str, entry: Entry[R], op: str) -> None:
        ledger, before = self.ledger, self.changed.get(key)
        ledger.undo_log.append((self, key, before))
        if before is None:
            before = self._original(key)
        ledger.size_bytes += entry.size_bytes - before.size_bytes
        ledger.events.append(Event(ledger.revision, self.event, key, op, entry.value))
        self.count += (before.value is None) - (entry.value is None)
        self.changed[key] = entry

    def _original(self, key: str) -> Entry[R]:
        entry = self.original.get(key)
        if entry is None:
            value = self.base.get(key)
            entry = self.original[key] = ABSENT if value is None else self.entry_of(key, value)
        return entry


class RecordTable(Table[R]):
    """A table whose map holds the records alone."""

    __slots__ = ("records",)

    def __init__(self, ledger: Ledger, records: HashTrieMap[str, R], kind: bytes, event: str) -> None:
        super().__init__(ledger, records, kind, event)
        self.records = records

    def finish(self) -> HashTrieMap[str, R]:
        """The new map; adds the change of the hash to the ledger."""
        if not self.changed:
            return self.records
        written: dict[str, R] = {}
        total, kind, original, records = 0, self.kind, self.original, self.records
        for key, entry in self.changed.items():
            before = original.get(key)
            if before is not None and before.value is not None:
                total -= leaf(kind, key, before.image)
            if entry.value is None:
                records = records.discard(key)
            else:
                written[key] = entry.value
                total += leaf(kind, key, entry.image)
        self.ledger.hash_sum += total
        return bulk_update(records, written)


class VersionTable(RecordTable[VersionRecord]):
    """Versions with their manifests. A manifest stands in the catalog beside the number of its version, and counts towards the quota."""

    __slots__ = ("fresh", "manifests")

    def __init__(self, ledger: Ledger, base: State) -> None:
        super().__init__(ledger, base.versions, VERSION, "version")
        self.manifests = base.manifests
        self.fresh: dict[str, bytes] = {}  # manifests of this batch

    def publish(self, version: VersionRecord, manifest: bytes, manifest_digest: bytes) -> None:
        """Add a version that is not there."""
        key = f"{version.model}/{version.label}"
        record = encode_record(version)
        self.fresh[key] = manifest
        self.add(key, Entry(version, record + manifest_digest, len(key) + len(record) + len(manifest)))

    def entry_of(self, key: str, value: VersionRecord) -> Entry[VersionRecord]:
        manifest = self.manifests[key]
        image = version_image(value, manifest)
        return Entry(value, image, len(key) + len(image) - DIGEST_BYTES + len(manifest))

    def moves(self) -> tuple[dict[str, list[VersionItem]], dict[str, list[int]]]:
        """By model: the versions that came, and the numbers of those that went."""
        came: dict[str, list[VersionItem]] = {}
        went: dict[str, list[int]] = {}
        for key, before in self.original.items():
            if before.value is not None and key in self.changed:
                went.setdefault(before.value.model, []).append(before.value.number)
        for key, entry in self.changed.items():
            version = entry.value
            if version is not None:
                came.setdefault(version.model, []).append((version.number, version.label, self.fresh[key]))
        return came, went


class ModelTable(Table[ModelRecord]):
    """Models, whose map also holds the versions of each by number: one persistent insertion for both."""

    __slots__ = ("catalog",)

    def __init__(self, ledger: Ledger, base: State) -> None:
        super().__init__(ledger, base.models, MODEL, "model")
        self.catalog = base.catalog

    def get(self, key: str) -> ModelRecord | None:
        entry = self.changed.get(key)
        if entry is not None:
            return entry.value
        found = self.catalog.get(key)
        return None if found is None else found.record

    def entry_of(self, key: str, value: ModelRecord) -> Entry[ModelRecord]:
        return Entry(value, b"", self.catalog[key].size_bytes)

    def finish(self, came: dict[str, list[VersionItem]], went: dict[str, list[int]]) -> HashTrieMap[str, ModelEntry]:
        """The new catalog. A model changes with each of its versions, so whatever came or went belongs to a changed model."""
        written: dict[str, ModelEntry] = {}
        total, catalog = 0, self.catalog
        for name, entry in self.changed.items():
            before = catalog.get(name)
            versions = NO_VERSIONS if before is None else before.versions
            for number in went.get(name, ()):
                versions = versions.removed(versions.first_after((number,)))
            if name in came:
                versions = versions.extended(sorted(came[name]))
            now = leaf(MODEL, name, entry.image)
            total += now if before is None else now - before.leaf
            assert entry.value is not None, name  # models are never deleted
            written[name] = ModelEntry(entry.value, now, entry.size_bytes, versions)
        self.ledger.hash_sum += total
        return bulk_update(catalog, written)


class Histories:
    """The ids of the kept rollouts by deployment, oldest first; derived, so outside the hash and the quota."""

    __slots__ = ("base", "changed", "ledger")

    def __init__(self, ledger: Ledger, base: HashTrieMap[str, tuple[str, ...]]) -> None:
        self.ledger = ledger
        self.base = base
        self.changed: dict[str, tuple[str, ...]] = {}

    def get(self, deployment: str) -> tuple[str, ...]:
        return self.changed.get(deployment) or self.base.get(deployment) or ()

    def put(self, deployment: str, ids: tuple[str, ...]) -> None:
        self.ledger.undo_log.append((self, deployment, self.get(deployment)))
        self.changed[deployment] = ids

    def undo(self, deployment: str, before: tuple[str, ...]) -> None:
        self.changed[deployment] = before

    def finish(self) -> HashTrieMap[str, tuple[str, ...]]:
        return bulk_update(self.base, {name: ids for name, ids in self.changed.items() if ids})


def bulk_update(records: HashTrieMap[str, V], written: dict[str, V]) -> HashTrieMap[str, V]:
    """With these entries, in calls of bounded length."""
    if len(written) <= BULK:
        return records.update(written) if written else records
    items = iter(written.items())
    while part := dict(islice(items, BULK)):
        records = records.update(part)
    return records
