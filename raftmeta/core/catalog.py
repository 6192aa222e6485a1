"""Models, versions and manifests under change, for the time of one batch.

Publishing is what a busy log is made of, so this is the table with the fewest steps: one entry to take back, no record encoded twice, the
versions of a model and its record in one persistent insertion. The model's counters do not enter the hash on their own: the versions say
them already, but for numbers that were given and deleted since (`gap`), so publishing leaves the model's part of the hash alone.
"""

from __future__ import annotations

from hashlib import sha256

from rpds import HashTrieMap

from raftmeta.core.events import DELETE, PUT, Event
from raftmeta.core.state import (
    MODEL_BYTES,
    NO_VERSIONS,
    VERSION,
    ModelEntry,
    State,
    VersionItem,
    encode_record,
    leaf,
    lengths,
    model_leaf,
    version_image,
)
from raftmeta.core.tables import ABSENT, Entry, Ledger, bulk_update
from raftmeta.core.types import ModelRecord, VersionRecord

Before = tuple[Entry[VersionRecord] | None, str, ModelRecord | None]  # changed version, name of its model, changed model


class Catalog:
    __slots__ = ("base", "changed", "ledger", "manifests", "model_count", "models", "original")

    def __init__(self, ledger: Ledger, base: State) -> None:
        self.ledger = ledger
        self.base = base
        self.changed: dict[str, Entry[VersionRecord]] = {}  # versions by "model/label"
        self.original: dict[str, VersionRecord] = {}  # versions of the state that went
        self.manifests: dict[str, bytes] = {}  # of the versions that came
        self.models: dict[str, ModelRecord] = {}  # models that changed: all those whose versions did
        self.model_count = len(base.catalog)

    def version(self, key: str) -> VersionRecord | None:
        entry = self.changed.get(key)
        return self.base.versions.get(key) if entry is None else entry.value

    def model(self, name: str) -> ModelRecord | None:
        model = self.models.get(name)
        if model is not None:
            return model
        entry = self.base.catalog.get(name)
        return None if entry is None else entry.record

    def publish(self, key: str, version: VersionRecord, manifest: bytes, manifest_digest: bytes, model: ModelRecord) -> None:
        """Add a version that is not there; `model` is its model after that."""
        ledger, name = self.ledger, model.name
        record = encode_record(version)
        size_bytes = len(key) + len(record) + len(manifest)
        ledger.undo_log.append((self, key, (self.changed.get(key), name, self.models.get(name))))
        ledger.events.append(Event(ledger.revision, "version", key, PUT, version))
        ledger.events.append(Event(ledger.revision, "model", name, PUT, model))
        ledger.size_bytes += size_bytes
        if model.last_number == 1:
            self.model_count += 1
            ledger.size_bytes += len(name) + MODEL_BYTES
        self.changed[key] = Entry(version, record + manifest_digest, size_bytes)
        self.manifests[key] = manifest
        self.models[name] = model

    def delete(self, key: str, model: ModelRecord) -> None:
        """Remove a version that is there; `model` is its model after that."""
        ledger, name, before = self.ledger, model.name, self.changed.get(key)
        ledger.undo_log.append((self, key, (before, name, self.models.get(name))))
        ledger.events.append(Event(ledger.revision, "version", key, DELETE, None))
        ledger.events.append(Event(ledger.revision, "model", name, PUT, model))
        if before is None:
            version = self.original[key] = self.base.versions[key]
            ledger.size_bytes -= len(key) + len(encode_record(version)) + len(self.base.manifests[key])
        else:
            ledger.size_bytes -= before.size_bytes
        self.changed[key] = ABSENT
        self.models[name] = model

    def undo(self, key: str, before: Before) -> None:
        """Take one publication or deletion back; the ledger takes back the size."""
        entry, name, model = before
        if entry is None:
            del self.changed[key]
        else:
            self.changed[key] = entry
        if model is None:
            del self.models[name]
            self.model_count -= name not in self.base.catalog
        else:
            self.models[name] = model

    def finish(self) -> tuple[HashTrieMap[str, VersionRecord], HashTrieMap[str, ModelEntry]]:
        """The new maps of versions and models; adds the change of the hash to the ledger."""
        versions = self.base.versions
        came: dict[str, list[VersionItem]] = {}
        went: dict[str, list[int]] = {}
        written: dict[str, VersionRecord] = {}
        total, manifests = 0, self.manifests
        for key, version in self.original.items():
            if key in self.changed:
                total -= leaf(VERSION, key, version_image(encode_record(version), self.base.manifests[key]))
                went.setdefault(version.model, []).append(version.number)
                versions = versions.discard(key)
        for key, entry in self.changed.items():
            fresh = entry.value
            if fresh is not None:
                written[key] = fresh
                name, image = key.encode(), entry.image
                leaf_bytes = b"".join((VERSION, lengths(len(name), len(image)), name, image))
                total += int.from_bytes(sha256(leaf_bytes).digest(), "big")
                item = (fresh.number, fresh.label, manifests[key])
                if fresh.model in came:
                    came[fresh.model].append(item)
                else:
                    came[fresh.model] = [item]
        self.ledger.hash_sum += total
        return bulk_update(versions, written), self._finish_models(came, went)

    def _finish_models(self, came: dict[str, list[VersionItem]], went: dict[str, list[int]]) -> HashTrieMap[str, ModelEntry]:
        catalog = self.base.catalog
        written: dict[str, ModelEntry] = {}
        total = 0
        for name, record in self.models.items():
            before = catalog.get(name)
            versions = NO_VERSIONS if before is None else before.versions
            for number in went.get(name, ()):
                versions = versions.removed(versions.first_after((number,)))
            if name in came:
                versions = versions.extended(sorted(came[name]))
            gap = record.last_number - (versions.last[0] if len(versions) else 0)
            if before is not None and before.gap == gap:
                now = before.leaf
            else:
                now = model_leaf(record, gap, 0)
                total += now - (0 if before is None else before.leaf)
            written[name] = ModelEntry(record, gap, now, versions)
        self.ledger.hash_sum += total
        return bulk_update(catalog, written)
