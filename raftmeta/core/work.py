"""A short-lived mutable copy of a state, for the time of one batch.

It exists so that apply stays lean: records change in plain dictionaries, are encoded once, and the persistent maps, the hash and the
derived sequences are brought up to date once per batch. Everything a command changed can be taken back (`undo`), which is how a refusal
changes nothing. It never leaves `apply`, and the state it began from is never touched. Results must not depend on where a batch ends: what
a command sees is the same whether the commands before it were in the batch or in the state.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Generic, TypeVar

from rpds import HashTrieMap

from raftmeta.core import state as st
from raftmeta.core.events import DELETE, PUT, Event
from raftmeta.core.sequences import SortedKeys
from raftmeta.core.state import State
from raftmeta.core.types import Deployment, ModelRecord, Rollout, Verdict, VersionRecord

BULK = 1_024  # entries written into a persistent map per call, which holds the interpreter lock for about 1.5 us each

V = TypeVar("V")
Entry = tuple[V | None, bytes, int]  # value or None when absent, its image in the hash, bytes that count towards the quota
_ABSENT: tuple[None, bytes, int] = (None, b"", 0)


class Table(Generic[V]):
    """One map of the state with the changes of a batch on top."""

    __slots__ = ("base", "changed", "count", "event", "image", "kind", "original", "work")

    def __init__(self, work: Work, base: HashTrieMap[str, V], kind: bytes, event: str, image: Callable[[V], bytes]) -> None:
        self.work = work
        self.base = base
        self.kind = kind  # prefix of the hash, b"" when the map enters neither hash nor quota
        self.event = event  # kind of the events, "" for none
        self.image = image
        self.count = len(base)
        self.changed: dict[str, Entry[V]] = {}
        self.original: dict[str, Entry[V]] = {}  # what the state held of a changed key

    def get(self, key: str) -> V | None:
        entry = self.changed.get(key)
        return self.base.get(key) if entry is None else entry[0]

    def put(self, key: str, value: V) -> None:
        """Write a record, whether the key is there or not."""
        image = self.image(value)
        self._replace(key, (value, image, len(key) + len(image) if self.kind else 0), self._before(key))

    def add(self, key: str, value: V, image: bytes, size: int) -> None:
        """Write a record under a key for which `get` just gave None."""
        self._replace(key, (value, image, len(key) + size), _ABSENT)

    def delete(self, key: str) -> None:
        """Remove a record that is there."""
        self._replace(key, _ABSENT, self._before(key))

    def _before(self, key: str) -> Entry[V]:
        entry = self.changed.get(key) or self.original.get(key)
        if entry is None:
            value = self.base.get(key)
            if value is None:
                return _ABSENT
            image = self.image(value)
            size = len(key) + (len(value) if isinstance(value, bytes) else len(image))
            entry = self.original[key] = (value, image, size if self.kind else 0)
        return entry

    def _replace(self, key: str, entry: Entry[V], before: Entry[V]) -> None:
        work = self.work
        changed = self.changed
        work.size_bytes += entry[2] - before[2]
        self.count += (before is _ABSENT) - (entry is _ABSENT)
        work.undo_log.append((self, key, changed.get(key)))
        changed[key] = entry
        if self.event:
            value = entry[0]
            work.events.append(Event(work.revision, self.event, key, DELETE if value is None else PUT, value))  # type: ignore[arg-type]

    def restore(self, key: str, entry: Entry[V] | None) -> None:
        """Take one change back."""
        before = entry or self.original.get(key, _ABSENT)
        self.count += (self.changed[key] is _ABSENT) - (before is _ABSENT)
        if entry is None:
            del self.changed[key]
        else:
            self.changed[key] = entry

    def finish(self) -> HashTrieMap[str, V]:
        """The new map; adds the change of the hash to the work's sum."""
        if not self.changed:
            return self.base
        written: dict[str, V] = {}
        total, kind, original, result = 0, self.kind, self.original, self.base
        for key, (value, image, _) in self.changed.items():
            before = original.get(key)
            if before is not None and kind:
                total -= st.leaf(kind, key, before[1])
            if value is None:
                result = result.discard(key)
            else:
                written[key] = value
                if kind:
                    total += st.leaf(kind, key, image)
        self.work.hash_sum += total
        if len(written) <= BULK:
            return result.update(written)
        items = iter(written.items())
        while part := dict(islice(items, BULK)):
            result = result.update(part)
        return result


class Work:
    __slots__ = (
        "base", "cluster_ms", "deployments", "dropped", "events", "feature_level", "hash_sum", "history", "keys_after_ms", "limits",
        "manifests", "models", "new_outcomes", "oldest_ms", "outcomes", "principal", "revision", "rollouts", "size_bytes", "undo_log",
        "verdicts", "versions",
    )  # fmt: skip

    def __init__(self, base: State) -> None:
        self.base = base
        self.revision = base.revision
        self.feature_level = base.feature_level
        self.cluster_ms = base.cluster_ms
        self.keys_after_ms = base.keys_after_ms
        self.limits = base.limits
        self.size_bytes = base.size_bytes
        self.hash_sum = base.hash_sum
        self.principal = ""  # of the command at hand
        self.events: list[Event] = []
        self.undo_log: list[tuple[Table, str, Entry | None]] = []  # type: ignore[type-arg]
        self.new_outcomes: list[str] = []  # keys, in order of insertion
        self.dropped = 0  # outcomes dropped from the front
        self.oldest_ms = -1  # stamped time of the oldest outcome, -1 when it was not looked up yet
        encode = st.encode_record
        self.models: Table[ModelRecord] = Table(self, base.models, st.MODEL, "model", encode)
        self.versions: Table[VersionRecord] = Table(self, base.versions, st.VERSION, "version", encode)
        self.manifests: Table[bytes] = Table(self, base.manifests, st.MANIFEST, "", st.manifest_image)
        self.deployments: Table[Deployment] = Table(self, base.deployments, st.DEPLOYMENT, "deployment", encode)
        self.rollouts: Table[Rollout] = Table(self, base.rollouts, st.ROLLOUT, "rollout", encode)
        self.verdicts: Table[Verdict] = Table(self, base.verdicts, st.VERDICT, "verdict", encode)
        self.outcomes: Table[bytes] = Table(self, base.outcomes, st.OUTCOME, "", _same)
        self.history: Table[tuple[str, ...]] = Table(self, base.history, b"", "", _nothing)

    def mark(self) -> tuple[int, int, int]:
        """Begin a command: from here `undo` takes back. Earlier changes stand."""
        self.undo_log.clear()
        return self.revision, self.size_bytes, len(self.events)

    def undo(self, mark: tuple[int, int, int]) -> None:
        """Take back what was put, added and deleted since the mark."""
        for table, key, entry in reversed(self.undo_log):
            table.restore(key, entry)
        self.undo_log.clear()
        self.revision, self.size_bytes, events = mark
        del self.events[events:]

    def oldest_outcome(self) -> str:
        """Key of the oldest outcome that is kept; there must be one."""
        base = self.base.outcome_order
        place = self.dropped
        return base.at(place) if place < len(base) else self.new_outcomes[place - len(base)]

    def all_deployments(self) -> list[Deployment]:
        """In order of name, wherever the batch began."""
        names = {*self.base.deployment_names, *self.deployments.changed}
        found = (self.deployments.get(name) for name in sorted(names))
        return [deployment for deployment in found if deployment is not None]

    def finish(self) -> State:
        """The state after everything that was done here."""
        base = self.base
        model_names = _names(base.model_names, self.models)
        deployment_names = _names(base.deployment_names, self.deployments)
        version_order = _version_order(base.version_order, self.versions)
        models, versions, manifests = self.models.finish(), self.versions.finish(), self.manifests.finish()
        deployments, rollouts, verdicts = self.deployments.finish(), self.rollouts.finish(), self.verdicts.finish()
        outcomes, history = self.outcomes.finish(), self.history.finish()
        return State(
            revision=self.revision,
            generation=base.generation,
            feature_level=self.feature_level,
            cluster_ms=self.cluster_ms,
            keys_after_ms=self.keys_after_ms,
            limits=self.limits,
            models=models,
            versions=versions,
            manifests=manifests,
            deployments=deployments,
            rollouts=rollouts,
            verdicts=verdicts,
            outcomes=outcomes,
            model_names=model_names,
            deployment_names=deployment_names,
            version_order=version_order,
            history=history,
            outcome_order=base.outcome_order.changed(self.dropped, self.new_outcomes),
            size_bytes=self.size_bytes,
            hash_sum=self.hash_sum & st.MODULUS_MASK,
        )


def _names(names: SortedKeys[str], table: Table[V]) -> SortedKeys[str]:
    """Models and deployments are never deleted, so only new keys matter."""
    for key in table.changed:
        if key not in table.base:
            names = names.added(key)
    return names


def _version_order(
    order: HashTrieMap[str, SortedKeys[tuple[int, str]]], versions: Table[VersionRecord]
) -> HashTrieMap[str, SortedKeys[tuple[int, str]]]:
    if not versions.changed:
        return order
    added: dict[str, list[tuple[int, str]]] = {}
    removed: dict[str, list[tuple[int, str]]] = {}
    for key, (value, _, _) in versions.changed.items():
        before = versions.original.get(key)
        if before is not None and before[0] is not None:
            removed.setdefault(before[0].model, []).append((before[0].number, before[0].label))
        if value is not None:
            added.setdefault(value.model, []).append((value.number, value.label))
    for model in sorted(added.keys() | removed.keys()):
        keys = order.get(model) or SortedKeys()
        for gone in removed.get(model, ()):
            keys = keys.removed(gone)
        keys = keys.extended(sorted(added.get(model, ())))
        order = order.insert(model, keys) if len(keys) else order.discard(model)
    return order


def _same(value: bytes) -> bytes:
    return value


def _nothing(_: object) -> bytes:
    return b""
