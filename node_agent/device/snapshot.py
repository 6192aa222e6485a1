"""What a slot holds, tensor by tensor, in a small file beside the arena: the arena snapshot.

It has the arena's lifetime: both end with the boot, so nothing is synced. The slot's record names the file by its SHA-256, and a file that
does not have that digest does not count: its tensors are then staged again, unless control knows it and writes it anew. A new snapshot
stands beside the old one until the record names it, so a crash between the two loses nothing. Workers read it to find the tensors in the
slot; the group may read, nobody else.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec

from node_agent.layout import Layout

MODE: Final = 0o640
MAX_BYTES: Final = 256 << 20  # 200,000 tensors with names of 1 KiB


class SlotSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layout: Layout
    held: dict[str, str]  # tensor name -> SHA-256 of its bytes; of a dirty slot those that are not being written


class Snapshots:
    """The snapshot files of one arena."""

    def __init__(self, arena_path: Path) -> None:
        self._arena = arena_path
        self._known: dict[tuple[int, str], bytes] = {}  # what was saved, or read and found right

    def save(self, slot: int, snapshot: SlotSnapshot) -> str:
        """Write it and give its digest, for the slot's record to name."""
        data = msgspec.json.encode(snapshot, order="deterministic")
        digest = hashlib.sha256(data).hexdigest()
        self._write(slot, digest, data)
        self._known[slot, digest] = data
        return digest

    def _write(self, slot: int, digest: str, data: bytes) -> None:
        fresh = self._arena.with_name(f".{self._arena.name}.slot{slot}.fresh")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, MODE)
                file.write(data)
            fresh.rename(self._path(slot, digest))
        except OSError:
            fresh.unlink(missing_ok=True)  # half of it, in memory that is full
            raise

    def load(self, slot: int, digest: str) -> SlotSnapshot | None:
        """None when the file is missing or is not the one that the record names, and this process has not seen it as it was."""
        data = self._read(slot, digest) or self._known.get((slot, digest))
        if data is None:
            return None
        self._known[slot, digest] = data
        return msgspec.json.decode(data, type=SlotSnapshot)

    def mend(self, slot: int, digest: str) -> bool:
        """Write the file again when it is not what this process knows it to be. True when it was not. Raises OSError."""
        data = self._known.get((slot, digest))
        if data is None or self._read(slot, digest) is not None:
            return False
        self._write(slot, digest, data)
        return True

    def _read(self, slot: int, digest: str) -> bytes | None:
        if not digest:
            return None
        path = self._path(slot, digest)
        try:
            if path.stat().st_size > MAX_BYTES:
                return None
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def drop_others(self, slot: int, digest: str) -> None:
        """Remove what no record names any more."""
        for known in [known for known in self._known if known[0] == slot and known[1] != digest]:
            self._known.pop(known, None)
        keep = self._path(slot, digest)
        for path in self._arena.parent.glob(f"{self._arena.name}.slot{slot}.*.json"):
            if path != keep:
                path.unlink(missing_ok=True)

    def _path(self, slot: int, digest: str) -> Path:
        return self._arena.with_name(f"{self._arena.name}.slot{slot}.{digest[:16]}.json")
