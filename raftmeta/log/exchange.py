"""Snapshots of a running replica: taken and sent (D2, D3, D9, R15); received in receiving.py.

The state is an immutable value, so taking a snapshot hands a reference to a worker; journal segments go only after the file is durable
and verified. A follower that needs more than the journal holds gets chunks with offset and digest, one at a time; while that moves, its
file stays, and so does the journal behind it within a bound (transfers.py). A file that a follower found wrong is checked, and replaced.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from raftmeta import codec
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.state import State
from raftmeta.durable import DiskFull
from raftmeta.log import configuration as cfg
from raftmeta.log.engine import Engine
from raftmeta.log.journal import Journal
from raftmeta.log.messages import MAX_CHUNK_BYTES, SnapshotChunk, SnapshotReply
from raftmeta.log.progress import Progress, SendState
from raftmeta.log.quarantine import Quarantined
from raftmeta.log.receiving import Installed, Receiving
from raftmeta.log.snapshots import FREE_MARGIN_BYTES, SnapshotGone, SnapshotMeta, SnapshotStore
from raftmeta.log.spares import Handle, Worker
from raftmeta.log.transfers import Transfer, Transfers

LOOK_EVERY = 64  # applied entries between two looks at the free space
SHORT_BYTES = 4 << 10  # a journal without room for this is short of room (D4)
WORTH_BYTES = 32 << 20  # of a journal that takes half a second to apply again; a start should not have to apply much more


class ExchangeSettings(msgspec.Struct, frozen=True):
    entries: int = 20_000  # applied entries after which a snapshot is taken
    journal_bytes: int = 256 << 20  # or when the journal has grown by this, or by as much as it costs less to write the state anew
    keep_entries: int = 5_000  # entries below the snapshot that stay for slow followers
    keep_bytes: int = 64 << 20  # and how much of them at most, by whole segments
    keep_files: int = 2
    held_bytes: int = 1 << 30  # of journal that stay for a transfer under way; beyond, that begins again
    chunk_bytes: int = MAX_CHUNK_BYTES


class SnapshotExchange:
    def __init__(
        self, store: SnapshotStore, worker: Worker, journal: Journal, settings: ExchangeSettings, pause: Callable[[], None] | None = None
    ) -> None:
        """`pause` is called by the worker after each chunk of a snapshot; it lets other threads have the interpreter lock."""
        self._store, self._worker, self._journal, self._settings, self._pause = store, worker, journal, settings, pause
        self._latest: SnapshotMeta | None = None
        self._job: Handle[SnapshotMeta] | None = None
        self._receiving, self._transfers = Receiving(store, journal.await_snapshot), Transfers()
        self._doubted: SnapshotMeta | None = None  # a follower found it wrong; it is checked before anyone gets more of it
        self._checking: Handle[str] | None = None
        self._wanted = False  # a follower needs one and there is none
        self._bytes_at_last = 0  # size of the journal when the newest snapshot was made
        self._looked_at = 0
        self._low = False  # another snapshot of this size would hardly fit: better take one while it does
        self._not_before = 0  # applied index before which no new attempt is made, after the disk was full
        self._lacking = 0  # bytes that have to be free before an attempt that met a full disk is made again
        self._trouble = ""  # why the last attempt failed, "" once one succeeded or may be made again
        self.finding = ""

    @property
    def trouble(self) -> str:
        """What finds no room, "" when nothing does."""
        return self._trouble or self._receiving.trouble

    def take_finding(self) -> str:
        """What was found out about a snapshot that is not usable since this was asked last, "" when nothing was."""
        found, self.finding = self.finding or self._receiving.finding, ""
        self._receiving.finding = ""
        return found

    @property
    def index(self) -> int:
        """Last index covered by the newest durable snapshot, 0 before the first."""
        return 0 if self._latest is None else self._latest.index

    def recovered(self, meta: SnapshotMeta | None) -> None:
        self._latest = meta
        self._bytes_at_last = self._journal.bytes - self._journal.bytes_after(self.index)

    def poll(self, engine: Engine, state: State, now: float) -> None:
        """Take a snapshot when one is due; finish one that is done. Raises what the worker met, Quarantined among it."""
        if self._checking is not None:
            if self._checking.done():
                checking, self._checking = self._checking, None
                self._checked(checking.result())
        elif self._job is not None:
            if self._job.done():
                job, self._job = self._job, None
                self._finish(job, engine, now)
        elif self._doubted is not None:
            doubted = self._doubted
            self._checking = self._worker.submit(lambda: self._check(doubted))
        elif self._is_due(engine, state.size_bytes) and self.index < engine.applied_index <= self._journal.synced_index:
            self._take(engine, state, now)  # never ahead of the journal that it belongs to

    def _is_due(self, engine: Engine, state_bytes: int) -> bool:
        short = self._is_short(engine.applied_index, state_bytes)
        return engine.applied_index >= self._not_before and (short or self._wanted or self._due(engine, state_bytes))

    def _take(self, engine: Engine, state: State, now: float) -> None:
        self._wanted = False
        index, configuration = engine.applied_index, cfg.encode(engine.configuration_at(engine.applied_index))
        term = self._journal.term_at(index)
        assert term is not None
        held = frozenset((meta.index, meta.term) for meta in self._held(now))
        self._job = self._worker.submit(lambda: self._write((index, term, configuration), state, held))
        if self._job.done():
            self.poll(engine, state, now)

    def _held(self, now: float) -> list[SnapshotMeta]:
        """What transfers under way need. Nothing while the disk is short of room: this member comes first (D4)."""
        return [] if self._short() else self._transfers.held(now)

    def look_again(self, state_bytes: int, applied_index: int) -> None:
        """After a full disk: once there is room again, the next attempt is made when it is due, and no longer put off."""
        if self._lacking and self._store.free_bytes() >= max(self._lacking, 2 * state_bytes):
            self._trouble, self._lacking, self._not_before = "", 0, 0
        self._receiving.look_again(applied_index)

    def _write(self, position: tuple[int, int, bytes], state: State, held: frozenset[tuple[int, int]]) -> SnapshotMeta:
        """In the worker. Older files go here too: to unlink a large one takes longer than a commit may wait.

        Raises Quarantined when the records do not have the state's hash: what is on the disk is sound, and the member begins again from it.
        """
        try:
            meta = self._store.write(*position, codec.snapshot_chunks(state), self._pause)
        except codec.StateDamaged as damage:
            raise Quarantined(damage.detail) from damage
        self._store.prune(self._settings.keep_files, held)
        return meta

    def _is_short(self, applied_index: int, state_bytes: int) -> bool:
        """Whether a snapshot is needed because it lets segments go; asked of the disk once in LOOK_EVERY entries."""
        if applied_index - self._looked_at >= LOOK_EVERY:
            self._looked_at = applied_index
            self._low = self._store.free_bytes() < 2 * state_bytes
        return self._is_pressed()

    def _is_pressed(self) -> bool:
        """By the disk, or by a journal that takes much more of it than it holds."""
        return self._short() or self._journal.unused_bytes >= self._settings.journal_bytes

    def _short(self) -> bool:
        return self._low or not self._journal.has_room(SHORT_BYTES)

    def _due(self, engine: Engine, state_bytes: int) -> bool:
        grown = self._journal.bytes - self._bytes_at_last
        limit = min(self._settings.journal_bytes, max(WORTH_BYTES, state_bytes // 3))
        return grown >= limit or engine.applied_index - self.index >= self._settings.entries

    def _finish(self, job: Handle[SnapshotMeta], engine: Engine, now: float) -> None:
        try:
            meta = job.result()
        except DiskFull as full:  # nothing was left behind; the journal keeps everything until there is room
            self._trouble, self._lacking = full.detail, FREE_MARGIN_BYTES
            self._not_before = engine.applied_index + max(1, self._settings.entries // 10)
            return
        self._trouble, self._lacking = "", 0
        if meta.index <= self.index:
            return  # a newer one was installed meanwhile
        self._latest = meta
        short = self._is_pressed()
        self._journal.compact_through(meta.index if short else self._kept_from(meta.index, now))
        if short:  # not again for every entry, should it have freed too little
            self._not_before = engine.applied_index + max(1, self._settings.entries // 10)
        self._bytes_at_last = self._journal.bytes

    def _kept_from(self, index: int, now: float) -> int:
        """Entries up to there may go."""
        kept_from = max(index - self._settings.keep_entries, self._journal.segment_end_before(self._settings.keep_bytes))
        held = [meta.index for meta in self._held(now) if self._journal.bytes_after(meta.index) <= self._settings.held_bytes]
        return min(index, kept_from, *held)

    # ------------------------------------------------------------------ to a follower

    def next_chunk(self, peer: str, progress: Progress, engine: Engine, now: float) -> SnapshotChunk | None:
        """The chunk that this follower needs next, or None while there is no snapshot to send yet."""
        transfer = self._transfers.of(peer)
        begun = progress.state is SendState.SNAPSHOT and transfer is not None and progress.snapshot == transfer.meta
        if transfer is None or not begun or not transfer.through or not self._leads_on(transfer.meta):
            transfer = self._choose(peer, transfer, now)
            if transfer is None:
                self._wanted = True
                return None
            progress.start_snapshot(transfer.meta)
        meta = transfer.meta
        if meta == self._doubted:
            return None
        size = min(self._settings.chunk_bytes, meta.size_bytes - progress.offset)
        try:
            data = self._store.read_chunk(meta, progress.offset, size)
        except SnapshotGone as gone:
            self._cannot_send(meta, gone.detail)
            return None
        if len(data) < size:
            self._cannot_send(meta, f"expected {meta.size_bytes} bytes, found {progress.offset + len(data)}")
            return None
        self._transfers.sent(peer, progress.offset + size, now)
        return SnapshotChunk(
            engine.term, meta.index, meta.term, meta.size_bytes, meta.sha256, progress.offset, data, engine.replication.round
        )

    def _leads_on(self, meta: SnapshotMeta) -> bool:
        """Whether the journal goes on from there."""
        return meta.index >= self._journal.first_index - 1

    def _choose(self, peer: str, known: Transfer | None, now: float) -> Transfer | None:
        """Go on with what this follower has a part of, else begin with the newest."""
        if known is not None and known.through and self._leads_on(known.meta):
            return known
        latest = self._latest
        return self._transfers.begin(peer, latest, now) if latest is not None and self._leads_on(latest) else None

    def refused(self, peer: str) -> None:
        """A follower begins again. If it had been sent the whole, it found that wrong, and so may the file be: it is checked first."""
        transfer = self._transfers.of(peer)
        if transfer is not None and transfer.through >= transfer.meta.size_bytes:
            transfer.through = 0
            self._doubted = transfer.meta

    def _check(self, meta: SnapshotMeta) -> str:
        """In the worker: what is wrong with the file of a snapshot, "" when it is sound and its records are."""
        try:
            found = self._store.check(meta, codec.restore)
        except RaftmetaError as fault:
            if fault.code not in ("integrity", "compacted"):
                raise
            return fault.detail
        return "" if found == meta else f"another one has taken the place of the snapshot of entry {meta.index}"

    def _checked(self, fault: str) -> None:
        meta, self._doubted = self._doubted, None
        if meta is not None and fault:
            self._cannot_send(meta, fault)

    def _cannot_send(self, meta: SnapshotMeta, why: str) -> None:
        """Nobody gets more of it; if it was the newest, the member needs another one itself, for it may have no journal before it."""
        self._transfers.drop(meta)
        if meta == self._latest:
            self.finding = f"the newest snapshot, of entry {meta.index}, is lost: {why}; a new one is taken"
            self._latest, self._wanted, self._not_before = None, True, 0

    # ------------------------------------------------------------------ from the leader

    def on_chunk(self, chunk: SnapshotChunk, engine: Engine) -> tuple[SnapshotReply | None, Installed | None]:
        """Store one chunk; after the last one the verified snapshot to install. No reply when it cannot be stored: it comes again."""
        reply, installed = self._receiving.take(chunk, engine.applied_index, engine.term)
        if installed is not None:
            self._latest = installed.meta
            self._bytes_at_last = self._journal.bytes
        return reply, installed
