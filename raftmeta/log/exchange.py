"""Snapshots of a running replica: taken, sent, received (D2, D3, D9, R3, R15).

The state is an immutable value, so taking a snapshot hands a reference to a worker; journal segments go only after the file is durable
and verified. A follower that needs more than the journal holds gets chunks with offset and digest, one at a time; it installs the file
only when its digest is right, and never one older than what it applied.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from raftmeta import codec
from raftmeta.core.state import State
from raftmeta.durable import DiskFull
from raftmeta.log import configuration as cfg
from raftmeta.log.configuration import Configuration
from raftmeta.log.engine import Engine
from raftmeta.log.faults import SnapshotCorrupt
from raftmeta.log.journal import Journal
from raftmeta.log.messages import MAX_CHUNK_BYTES, SnapshotChunk, SnapshotReply
from raftmeta.log.progress import Progress, SendState
from raftmeta.log.quarantine import Quarantined
from raftmeta.log.snapshots import FREE_MARGIN_BYTES, Incoming, SnapshotGone, SnapshotMeta, SnapshotStore
from raftmeta.log.spares import Handle, Worker

LOOK_EVERY = 64  # applied entries between two looks at the free space
SHORT_BYTES = 4 << 10  # a journal without room for this is short of room (D4)
WORTH_BYTES = 32 << 20  # of a journal that takes half a second to apply again; a start should not have to apply much more


class ExchangeSettings(msgspec.Struct, frozen=True):
    entries: int = 20_000  # applied entries after which a snapshot is taken
    journal_bytes: int = 256 << 20  # or when the journal has grown by this, or by as much as it costs less to write the state anew
    keep_entries: int = 5_000  # entries below the snapshot that stay for slow followers
    keep_bytes: int = 64 << 20  # and how much of them at most, by whole segments
    keep_files: int = 2


class Installed(msgspec.Struct, frozen=True):
    meta: SnapshotMeta
    state: State
    configuration: Configuration


class SnapshotExchange:
    def __init__(
        self, store: SnapshotStore, worker: Worker, journal: Journal, settings: ExchangeSettings, pause: Callable[[], None] | None = None
    ) -> None:
        """`pause` is called by the worker after each chunk of a snapshot; it lets other threads have the interpreter lock."""
        self._store, self._worker, self._journal, self._settings, self._pause = store, worker, journal, settings, pause
        self._latest: SnapshotMeta | None = None
        self._job: Handle[SnapshotMeta] | None = None
        self._incoming: Incoming | None = None
        self._wanted = False  # a follower needs one and there is none
        self._bytes_at_last = 0  # size of the journal when the newest snapshot was made
        self._looked_at = 0
        self._low = False  # another snapshot of this size would hardly fit: better take one while it does
        self._not_before = 0  # applied index before which no new attempt is made, after the disk was full
        self._lacking = 0  # bytes that have to be free before an attempt that met a full disk is made again
        self.trouble = ""  # why the last attempt failed, "" once one succeeded or may be made again

    @property
    def index(self) -> int:
        """Last index covered by the newest durable snapshot, 0 before the first."""
        return 0 if self._latest is None else self._latest.index

    def recovered(self, meta: SnapshotMeta | None) -> None:
        self._latest = meta
        self._bytes_at_last = self._journal.bytes - self._journal.bytes_after(self.index)

    def poll(self, engine: Engine, state: State) -> None:
        """Take a snapshot when one is due; finish one that is done. Raises what the worker met, Quarantined among it."""
        if self._job is not None:
            if self._job.done():
                job, self._job = self._job, None
                self._finish(job, engine)
            return
        short = self._is_short(engine.applied_index, state.size_bytes)
        due = engine.applied_index >= self._not_before and (short or self._wanted or self._due(engine, state.size_bytes))
        if due and self.index < engine.applied_index <= self._journal.synced_index:  # never ahead of the journal that it belongs to
            self._wanted = False
            index, configuration = engine.applied_index, cfg.encode(engine.configuration_at(engine.applied_index))
            term = self._journal.term_at(index)
            assert term is not None
            self._job = self._worker.submit(lambda: self._write(index, term, configuration, state))
            if self._job.done():
                self.poll(engine, state)

    def look_again(self, state_bytes: int) -> None:
        """After a full disk: once there is room again, the next attempt is made when it is due, and no longer put off."""
        if self._lacking and self._store.free_bytes() >= max(self._lacking, 2 * state_bytes):
            self.trouble, self._lacking, self._not_before = "", 0, 0

    def _write(self, index: int, term: int, configuration: bytes, state: State) -> SnapshotMeta:
        """In the worker. Older files go here too: to unlink a large one takes longer than a commit may wait.

        Raises Quarantined when the records do not have the state's hash: what is on the disk is sound, and the member begins again from it.
        """
        try:
            meta = self._store.write(index, term, configuration, codec.snapshot_chunks(state), self._pause)
        except codec.StateDamaged as damage:
            raise Quarantined(damage.detail) from damage
        self._store.prune(self._settings.keep_files)
        return meta

    def _is_short(self, applied_index: int, state_bytes: int) -> bool:
        """Whether a snapshot is needed because it lets segments go; asked of the disk once in LOOK_EVERY entries."""
        if applied_index - self._looked_at >= LOOK_EVERY:
            self._looked_at = applied_index
            self._low = self._store.free_bytes() < 2 * state_bytes
        return self._is_pressed()

    def _is_pressed(self) -> bool:
        """By the disk, or by a journal that takes much more of it than it holds."""
        crowded = self._journal.unused_bytes >= self._settings.journal_bytes
        return self._low or crowded or not self._journal.has_room(SHORT_BYTES)

    def _due(self, engine: Engine, state_bytes: int) -> bool:
        grown = self._journal.bytes - self._bytes_at_last
        limit = min(self._settings.journal_bytes, max(WORTH_BYTES, state_bytes // 3))
        return grown >= limit or engine.applied_index - self.index >= self._settings.entries

    def _finish(self, job: Handle[SnapshotMeta], engine: Engine) -> None:
        try:
            meta = job.result()
        except DiskFull as full:  # nothing was left behind; the journal keeps everything until there is room
            self.trouble, self._lacking = full.detail, FREE_MARGIN_BYTES
            self._not_before = engine.applied_index + max(1, self._settings.entries // 10)
            return
        self.trouble, self._lacking = "", 0
        if meta.index <= self.index:
            return  # a newer one was installed meanwhile
        self._latest = meta
        short = self._is_pressed()
        kept_from = max(meta.index - self._settings.keep_entries, self._journal.segment_end_before(self._settings.keep_bytes))
        self._journal.compact_through(meta.index if short else min(meta.index, kept_from))
        if short:  # not again for every entry, should it have freed too little
            self._not_before = engine.applied_index + max(1, self._settings.entries // 10)
        self._bytes_at_last = self._journal.bytes

    # ------------------------------------------------------------------ to a follower

    def next_chunk(self, progress: Progress, engine: Engine) -> SnapshotChunk | None:
        """The chunk that this follower needs next, or None while there is no snapshot to send yet."""
        meta = self._latest
        if meta is None or meta.index < self._journal.first_index - 1:
            self._wanted = True
            return None
        if progress.state is not SendState.SNAPSHOT or progress.snapshot is None:
            progress.start_snapshot(meta)
        meta = progress.snapshot
        assert meta is not None
        if meta.index != self.index and progress.offset == 0:
            progress.start_snapshot(self._latest or meta)
            meta = progress.snapshot or meta
        try:
            data = self._store.read_chunk(meta, progress.offset, MAX_CHUNK_BYTES)
        except SnapshotGone:
            progress.start_snapshot(self._latest or meta)
            return None
        return SnapshotChunk(
            engine.term, meta.index, meta.term, meta.size_bytes, meta.sha256, progress.offset, data, engine.replication.round
        )

    # ------------------------------------------------------------------ from the leader

    def on_chunk(self, chunk: SnapshotChunk, engine: Engine) -> tuple[SnapshotReply | None, Installed | None]:
        """Store one chunk; after the last one the verified snapshot to install. No reply when it cannot be stored: it comes again."""
        try:
            return self._store_chunk(chunk, engine)
        except DiskFull as full:
            self.trouble, self._lacking = full.detail, chunk.size_bytes + FREE_MARGIN_BYTES
        except SnapshotCorrupt as lie:  # an impossible size, or a file that verified and then did not
            self.trouble = lie.detail
        return None, None

    def _store_chunk(self, chunk: SnapshotChunk, engine: Engine) -> tuple[SnapshotReply, Installed | None]:
        if chunk.index <= engine.applied_index:
            return self._reply(chunk, engine, chunk.size_bytes, True), None
        incoming = self._incoming
        if incoming is None or (incoming.index, incoming.term, incoming.sha256) != (chunk.index, chunk.index_term, chunk.sha256):
            if incoming is not None:
                incoming.discard()
            incoming = self._incoming = self._store.receive(chunk.index, chunk.index_term, chunk.size_bytes, chunk.sha256)
        if chunk.offset == incoming.offset:
            incoming.write(chunk.offset, chunk.data)
        if incoming.offset < incoming.size_bytes:
            return self._reply(chunk, engine, incoming.offset, False), None
        self._incoming = None
        found = incoming.finish(codec.restore, self._journal.await_snapshot)
        if found is None:  # the digest is wrong, or the sender's state is not sound: start over
            return self._reply(chunk, engine, 0, False), None
        meta, state = found
        self._latest = meta
        self._bytes_at_last = self._journal.bytes
        return self._reply(chunk, engine, meta.size_bytes, True), Installed(meta, state, cfg.decode(meta.config))

    def _reply(self, chunk: SnapshotChunk, engine: Engine, next_offset: int, installed: bool) -> SnapshotReply:
        return SnapshotReply(engine.term, chunk.index, next_offset, installed, chunk.round)
