"""State snapshots on disk: written, received, found again, thinned out.

A file gets its final name only when it is complete, synced, read back and verified; so a final name never stands for an empty or partial
file. `load` verifies in full. A damaged newest snapshot is passed over only when the journal still holds every record that an older one
lacks; otherwise the member refuses to start, as it does for a snapshot of another cluster. Nothing here forks or knows what a state is;
`write` runs in a worker thread, which may outlive its member: after `close` it publishes and removes nothing more.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, DiskFull, File
from raftmeta.log import snapshot_file
from raftmeta.log.faults import SnapshotCorrupt
from raftmeta.log.records import cluster_digest
from raftmeta.log.snapshot_file import Head, SnapshotMeta

__all__ = ["Incoming", "SnapshotCorrupt", "SnapshotGone", "SnapshotMeta", "SnapshotStore"]

MAX_SNAPSHOT_BYTES = 1 << 40  # announced by a leader; more is no snapshot of ours
FREE_MARGIN_BYTES = 1 << 20  # left free beside an incoming snapshot: trailer, directory, hard state

_NAME = re.compile(r"snapshot-(\d{20})-(\d{20})\Z")
_WRITING, _INCOMING = "writing-", "incoming-"

T = TypeVar("T")


class SnapshotGone(RaftmetaError):
    """The snapshot was removed since; the transfer begins again with the newest."""

    def __init__(self, meta: SnapshotMeta) -> None:
        super().__init__("compacted", f"the snapshot of index {meta.index}, term {meta.term} was replaced by a newer one")


class SnapshotStore:
    """One directory of snapshots. One writer at a time; reading is safe from any thread."""

    def __init__(self, disk: Disk, directory: Path, cluster_id: str = "") -> None:
        self._disk = disk
        self._directory = directory
        self._cluster = cluster_digest(cluster_id)
        self._closed = False
        self._publishing = threading.Lock()
        self.damaged: tuple[SnapshotCorrupt, ...] = ()  # what `load` passed over, newest first
        disk.make_directory(directory)

    def write(
        self, index: int, term: int, config: bytes, chunks: Iterable[bytes], chunk_pause: Callable[[], None] | None = None
    ) -> SnapshotMeta:
        """Publish a snapshot. `chunk_pause` is called after each chunk. Raises DiskFull having left nothing behind."""
        disk = self._disk
        self._remove(_WRITING, keep="")
        temporary = self._directory / f"{_WRITING}{index:020d}.tmp"
        file = disk.open(temporary, create=True)
        try:
            meta = snapshot_file.write_image(disk, file, Head(self._cluster, index, term, config), chunks, chunk_pause)
            disk.fsync(file)
        except DiskFull:
            disk.unlink(temporary)
            raise
        finally:
            disk.close(file)
        found = snapshot_file.verify(disk, temporary, self._cluster)
        if found != meta:
            raise SnapshotCorrupt(temporary, f"what was written, SHA-256 {meta.sha256.hex()}", found.sha256.hex())
        self._publish(temporary, meta)
        return meta

    def load(self, journal_first_index: int | None, build: Callable[[Iterator[bytes]], T]) -> tuple[SnapshotMeta, T] | None:
        """The newest snapshot that verifies with what `build` makes of its chunks; None when there is none and none is needed.

        Raises SnapshotCorrupt when the journal, which begins at `journal_first_index`, does not continue it; and for any damaged newer one
        when the caller does not say where its journal begins. What `build` raises of a sound file goes to the caller.
        """
        damaged: list[SnapshotCorrupt] = []
        found = None
        for index, term in self._positions():
            try:
                found = self._read(self._path(index, term), (index, term), build)
                break
            except SnapshotCorrupt as fault:
                damaged.append(fault)
        reach = found[0].index if found else 0
        if damaged and (journal_first_index is None or journal_first_index > reach + 1):
            raise damaged[0]
        if journal_first_index is not None and journal_first_index > reach + 1:
            raise SnapshotCorrupt(self._directory, f"a snapshot that reaches record {journal_first_index - 1}", f"one that reaches {reach}")
        self.damaged = tuple(damaged)
        return found

    def read_chunk(self, meta: SnapshotMeta, offset: int, size: int) -> bytes:
        """Bytes of the image for another member, fewer than `size` only at its end. Raises SnapshotGone."""
        file = self._open(meta)
        try:
            return self._disk.pread(file, max(0, min(size, meta.size_bytes - offset)), offset)
        finally:
            self._disk.close(file)

    def receive(self, index: int, term: int, size_bytes: int, sha256: bytes) -> Incoming:
        """Begin an incoming snapshot, or go on with the one of this identity where it stopped. Drops any other. Raises DiskFull."""
        if not 0 < size_bytes <= MAX_SNAPSHOT_BYTES or len(sha256) != 32:
            raise SnapshotCorrupt(self._directory, f"1 to {MAX_SNAPSHOT_BYTES} bytes with a SHA-256", f"{size_bytes} bytes, {sha256.hex()}")
        name = f"{_INCOMING}{index:020d}-{term:020d}-{sha256[:8].hex()}.part"
        self._remove(_INCOMING, keep=name)
        free = self._disk.free_bytes(self._directory)
        path = self._directory / name
        file = self._disk.open(path, create=not self._disk.exists(path))
        there = self._disk.size(file)
        if size_bytes - there + FREE_MARGIN_BYTES > free:
            self._disk.close(file)
            raise DiskFull(
                f"{self._directory} has {free} bytes free, a snapshot of {size_bytes} needs {FREE_MARGIN_BYTES} more than it lacks"
            )
        return Incoming(self, file, SnapshotMeta(index, term, b"", size_bytes, sha256), min(there, size_bytes))

    def free_bytes(self) -> int:
        """Room on the disk that holds the snapshots."""
        return self._disk.free_bytes(self._directory)

    def check(self, meta: SnapshotMeta, build: Callable[[Iterator[bytes]], object]) -> SnapshotMeta:
        """Read a published snapshot in full, in the worker. Raises SnapshotGone, SnapshotCorrupt, and what `build` raises of it."""
        self._disk.close(self._open(meta))
        return self._read(self._path(meta.index, meta.term), (meta.index, meta.term), build)[0]

    def prune(self, keep: int = 2, held: Container[tuple[int, int]] = ()) -> int:
        """Remove all but the newest `keep` and those `held`, by index and term, in the worker. Returns how many went.

        A transfer that reads one of them gets SnapshotGone.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}, the newest snapshot always stays")
        old = [position for position in self._positions()[keep:] if position not in held]
        for index, term in old:
            with self._publishing:
                self._check_open()
            self._disk.unlink_large(self._path(index, term))
        return len(old)

    def close(self) -> None:
        """The member is another one from here on, and its directory with it. A worker that still writes ends with an error."""
        with self._publishing:
            self._closed = True

    # inside

    def _positions(self) -> list[tuple[int, int]]:
        """(index, term) of all published snapshots, newest first."""
        found = map(_NAME.match, self._disk.listdir(self._directory))
        return sorted(((int(match[1]), int(match[2])) for match in found if match), reverse=True)

    def _path(self, index: int, term: int) -> Path:
        return self._directory / f"snapshot-{index:020d}-{term:020d}"

    def _open(self, meta: SnapshotMeta) -> File:
        path = self._path(meta.index, meta.term)
        if not self._disk.exists(path):
            raise SnapshotGone(meta)
        return self._disk.open(path)

    def _read(self, path: Path, position: tuple[int, int], build: Callable[[Iterator[bytes]], T]) -> tuple[SnapshotMeta, T]:
        meta, built = snapshot_file.read(self._disk, path, self._cluster, build)
        if (meta.index, meta.term) != position:
            raise SnapshotCorrupt(path, f"index {position[0]}, term {position[1]}", f"index {meta.index}, term {meta.term}")
        return meta, built

    def _publish(self, temporary: Path, meta: SnapshotMeta) -> None:
        with self._publishing:
            self._check_open()
            self._disk.rename(temporary, self._path(meta.index, meta.term))
            self._disk.sync_directory(self._directory)

    def _check_open(self) -> None:
        if self._closed:
            raise RaftmetaError("shutting_down", f"{self._directory} is not this store's any more")

    def _remove(self, prefix: str, keep: str) -> None:
        for name in self._disk.listdir(self._directory):
            if name.startswith(prefix) and name != keep:
                self._disk.unlink(self._directory / name)


class Incoming:
    """A snapshot on its way in. `offset` is how much of its image is here; what precedes it is not trusted before `finish`."""

    def __init__(self, store: SnapshotStore, file: File, announced: SnapshotMeta, offset: int) -> None:
        self._store = store
        self._disk = store._disk
        self._file: File | None = file
        self._announced = announced
        self.index, self.term = announced.index, announced.term
        self.size_bytes, self.sha256 = announced.size_bytes, announced.sha256
        self.offset = offset
        self.fault = ""  # why `finish` refused it

    def write(self, offset: int, data: bytes) -> bool:
        """Take the next bytes. False, and nothing taken, when they are not the next or reach beyond the announced size."""
        if self._file is None or offset != self.offset or offset + len(data) > self.size_bytes:
            return False
        self._disk.pwrite(self._file, data, offset)
        self.offset += len(data)
        return True

    def finish(
        self,
        build: Callable[[Iterator[bytes]], T],
        admit: Callable[[SnapshotMeta], None] = lambda meta: None,
        announce: Callable[[int, int], object] = lambda index, term: None,
    ) -> tuple[SnapshotMeta, T] | None:
        """Verify the whole and publish it. None when it is not what was announced: it is gone then and the transfer starts over.

        `build` gets the chunks before anything is published, and raises RaftmetaError `integrity` when they are no sound state; so does
        `admit` of what else the file says. `announce` is told of the sound snapshot before it gets its name. Reads the file once from start
        to end; for a large one, run it in a worker.
        """
        if self._file is None or self.offset != self.size_bytes:
            raise ValueError(f"snapshot {self.index}: {self.offset} of {self.size_bytes} bytes are here")
        snapshot_file.write_trailer(self._disk, self._file, self._announced)
        self._disk.fsync(self._file)
        path = self._file.path
        self.close()
        try:
            found = self._store._read(path, (self.index, self.term), build)
            admit(found[0])
        except RaftmetaError as fault:
            if fault.code != "integrity":
                raise
            self.fault = fault.detail
            self._disk.unlink(path)
            return None
        announce(self.index, self.term)
        self._store._publish(path, found[0])
        return found

    def discard(self) -> None:
        """Give the transfer up and remove what is here."""
        if self._file is not None:
            path = self._file.path
            self.close()
            self._disk.unlink(path)

    def close(self) -> None:
        """Let go of the file; `receive` goes on from it."""
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None
