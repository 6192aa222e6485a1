"""In which order and how fast the memory that serves is read again, and what a block that differs means. Pure.

A pass reads every block of every tensor once. Blocks are taken in runs of up to 1 MiB that follow each other in order of tensor name, and
the runs in an order that depends on the version's checksum and the number of the pass alone: nodes that serve the same version in the same
hour read it in the same order, wherever the tensors lie in their slots, and a pattern of faults never meets a pattern of reads. The number
counts intervals since 1970, so nobody has to agree on it; a clock that is wrong changes the order and nothing else.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from consistency.vector import BLOCK_BYTES, Words

RUN_BLOCKS: Final = 16  # 1 MiB: a third of a millisecond of one processor, and long enough that beginning a run costs little
PASS_SHARE: Final = 0.75  # of the interval, that a pass is spread over; the rest is for staging, which it waits for
MAX_IN_PLACE_BLOCKS: Final = 16  # written while requests wait; 1 MiB takes less than a millisecond
_TAG: Final = b"raftmeta-scrub-1\0"


class Span(NamedTuple):
    """Consecutive blocks of one tensor."""

    tensor: str
    first: int
    blocks: int


class Order:
    """One pass over tensors of these sizes in bytes: `len` runs, each some spans."""

    def __init__(self, sizes: Mapping[str, int], seed: bytes) -> None:
        self._names = sorted((name for name, size in sizes.items() if size), key=str.encode)
        self._size_of = {name: sizes[name] for name in self._names}
        self._ends = list(accumulate(_blocks(size) for size in self._size_of.values()))  # blocks up to and with each tensor
        self.total_bytes = sum(self._size_of.values())
        self._blocks = self._ends[-1] if self._ends else 0
        self._order = _permutation(-(-self._blocks // RUN_BLOCKS), seed)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[Span, ...]]:
        return (tuple(self._spans(int(run))) for run in self._order)

    def run_bytes(self, run: Sequence[Span]) -> int:
        return sum(self.span_bytes(span) for span in run)

    def span_bytes(self, span: Span) -> int:
        begin = span.first * BLOCK_BYTES
        return min(self._size_of[span.tensor], begin + span.blocks * BLOCK_BYTES) - begin

    def _spans(self, run: int) -> Iterator[Span]:
        at, end = run * RUN_BLOCKS, min((run + 1) * RUN_BLOCKS, self._blocks)
        index = bisect_right(self._ends, at)
        while at < end:
            name, upto = self._names[index], min(end, self._ends[index])
            begins = self._ends[index] - _blocks(self._size_of[name])
            yield Span(name, at - begins, upto - at)
            at, index = upto, index + 1


def pass_number(unix_s: float, interval_s: float) -> int:
    """Of a pass that begins now. A clock that stands before 1970 costs the order alone."""
    return max(0, int(unix_s // interval_s))


def seed(checksum: str, number: int) -> bytes:
    """Of the order in which a version is read in the pass of this number."""
    return hashlib.sha256(_TAG + bytes.fromhex(checksum) + struct.pack("<Q", number)).digest()


def due_s(done_bytes: int, total_bytes: int, interval_s: float) -> float:
    """How long after the beginning of a pass the next run is due, when so much is done."""
    return PASS_SHARE * interval_s * done_bytes / total_bytes if total_bytes else 0.0


def needed_bytes_per_s(total_bytes: int, interval_s: float) -> float:
    """At which a pass of that size keeps to the interval."""
    return total_bytes / (PASS_SHARE * interval_s)


class FindingKind(StrEnum):
    MEMORY = "memory"  # a block of the slot is not what was verified, twice in a row
    DERIVED = "derived"  # a tensor that a module holds outside the slot is not what it was when the module was bound
    TRANSIENT = "transient"  # a block was read wrong once and right the next time


class Finding(NamedTuple):
    """One difference. `expected` and `found` are the two sums of a block as hex; `found` of a transient one is the first reading."""

    kind: FindingKind
    tensor: str
    block: int
    expected: str
    found: str
    where: str  # slot 0 | worker 1
    version: str
    at_ms: int  # wall clock
    remedy: str = ""  # repaired | restaged | replaced | "": none needed, or none yet

    @property
    def detail(self) -> str:
        return f"tensor {self.tensor!r} block {self.block} in {self.where}: expected {self.expected}, found {self.found}"


class ScrubLook(NamedTuple):
    """For the status."""

    number: int = -1  # of the pass; -1 before the first
    done_bytes: int = 0
    total_bytes: int = 0
    findings: tuple[Finding, ...] = ()  # the newest last


class Remedy(StrEnum):
    NOTHING = "nothing"  # the damage is gone, or what was damaged serves no more
    REPAIR = "repair"  # these blocks, in place
    RESTAGE = "restage"  # the version into the other slot


def remedy(damaged_blocks: int, most_in_place: int = MAX_IN_PLACE_BLOCKS) -> Remedy:
    """`most_in_place`: 0 never writes to the slot that serves."""
    return Remedy.REPAIR if damaged_blocks <= most_in_place else Remedy.RESTAGE


def wrong_blocks(expected: Words, found: Words) -> list[int]:
    """Which of these blocks [blocks, 2] differ."""
    assert expected.shape == found.shape, (expected.shape, found.shape)
    return [int(at) for at in np.flatnonzero((expected != found).any(axis=1))]


def sums_text(sums: Words) -> str:
    """Both sums of one block."""
    return f"{int(sums[0]):016x}:{int(sums[1]):016x}"


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _permutation(count: int, key: bytes) -> list[int]:
    """0..count-1 in order of the numbers that SHAKE-128 gives for the key, equal ones by place."""
    drawn = np.frombuffer(hashlib.shake_128(key).digest(8 * count), "<u8")
    order: list[int] = np.argsort(drawn, kind="stable").tolist()
    return order
