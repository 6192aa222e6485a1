"""From a verified slot to a module that can answer. Reads the slot, writes nothing, and leaves what serves alone.

Used by the workers that will serve the module and by the prober that tries it first, so both make the same thing of the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from node_agent import failure
from node_agent.binding import SlotViews
from node_agent.device.arena import Arena
from node_agent.device.port import SlotRecord
from node_agent.device.snapshot import Snapshots
from node_agent.engine import known
from node_agent.engine.port import Engine, EngineFault, Instance
from node_agent.failure import Failure
from node_agent.messages import Fault, Load, Prove
from node_agent.refusal import Refusal
from node_agent.store import Store
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest

LOAD_FAULTS = (Refusal, EngineFault, RaftmetaError, MemoryError, OSError)  # what making a module of a slot may end with
Engines = Mapping[str, Callable[[], Engine]]


class Wanted(NamedTuple):
    """Which version of which slot."""

    deployment: str
    slot: int
    label: str
    checksum: str


class Loaded(NamedTuple):
    instance: Instance
    manifest: Manifest
    layout_digest: str  # where the tensors lay that the module is made of


class Loader:
    def __init__(self, store: Store, engines: Engines) -> None:
        self._store = store
        self._engines = engines

    def load(self, arena: Arena, wanted: Wanted) -> Loaded:
        """Bound, not warm. Raises Refusal or EngineFault, or OSError for files that cannot be read."""
        record = require(arena, wanted)
        subject, label = f"slot {wanted.slot} of {wanted.deployment}", wanted.label
        snapshot = Snapshots(arena.path).load(wanted.slot, record.snapshot_digest)
        manifest = self._store.manifest(wanted.checksum)
        if snapshot is None or manifest is None:
            missing = "snapshot of the slot" if snapshot is None else "manifest in the store"
            raise Refusal("not_bindable", subject, f"a {missing}", "none", "bind")
        known.require(manifest.engine, self._engines, label, "bind")
        fault = self._store.version_fault(wanted.checksum, manifest)
        if fault:
            raise Refusal("files_changed", f"files of {label}", "those of its manifest", fault, "bind")
        views = SlotViews(arena.serving_view(wanted.slot), snapshot.layout)
        instance = self._engines[manifest.engine]().load(self._store.version_dir(wanted.checksum), views, manifest.unbound)
        return Loaded(instance, manifest, snapshot.layout.digest)


def require(arena: Arena, wanted: Wanted) -> SlotRecord:
    """The slot's record, if it is verified and of this version. Raises Refusal slot_not_verified."""
    record = arena.verified(wanted.slot)
    if (record.checksum, record.version) != (wanted.checksum, wanted.label):
        subject, expected = f"slot {wanted.slot} of {wanted.deployment}", f"{wanted.label} ({wanted.checksum})"
        raise Refusal("slot_not_verified", subject, expected, f"{record.version} ({record.checksum})", "bind")
    return record


def failure_of(cause: Exception, where: str) -> Failure:
    """One of LOAD_FAULTS as a failure of that slot."""
    match cause:
        case Refusal():
            return failure.make(cause.kind, cause.phase, cause.subject, cause.expected, cause.found)
        case EngineFault():
            return failure.make(cause.kind, "warm" if cause.kind == "warmup_failed" else "bind", cause.detail)
        case RaftmetaError():
            return failure.make(cause.code, "bind", cause.detail)
        case MemoryError():
            return failure.make("no_memory", "bind", f"{where}: {cause or 'out of memory'}")
        case OSError():
            return failure.make(failure.kind_of(cause, "not_bindable"), "bind", f"{where}: {cause}")
        case _:
            raise AssertionError(f"no load fault: {cause!r}")


def refused(call: Load | Prove, why: Failure) -> Fault:
    return Fault(call.number, 409, why.kind, why.detail, why)
