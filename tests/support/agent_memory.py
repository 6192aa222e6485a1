"""One node's store and memory for tests: versions fetched into the store, and a station over an arena in shared memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from node_agent.journal import Journal
from node_agent.places import Places, new_record
from node_agent.plan import NO_ORDER, Goal
from node_agent.station import Station
from node_agent.store import Store, blobs_of
from raftmeta.core.types import SideName
from tests.support.small_version import Version


class NodeMemory:
    """What control would hold for one deployment, `search`."""

    def __init__(self, root: Path, arena_dir: Path, slot_bytes: int = 0) -> None:
        self.root = root
        self.arena_dir = arena_dir
        self.store = Store(root, 1 << 30)
        self.journal = Journal(root, "n1")
        self.wall_ms = 0
        self.places = Places(
            self.store,
            self.journal,
            arena_dir,
            slot_bytes,
            verify_max_age_ns=300_000_000_000,  # as a node has it
            wall_ms=lambda: self.wall_ms,
        )
        self.goal = Goal("search", SideName.PRIMARY, None, NO_ORDER, None)

    def station(self) -> Station:
        record = self.journal.deployment("search") or new_record(self.goal, "encoder", self.root, "n1")
        self.journal.put(record)
        return Station(record, self.places)

    def fetch(self, version: Version) -> None:
        """Everything of a version into the store, as the provider would leave it."""
        data = {hashlib.sha256(path.read_bytes()).hexdigest(): path.read_bytes() for path in version.directory.iterdir()}
        weights = (version.directory / "w.safetensors").read_bytes()
        data.update({tensor.sha256: weights[tensor.begin : tensor.end] for tensor in version.manifest.tensors})
        for sha256, size in self.store.missing(blobs_of(version.manifest)):
            writer = self.store.writer(sha256, size)
            writer.write(data[sha256])
            writer.commit()
        self.store.put_manifest(version.target.checksum, version.manifest)
        self.store.materialize(version.target.checksum, version.manifest)
