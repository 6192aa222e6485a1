"""Bring the missing blobs of a version into the store, from the manifest's sources in order.

Only what is missing moves: neighbouring tensors of a file become one range, a cut connection goes on where it stopped, bytes are hashed as
they arrive. A source that returns other bytes than the manifest says, or a file of another size, is marked and the next is tried; so is one
that is slower than `LEAST_BYTES_PER_S` for as many windows as there are tries, since one that drips never fails, or gets no further in as
many. When none is left the version ends as `integrity_mismatch` if any source lied, else as `source_unavailable`. The file of block
checks comes last and enters the store only if they hash to the manifest's entries; where no source has it, it is made of the weights.
Sources of scheme file must lie, after every link, below an allowed root; nothing else on this machine can be read through a manifest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from consistency import block_sidecar
from node_agent.block_checks import remake
from node_agent.runtime import log
from node_agent.store import BlobMismatch, BlobWriter, Store, check_blob
from raftmeta.core import block_file
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest

SOURCE_UNAVAILABLE = "source_unavailable"
INTEGRITY_MISMATCH = "integrity_mismatch"
MAX_SPAN_BYTES = 256 << 20  # of one request, unless one tensor is larger
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
LEAST_BYTES_PER_S = 64 << 10  # that a source has to give, on average over
RATE_WINDOW_S = 30.0  # of waiting for it, between requests too

Judge = Callable[[Path], None]  # raises RaftmetaError integrity for a file of the right digest that the version cannot mean


class Piece(NamedTuple):
    """One blob as a byte range of a file."""

    begin: int
    end: int
    sha256: str


class Span(NamedTuple):
    """Adjacent pieces that one request brings."""

    file: str
    file_size: int
    pieces: tuple[Piece, ...]


class FetchFailed(Exception):
    """No source could give a version. `code` is the failure class of the attestation."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class BlobsRotten(Exception):
    """Blobs of the store were no longer what they were when they entered. They are gone and can be fetched again."""


class Cancelled(Exception):
    """Nobody wants the version any more."""


class SourceError(Exception):
    """This attempt at this source failed; another may succeed."""


class SourceLied(Exception):
    """The source has other bytes than the manifest says. It is not asked again for this version."""


class Passed(NamedTuple):
    """So many bytes came that lie before the range, from a source that cannot begin there. They show that it goes on, and how fast."""

    size_bytes: int


class Source(Protocol):
    """One place that has the files of a version."""

    name: str

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes | Passed]:
        """The bytes [begin, end) of a file in chunks, each as it comes: between two of them nobody looks at the time.

        Raises SourceError, or SourceLied for a file of another size.
        """


class SourceSlow(SourceError):
    """So little came for so long that this source would hold up what needs it without end."""


class Patience(NamedTuple):
    attempts: int  # per source and span without progress, and windows in a row in which the source was slower than `LEAST_BYTES_PER_S`
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


class Fetcher:
    """Brings versions into one store, from several threads. `open_source` turns a URL of a manifest into a Source or raises SourceError."""

    def __init__(self, store: Store, open_source: Callable[[str], Source], patience: Patience) -> None:
        self._store = store
        self._open_source = open_source
        self._patience = patience
        self._jobs: list[_Job] = []  # that run
        self._jobs_lock = threading.Lock()

    def fetch(self, manifest: Manifest, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> int:
        """Gives the bytes that came from sources. `elsewhere` names blobs that are not needed in the store.

        Raises FetchFailed, Cancelled, or RaftmetaError for a full quota or disk. Can be repeated at any time.
        """
        self._judge_stored(manifest)
        spans = spans_of(manifest, self._is_needed(elsewhere))
        if not spans:
            return 0
        job = _Job(self._store, self._patience, cancelled, _judges(manifest))
        job.missing = sum(piece.end - piece.begin for span in spans for piece in span.pieces)
        with self._jobs_lock:
            self._store.reserve(job.missing + sum(other.missing for other in self._jobs))
            self._jobs.append(job)
        try:
            self._drain_sources(manifest.sources, job, spans)
        except FetchFailed as failure:
            if failure.code != SOURCE_UNAVAILABLE or not self._make_block_checks(manifest, elsewhere, cancelled):
                raise
            log.warning("block_checks_made_here", reason=failure.detail)
        finally:
            with self._jobs_lock:
                self._jobs.remove(job)
        return job.received

    def _drain_sources(self, urls: Iterable[str], job: _Job, spans: list[Span]) -> None:
        faults: list[str] = []
        lied = False
        for url in urls:
            try:
                source = self._open_source(url)
                job.drain(source, spans)
                return
            except SourceLied as fault:
                lied = True
                faults.append(f"{url}: {fault}")
            except SourceError as fault:
                faults.append(f"{url}: {fault}")
        detail = "; ".join(faults) or "the manifest names no source"
        raise FetchFailed(INTEGRITY_MISMATCH if lied else SOURCE_UNAVAILABLE, detail)

    def _make_block_checks(self, manifest: Manifest, elsewhere: frozenset[str], cancelled: Callable[[], bool]) -> bool:
        """Where nothing else is missing they can follow from the weights in the store. False if not; raises as `fetch` does."""
        blocks = block_file.find(manifest)
        left = spans_of(manifest, self._is_needed(elsewhere))
        if blocks is None or [span.file for span in left] != [blocks.name]:
            return False
        content = remake(self._store, manifest, cancelled)
        if cancelled():
            raise Cancelled
        if content is None:
            return False
        made = block_sidecar.entry_of(content)
        if made != blocks:
            raise FetchFailed(INTEGRITY_MISMATCH, f"{blocks.name} has the digest {blocks.sha256}, that of these weights has {made.sha256}")
        self._store.writer(blocks.sha256, blocks.size_bytes).abandon()  # what a source left that broke off
        writer = self._store.writer(blocks.sha256, blocks.size_bytes)
        try:
            writer.write(content)
            writer.commit()
        finally:
            writer.pause()
        return True

    def _judge_stored(self, manifest: Manifest) -> None:
        """Block checks that are here already may have entered for another version, or rotted. Raises FetchFailed; forgets what rotted."""
        for sha256, judge in _judges(manifest).items():
            path = self._store.path(sha256)
            try:
                if path.exists():
                    judge(path)
            except RaftmetaError as cause:
                if not check_blob(path, sha256):
                    self._store.discard(sha256)
                elif cause.code == "integrity":
                    raise FetchFailed(INTEGRITY_MISMATCH, cause.detail) from cause
                else:
                    raise

    def _is_needed(self, elsewhere: frozenset[str]) -> Callable[[str, int], bool]:
        return lambda sha256, size: sha256 not in elsewhere and not self._store.has(sha256, size)


class _Job:
    """One fetch: what remains, and how often it failed without progress."""

    def __init__(self, store: Store, patience: Patience, cancelled: Callable[[], bool], judges: Mapping[str, Judge]) -> None:
        self._store = store
        self._patience = patience
        self._cancelled = cancelled
        self._judges = judges
        self._rate = _Rate()
        self._reached = 0  # in the file of a span: bytes that come a second time are no progress
        self._restarted: set[str] = set()  # blobs of which this source has to give all bytes itself
        self.received = 0
        self.missing = 0  # bytes of blobs that are not in the store yet

    def drain(self, source: Source, spans: Iterable[Span]) -> None:
        """Everything of the spans that is not in the store yet, with bounded retries."""
        self._rate, self._restarted = _Rate(), set()
        for span in spans:
            failures, self._reached = 0, 0
            while left := self._left(span):
                before = self._progress()
                try:
                    self._request(source, left)
                except SourceError:
                    failures = 1 if self._progress() > before else failures + 1
                    if max(failures, self._rate.slow) >= self._patience.attempts:
                        raise
                    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (failures - 1))
                    self._patience.sleep(wait_s)
                    self._rate.waited_s += wait_s
                if self._cancelled():
                    raise Cancelled

    def _progress(self) -> tuple[int, int]:
        """Rises when a blob starts over, once for each, and when bytes come from beyond the place that was reached."""
        return len(self._restarted), self._reached

    def _left(self, span: Span) -> Span | None:
        """The span from its first missing piece on; None when nothing is missing."""
        for index, piece in enumerate(span.pieces):
            if not self._store.has(piece.sha256, piece.end - piece.begin):
                return span._replace(pieces=span.pieces[index:])
        return None

    def _request(self, source: Source, span: Span) -> None:
        """Pour one answer into the writers of the span's pieces."""
        pieces = iter(span.pieces)
        with self._writer(next(pieces)) as first:
            begin = span.pieces[0].begin + first.offset
            chunks = source.read(span.file, span.file_size, begin, span.pieces[-1].end)
            answer = _Answer(self._rate.measured(chunks, self._patience.clock, span.file), self._cancelled)
            self._fill(first, span.pieces[0], answer, span.file)
        for piece in pieces:
            with self._writer(piece) as writer:
                answer.skip(writer.offset)
                self._fill(writer, piece, answer, span.file)

    @contextmanager
    def _writer(self, piece: Piece) -> Iterator[BlobWriter]:
        writer = self._store.writer(piece.sha256, piece.end - piece.begin)
        try:
            yield writer
        finally:
            writer.pause()

    def _fill(self, writer: BlobWriter, piece: Piece, answer: _Answer, file: str) -> None:
        while writer.offset < piece.end - piece.begin:
            data = answer.take(piece.end - piece.begin - writer.offset)
            writer.write(data)
            self.received += len(data)
            self._reached = max(self._reached, piece.begin + writer.offset)
        try:
            writer.commit(self._judges.get(piece.sha256))
            self.missing = max(0, self.missing - (piece.end - piece.begin))  # some come twice, beside one that is missing
        except BlobMismatch as cause:
            if writer.resumed and piece.sha256 not in self._restarted:  # what was left by others may be at fault: it starts over, once
                self._restarted.add(piece.sha256)
                self._reached = piece.begin
                raise SourceError(f"{file} [{piece.begin}, {piece.end}), resumed: {cause.detail}") from cause
            raise SourceLied(f"{file} [{piece.begin}, {piece.end}): {cause.detail}") from cause


class _Rate:
    """How fast one source is, requests that it cut and the time between them included; what is done with its bytes does not count."""

    def __init__(self) -> None:
        self.slow = 0  # windows in a row
        self.waited_s = 0.0  # in this window
        self._bytes = 0

    def measured(self, chunks: Iterator[bytes | Passed], clock: Callable[[], float], file: str) -> Iterator[bytes | Passed]:
        """The same chunks. Raises SourceSlow."""
        while True:
            if self.waited_s >= RATE_WINDOW_S:
                self._close(file)
            begun = clock()
            try:
                chunk = next(chunks, None)
            finally:
                self.waited_s += clock() - begun
            if chunk is None:
                return
            self._bytes += chunk.size_bytes if isinstance(chunk, Passed) else len(chunk)
            yield chunk

    def _close(self, file: str) -> None:
        found, self.waited_s, self._bytes = self._bytes / self.waited_s, 0.0, 0
        if found >= LEAST_BYTES_PER_S:
            self.slow = 0
            return
        self.slow += 1
        raise SourceSlow(f"{file}: expected {LEAST_BYTES_PER_S} bytes/s over {RATE_WINDOW_S:g} s, found {found:.0f}")


class _Answer:
    """The body of one request, taken in pieces of our choice."""

    def __init__(self, chunks: Iterator[bytes | Passed], cancelled: Callable[[], bool]) -> None:
        self._chunks = chunks
        self._cancelled = cancelled
        self._rest = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """At least one byte, at most `most`. Raises SourceError at an early end."""
        while not self._rest:
            if self._cancelled():
                raise Cancelled
            chunk = next(self._chunks, None)
            if chunk is None:
                raise SourceError("the source ended before the range did")
            if not isinstance(chunk, Passed):
                self._rest = memoryview(chunk)
        data, self._rest = self._rest[:most], self._rest[most:]
        return data

    def skip(self, count: int) -> None:
        while count:
            count -= len(self.take(count))


def spans_of(manifest: Manifest, needed: Callable[[str, int], bool]) -> list[Span]:
    """The missing blobs of a version as ranges of its files, each blob once, in order of file and place, block checks last. Pure."""
    sizes = {file.name: file.size_bytes for file in manifest.files}
    wanted: list[tuple[str, Piece]] = [
        (file.name, Piece(0, file.size_bytes, file.sha256))
        for file in manifest.files
        if file.role != "weights" and needed(file.sha256, file.size_bytes)
    ]
    wanted += [
        (tensor.file, Piece(tensor.begin, tensor.end, tensor.sha256))
        for tensor in manifest.tensors
        if needed(tensor.sha256, tensor.size_bytes)
    ]
    seen: set[str] = set()
    groups: list[tuple[str, list[Piece]]] = []
    for file, piece in sorted(wanted):
        if piece.sha256 in seen:
            continue
        seen.add(piece.sha256)
        last_file, pieces = groups[-1] if groups else ("", [])
        joins = last_file == file and pieces and pieces[-1].end == piece.begin
        if joins and piece.end - pieces[0].begin <= MAX_SPAN_BYTES:
            pieces.append(piece)
        else:
            groups.append((file, [piece]))
    spans = [Span(file, sizes[file], tuple(pieces)) for file, pieces in groups]
    blocks = block_file.find(manifest)
    if blocks is not None and needed(blocks.sha256, blocks.size_bytes):
        spans.append(Span(blocks.name, blocks.size_bytes, (Piece(0, blocks.size_bytes, blocks.sha256),)))
    return spans


def _judges(manifest: Manifest) -> dict[str, Judge]:
    """SHA-256 -> what has to hold of a blob beside its digest."""
    blocks = block_file.find(manifest)
    return {} if blocks is None else {blocks.sha256: lambda path: block_sidecar.judge(path, manifest)}
