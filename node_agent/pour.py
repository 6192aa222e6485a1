"""Bytes into a slot piece by piece, each checked while it is still in the cache.

A step is cut into pieces of whole blocks. Threads take pieces in order, fill them (from the store, from the active slot, or not at all for
what is kept) and compute their block checks from the slot's own memory. The first failure stops all, and nothing is written once `pour`
has returned or raised. While something serves, the threads give way to everybody else (`background`) and within a budget.
The interpreter lock is free while bytes move, so what else runs in this process goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from consistency.vector import BLOCK_BYTES, Words
from node_agent.background import give_way
from node_agent.budget import Budget
from node_agent.device.port import Device
from node_agent.staging_plan import Origin, Step
from raftmeta.core.errors import RaftmetaError


class Blob(Protocol):
    """One open blob of the store."""

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill all of `into` from there. Raises RaftmetaError or OSError. May be called by several threads."""

    def close(self) -> None: ...


class BlobSource(Protocol):
    """The store, as far as staging uses it."""

    def open(self, sha256: str, size_bytes: int) -> Blob:
        """The blob of that name. Raises RaftmetaError or OSError when it is missing or of another size."""


class NoBlobs:
    """For steps that read nothing."""

    def open(self, sha256: str, size_bytes: int) -> Blob:
        raise AssertionError(f"blob {sha256} of {size_bytes} bytes was asked for by steps that read nothing")


class PieceFailed(Exception):
    """A step could not be filled; `__cause__` says why."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.placement.name)
        self.step = step


@dataclass(frozen=True)
class Pace:
    """How much of the machine pouring may take."""

    threads: int = 1
    idle: bool = False  # only while no other process wants the processor
    budget: Budget | None = None


class _Piece(NamedTuple):
    number: int  # of the step
    begin: int  # bytes of the tensor
    end: int


@dataclass
class _OpenBlob:
    blob: Blob
    left: int  # pieces that still read from it


@dataclass
class _Job:
    device: Device
    slot: int
    active: int | None
    steps: Sequence[Step]
    source: BlobSource
    pace: Pace
    checks: list[Words] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    blobs: dict[int, _OpenBlob] = field(default_factory=dict)
    fault: BaseException | None = None


def pour(device: Device, slot: int, active: int | None, steps: Sequence[Step], source: BlobSource, pace: Pace) -> list[Words]:
    """Carry out the steps; gives for each the block checks [blocks, 2] of what the slot then holds in its place.

    Raises PieceFailed for a step whose bytes could not be had.
    """
    job = _Job(device, slot, active, steps, source, pace)
    job.checks = [np.zeros((-(-step.placement.size_bytes // BLOCK_BYTES), 2), np.uint64) for step in steps]
    pieces = _pieces(steps, device.chunk_bytes)
    try:
        if pace.threads == 1 and not pace.idle:
            _work(job, pieces)
        else:
            _work_in_threads(job, pieces)
    finally:
        for opened in job.blobs.values():
            opened.blob.close()
    if job.fault is not None:
        raise job.fault
    return job.checks


def _pieces(steps: Sequence[Step], chunk: int) -> Iterator[_Piece]:
    assert chunk % BLOCK_BYTES == 0, chunk
    for index, step in enumerate(steps):
        size = step.placement.size_bytes
        for begin in range(0, size, chunk):
            yield _Piece(index, begin, min(begin + chunk, size))


def _work_in_threads(job: _Job, pieces: Iterator[_Piece]) -> None:
    threads = [threading.Thread(target=_thread, args=(job, pieces), name=f"pour-{n}") for n in range(job.pace.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _thread(job: _Job, pieces: Iterator[_Piece]) -> None:
    try:
        if job.pace.idle:  # for this thread alone, which ends with its work: the way back would need a privilege
            give_way()
        _work(job, pieces)
    except BaseException as fault:  # noqa: BLE001 - raised again by the thread that waits for this one
        with job.lock:
            job.fault = job.fault or fault


def _work(job: _Job, pieces: Iterator[_Piece]) -> None:
    while True:
        with job.lock:
            piece = None if job.fault is not None else next(pieces, None)
        if piece is None:
            return
        if job.pace.budget is not None:
            job.pace.budget.spend(piece.end - piece.begin)
        _move(job, piece)


def _move(job: _Job, piece: _Piece) -> None:
    step = job.steps[piece.number]
    begin, size = step.placement.offset + piece.begin, piece.end - piece.begin
    if step.origin is Origin.ACTIVE:
        assert job.active is not None
        job.device.copy(job.active, step.from_offset + piece.begin, size, job.slot, begin)
    elif step.origin is Origin.STORE:
        _fill(job, piece, step)
    first = piece.begin // BLOCK_BYTES
    found = job.device.block_checks(job.slot, begin, size)
    job.checks[piece.number][first : first + len(found)] = found


def _fill(job: _Job, piece: _Piece, step: Step) -> None:
    size = piece.end - piece.begin
    try:
        blob = _blob(job, piece.number, step)
        job.device.fill(job.slot, step.placement.offset + piece.begin, size, lambda into: blob.read_into(piece.begin, into))
        _let_go(job, piece.number)
    except (RaftmetaError, OSError) as cause:
        raise PieceFailed(step) from cause


def _blob(job: _Job, index: int, step: Step) -> Blob:
    """Opened with its first piece."""
    with job.lock:
        found = job.blobs.get(index)
        if found is None:
            size = step.placement.size_bytes
            found = job.blobs[index] = _OpenBlob(job.source.open(step.sha256, size), -(-size // job.device.chunk_bytes))
        return found.blob


def _let_go(job: _Job, index: int) -> None:
    """Closed after its last piece."""
    with job.lock:
        opened = job.blobs[index]
        opened.left -= 1
        if not opened.left:
            del job.blobs[index]
            opened.blob.close()
