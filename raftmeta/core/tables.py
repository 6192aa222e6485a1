"""The maps of the state as mutable tables, for the time of one batch.

A table is a persistent map with the changes of the batch on top: a record is encoded once when it is put, and the map and the hash are
brought up to date once, by `finish`. Every change is noted in the ledger with what stood there before, so that a refusal takes it back.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from rpds import HashTrieMap

from raftmeta.core.events import DELETE, PUT, Event, Value
from raftmeta.core.state import State, encode_record, leaf

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

    def __init__(self, ledger: Ledger, base: HashTrieMap[str, R], kind: bytes, event: str) -> None:
        self.ledger = ledger
        self.base = base
        self.kind = kind  # prefix in the hash
        self.event = event  # kind of its events, "" for none
        self.count = len(base)
        self.changed: dict[str, Entry[R]] = {}
        self.original: dict[str, Entry[R]] = {}  # what the state held of a changed key

    def get(self, key: str) -> R | None:
        entry = self.changed.get(key)
        return self.base.get(key) if entry is None else entry.value

    def put(self, key: str, value: R) -> None:
        """Write a record, whether the key is there or not."""
        self._replace(key, _entry(key, value), PUT)

    def delete(self, key: str) -> None:
        """Remove a record that is there."""
        self._replace(key, ABSENT, DELETE)

    def undo(self, key: str, before: Entry[R] | None) -> None:
        """Take one change back; the ledger takes back the size."""
        now = before or self._original(key)
        self.count += (self.changed[key].value is None) - (now.value is None)
        if before is None:
            del self.changed[key]
        else:
            self.changed[key] = before

    def finish(self) -> HashTrieMap[str, R]:
        """The new map; adds the change of the hash to the ledger."""
        written: dict[str, R] = {}
        total, kind, base = 0, self.kind, self.base
        for key, entry in self.changed.items():
            before = self._original(key)
            if before.value is not None:
                total -= leaf(kind, key, before.image)
            if entry.value is None:
                base = base.discard(key)
            else:
                written[key] = entry.value
                total += leaf(kind, key, entry.image)
        self.ledger.hash_sum += total
        return bulk_update(base, written)

    def _replace(self, key: str, entry: Entry[R], op: str) -> None:
        ledger, changed = self.ledger, self.changed.get(key)
        ledger.undo_log.append((self, key, changed))
        before = changed or self._original(key)
        ledger.size_bytes += entry.size_bytes - before.size_bytes
        if self.event:
            ledger.events.append(Event(ledger.revision, self.event, key, op, entry.value))
        self.count += (before.value is None) - (entry.value is None)
        self.changed[key] = entry

    def _original(self, key: str) -> Entry[R]:
        entry = self.original.get(key)
        if entry is None:
            value = self.base.get(key)
            entry = self.original[key] = ABSENT if value is None else _entry(key, value)
        return entry


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


def _entry(key: str, value: R) -> Entry[R]:
    image = encode_record(value)
    return Entry(value, image, len(key) + len(image))
