"""The bytes of a journal segment: a header, two marks, and records that chain.

Layout, little-endian. Block 0: magic, format, cluster digest, serial, first index, term and CRC of the record before, capacity; its last
32 bytes are the SHA-256 of the rest. Blocks 1 and 2: one mark each (magic, sequence, end, last index, last term, chained CRC, number of the
hard state, committed index, CRC of the mark). From block 3: records of crc u32, length u32, index u64, term u64, payload, where crc is the
CRC-32 of all that follows it, started from the crc of the record before. Zeros follow the last record. A mark speaks only of records that
were synced before it was written: damage below the newest valid mark is corruption, above it a torn write. Sectors of 512 bytes are assumed
to be written whole or not at all.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from raftmeta.durable import Disk, File

BLOCK_BYTES = 4096
DATA_START = 3 * BLOCK_BYTES
RECORD_HEAD_BYTES = 24
MAX_RECORD_BYTES = 16 << 20  # an entry is at most 8 MiB; anything longer on disk is damage
CHECKPOINT_BYTES = 64 << 10  # a read begins at most this far, and one record, before its first
FORMAT = 1

_HEADER = struct.Struct("<8sI16sQQQIQ")
_HEADER_MAGIC = b"rmsegm01"
_MARK = struct.Struct("<8sQQQQIQQ")
_MARK_MAGIC = b"rmmark02"
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<IQQ")  # length, index, term
_RECORD = struct.Struct("<IIQQ")
_READ_BYTES = 256 << 10

MARK_BYTES = _MARK.size + _CRC.size

Payload = bytes
Record = tuple[int, int, Payload]  # index, term, payload


class Cursor(msgspec.Struct, frozen=True, gc=False):
    """A place between two records: `offset` is behind record `index`, whose term and chained CRC these are."""

    offset: int
    index: int
    term: int
    crc: int


class Known(NamedTuple):
    """What a member knows beside its records, and must not forget."""

    promised: int = 0  # number of the write of the hard state that first said what it says: an older hard state is noticed
    committed: int = 0  # last index that is known to be committed: no leader may contradict it


class Mark(NamedTuple):
    sequence: int
    cursor: Cursor
    known: Known = Known()


class Header(NamedTuple):
    cluster: bytes  # 16 bytes
    serial: int
    first_index: int
    previous_term: int
    previous_crc: int
    capacity: int


def cluster_digest(cluster_id: str) -> bytes:
    return hashlib.sha256(b"raftmeta cluster\0" + cluster_id.encode()).digest()[:16]


def encode_header(header: Header) -> bytes:
    block = _HEADER.pack(_HEADER_MAGIC, FORMAT, *header).ljust(BLOCK_BYTES - 32, b"\0")
    return block + hashlib.sha256(block).digest()


def decode_header(block: bytes) -> Header | str:
    """The header, or what is wrong with it."""
    if len(block) < BLOCK_BYTES:
        return f"{len(block)} bytes of {BLOCK_BYTES}"
    if hashlib.sha256(block[:-32]).digest() != block[-32:]:
        return "wrong SHA-256"
    magic, number, *fields = _HEADER.unpack_from(block)
    if magic != _HEADER_MAGIC or number != FORMAT:
        return f"magic {magic!r} format {number}"
    return Header(*fields)


def encode_mark(mark: Mark) -> bytes:
    at = mark.cursor
    data = _MARK.pack(_MARK_MAGIC, mark.sequence, at.offset, at.index, at.term, at.crc, *mark.known)
    return data + _CRC.pack(zlib.crc32(data))


def decode_mark(data: bytes) -> Mark | None:
    if len(data) < MARK_BYTES or zlib.crc32(data[: _MARK.size]) != _CRC.unpack_from(data, _MARK.size)[0]:
        return None
    magic, sequence, *cursor, promised, committed = _MARK.unpack_from(data)
    return Mark(sequence, Cursor(*cursor), Known(promised, committed)) if magic == _MARK_MAGIC else None


class Scanner:
    """Reads records from `cursor` up to offset `stop`. Ends at the first that does not chain; `broken` then says why."""

    def __init__(self, disk: Disk, file: File, cursor: Cursor, stop: int) -> None:
        self._disk = disk
        self._file = file
        self._stop = stop
        self.cursor = cursor
        self.broken = ""

    def __iter__(self) -> Iterator[Record]:
        buffer, base = b"", self.cursor.offset
        start = self.cursor
        offset, last, term, crc = start.offset, start.index, start.term, start.crc
        while offset < self._stop:
            at = offset - base
            if at + RECORD_HEAD_BYTES > len(buffer):
                buffer, base, at = self._disk.pread(self._file, min(_READ_BYTES, self._stop - offset), offset), offset, 0
                if len(buffer) < RECORD_HEAD_BYTES:
                    self.broken = f"{len(buffer)} bytes"
                    return
            stored, length, index, next_term = _RECORD.unpack_from(buffer, at)
            size = RECORD_HEAD_BYTES + length
            if index != last + 1 or next_term < term or length > MAX_RECORD_BYTES or offset + size > self._stop:
                self.broken = f"a head of index {index}, term {next_term}, length {length}"
                return
            if at + size > len(buffer):
                buffer, base, at = self._disk.pread(self._file, max(size, min(_READ_BYTES, self._stop - offset)), offset), offset, 0
            payload = buffer[at + RECORD_HEAD_BYTES : at + size]
            crc = zlib.crc32(payload, zlib.crc32(buffer[at + 4 : at + RECORD_HEAD_BYTES], crc))
            if crc != stored or len(payload) != length:
                self.broken = f"a record of {len(payload)} bytes with CRC {crc:#010x} where {stored:#010x} is stored"
                return
            offset, last, term = offset + size, index, next_term
            self.cursor = Cursor(offset, last, term, crc)
            yield index, term, payload


class Encoded(NamedTuple):
    data: bytes
    taken: int  # records
    end: Cursor  # behind the last of them
    checkpoints: list[Cursor]
    runs: list[tuple[int, int]]  # (first index, term) of each run of equal terms that begins here


def encode_records(records: Sequence[Record], start: int, end: Cursor, capacity: int, checkpoint: int) -> Encoded:
    """Records from number `start` on, as far as they fit below `capacity`; checkpoints are due from offset `checkpoint` on."""
    parts: list[bytes] = []
    checkpoints, runs = [], []
    offset, last, last_term, crc = end.offset, end.index, end.term, end.crc
    number = start
    for number in range(start, len(records)):
        index, term, payload = records[number]
        size = len(payload)
        behind = offset + RECORD_HEAD_BYTES + size
        if behind > capacity:
            break
        if offset >= checkpoint:
            checkpoints.append(Cursor(offset, last, last_term, crc))
            checkpoint = offset + CHECKPOINT_BYTES
        if term != last_term:
            runs.append((index, term))
        head = _HEAD.pack(size, index, term)
        crc = zlib.crc32(payload, zlib.crc32(head, crc))
        parts += (_CRC.pack(crc), head, payload)
        offset, last, last_term = behind, index, term
    else:
        number = len(records)
    return Encoded(b"".join(parts), number - start, Cursor(offset, last, last_term, crc), checkpoints, runs)
