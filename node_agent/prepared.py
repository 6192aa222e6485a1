"""Which versions have every byte on this node, so that nothing has to be fetched. What was found counts until it is forgotten."""

from __future__ import annotations

from collections.abc import Callable

from node_agent.plan import Target
from node_agent.store import Store, blobs_of


class Prepared:
    def __init__(self, store: Store, held: Callable[[], frozenset[str]]) -> None:
        """`held` gives the SHA-256 of the tensors that can be taken from what serves."""
        self._store = store
        self._held = held
        self._known: set[str] = set()

    def covers(self, target: Target) -> bool:
        """Every byte of the version is here: in the store, or in what serves."""
        if target.checksum in self._known:
            return True
        manifest = self._store.manifest(target.checksum)
        if manifest is None or not self._store.version_dir(target.checksum).is_dir():
            return False
        elsewhere = self._held()
        if any(sha256 not in elsewhere for sha256, _ in self._store.missing(blobs_of(manifest))):
            return False
        self._known.add(target.checksum)
        return True

    def missing_bytes(self, target: Target) -> int | None:
        """What would have to be fetched; None while the store has no manifest of the version. Blocks."""
        manifest = self._store.manifest(target.checksum)
        if manifest is None:
            return None
        elsewhere = self._held()
        return sum(size for sha256, size in self._store.missing(blobs_of(manifest)) if sha256 not in elsewhere)

    def forget(self) -> None:
        """Look at the store again: something was missing or was removed."""
        self._known.clear()
