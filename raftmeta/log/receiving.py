"""A follower's side of a snapshot: chunks in, one at a time, and the verified state out.

The file is installed only when its digest, its records and its configuration are right, and never one older than what is applied (D9, R3).
What cannot be stored is not answered: the leader sends it again.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from raftmeta import codec
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.state import State
from raftmeta.durable import DiskFull
from raftmeta.log import configuration as cfg
from raftmeta.log.configuration import Configuration
from raftmeta.log.faults import SnapshotCorrupt
from raftmeta.log.messages import SnapshotChunk, SnapshotReply
from raftmeta.log.payloads import configuration_fault
from raftmeta.log.snapshots import FREE_MARGIN_BYTES, Incoming, SnapshotMeta, SnapshotStore


class Installed(msgspec.Struct, frozen=True):
    meta: SnapshotMeta
    state: State
    configuration: Configuration


class Receiving:
    def __init__(self, store: SnapshotStore, announce: Callable[[int, int], object]) -> None:
        """`announce`: told, durably, of the index and term of a snapshot that is about to be published."""
        self._store, self._announce = store, announce
        self._incoming: Incoming | None = None
        self._lacking = (0, 0)  # bytes that have to be free, and the index of the snapshot that needs them
        self._refused = 0  # whole snapshots in a row that were not what had been announced
        self.trouble = ""  # a full disk, "" once it has room or the snapshot is no longer needed
        self.finding = ""  # the newest about a snapshot that was refused; whoever reads it clears it

    def look_again(self, applied_index: int) -> None:
        """The member may have come by what it lacked in another way, or the disk may have room."""
        n_bytes, index = self._lacking
        if self.trouble and (applied_index >= index or self._store.free_bytes() >= n_bytes):
            self.trouble, self._lacking = "", (0, 0)

    def take(self, chunk: SnapshotChunk, applied_index: int, term: int) -> tuple[SnapshotReply | None, Installed | None]:
        """Store one chunk; after the last one the verified snapshot to install. No reply when it cannot be stored."""
        try:
            next_offset, installed = self._store_chunk(chunk, applied_index)
        except DiskFull as full:
            self.trouble, self._lacking = full.detail, (chunk.size_bytes + FREE_MARGIN_BYTES, chunk.index)
            return None, None
        except SnapshotCorrupt as lie:  # an impossible size, or a file that verified and then did not
            self.finding = lie.detail
            return None, None
        done = next_offset == chunk.size_bytes
        return SnapshotReply(term, chunk.index, next_offset, done, chunk.round), installed

    def _store_chunk(self, chunk: SnapshotChunk, applied_index: int) -> tuple[int, Installed | None]:
        """Where the leader goes on: the size of the whole once everything is here."""
        if chunk.index <= applied_index:
            return chunk.size_bytes, None
        incoming = self._incoming
        if incoming is None or (incoming.index, incoming.term, incoming.sha256) != (chunk.index, chunk.index_term, chunk.sha256):
            if incoming is not None:
                incoming.discard()
                self._incoming = None
            incoming = self._incoming = self._store.receive(chunk.index, chunk.index_term, chunk.size_bytes, chunk.sha256)
        if chunk.offset == incoming.offset:
            incoming.write(chunk.offset, chunk.data)
        if incoming.offset < incoming.size_bytes:
            return incoming.offset, None
        self._incoming = None
        found = incoming.finish(codec.restore, _admit, self._announce)
        if found is None:
            self._refused += 1
            self.finding = (
                f"the snapshot of entry {chunk.index} that the leader sent is not usable: {incoming.fault}; "
                f"{self._refused} in a row were not, and this member cannot catch up without one"
            )
            return 0, None
        self._refused, self.trouble = 0, ""
        meta, state = found
        return meta.size_bytes, Installed(meta, state, cfg.decode(meta.config))


def _admit(meta: SnapshotMeta) -> None:
    """Raises RaftmetaError integrity: published, it would be read at every start."""
    fault = configuration_fault(meta.config)
    if fault:
        raise RaftmetaError("integrity", f"snapshot {meta.index}: {fault}")
