"""The maps of the state as mutable tables, for the time of one batch.

A table is a persistent map with the changes of the batch on top. A record that is put is encoded when its size is asked for, by `settle`:
before and after a command that the quota bounds, and at the end. So a rollout that a thousand nodes attest in one entry is encoded once.
The map and the hash are brought up to date once, by `finish`. Every change is noted in the ledger with what stood there before, so that a
refusal takes it back.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from rpds import HashTrieMap

from raftmeta.core.events import DELETE, PUT, Event, Value
from raftmeta.core.state import State, encode_record, leaf

BULK = 1_024  # entries written into a persistent map per call, which holds the interpreter lock for about 1.5 us each

R = TypeVar("R", bound=Value)
V = TypeVar("V")


class Undoable(Protocol):
    def undo(self, key: str, before: Any) -> None: ...


class Unsettled(Protocol):
    def settle(self) -> None: ...


class Entry(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """A record with what the hash and the quota need of it, or the absence of one."""

    value: R | None
    image: bytes  # what stands for it in the hash, b"" while it is not encoded
    size_bytes: int  # of key and value, for the quota; UNKNOWN while it is not encoded


UNKNOWN = -1
ABSENT: Entry[Any] = Entry(None, b"", 0)


class Before(NamedTuple, Generic[R]):
    """What a change of a table takes back."""

    entry: Entry[R] | None  # that the batch had put, None: the record of the state stood there
    counted: int | None
    is_open: bool


class Ledger:
    """What all tables write to. It knows no table once a batch is over, so that a batch leaves no cycle for the collector."""

    __slots__ = ("events", "hash_sum", "revision", "size_bytes", "undo_log", "unsettled")

    def __init__(self, base: State) -> None:
        self.revision = base.revision
        self.size_bytes = base.size_bytes  # right once everybody in `unsettled` has settled
        self.unsettled: dict[Unsettled, None] = {}
        self.hash_sum = base.hash_sum
        self.events: list[Event] = []
        self.undo_log: list[tuple[Undoable, str, Any]] = []  # who takes it back, the key, what stood there

    def settle(self) -> None:
        """From here on `size_bytes` is right, until something is put again."""
        for table in self.unsettled:
            table.settle()
        self.unsettled.clear()


class Table(Generic[R]):
    """One map of the state with the changes of a batch on top."""

    __slots__ = ("base", "changed", "count", "counted", "event", "kind", "ledger", "open", "original")

    def __init__(self, ledger: Ledger, base: HashTrieMap[str, R], kind: bytes, event: str) -> None:
        self.ledger = ledger
        self.base = base
        self.kind = kind  # prefix in the hash
        self.event = event  # kind of its events, "" for none
        self.count = len(base)
        self.changed: dict[str, Entry[R]] = {}
        self.original: dict[str, Entry[R]] = {}  # what the state held of a changed key
        self.counted: dict[str, int] = {}  # size that the ledger counts for a key, where it is not that of the state
        self.open: dict[str, None] = {}  # keys whose size is not counted as it is now

    def get(self, key: str) -> R | None:
        entry = self.changed.get(key)
        return self.base.get(key) if entry is None else entry.value

    def put(self, key: str, value: R) -> None:
        """Write a record, whether the key is there or not."""
        self._replace(key, Entry(value, b"", UNKNOWN), PUT)

    def delete(self, key: str) -> None:
        """Remove a record that is there."""
        self._replace(key, ABSENT, DELETE)

    def undo(self, key: str, before: Before[R]) -> None:
        """Take one change back; the ledger takes back the size."""
        entry, counted, is_open = before
        value = self.base.get(key) if entry is None else entry.value
        self.count += (self.changed[key].value is None) - (value is None)
        if entry is None:
            del self.changed[key]
        else:
            self.changed[key] = entry
        if counted is None:
            self.counted.pop(key, None)
        else:
            self.counted[key] = counted
        if not is_open:
            self.open.pop(key, None)

    def settle(self) -> None:
        """Encode what was put since the last time, and count its size."""
        for key in self.open:
            entry = self.changed[key]
            if entry.value is not None and entry.size_bytes == UNKNOWN:
                entry = self.changed[key] = _entry(key, entry.value)
            counted = self.counted.get(key)
            self.ledger.size_bytes += entry.size_bytes - (self._original(key).size_bytes if counted is None else counted)
            self.counted[key] = entry.size_bytes
        self.open.clear()

    def finish(self) -> HashTrieMap[str, R]:
        """The new map; adds the change of the hash to the ledger."""
        self.settle()
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
        ledger.undo_log.append((self, key, Before(changed, self.counted.get(key), key in self.open)))
        before = self.base.get(key) if changed is None else changed.value
        ledger.unsettled[self] = None
        self.open[key] = None
        if self.event:
            ledger.events.append(Event(ledger.revision, self.event, key, op, entry.value))
        self.count += (before is None) - (entry.value is None)
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
