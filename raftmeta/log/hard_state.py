"""Term, vote and the list of journal segments, in two alternating checked slots of one file.

A write goes to the slot that does not hold the newest state, so a torn write leaves the previous state readable; the newest valid slot
wins. The state is `settled` once both slots hold it: then one damaged slot costs nothing, while before that a damaged newest slot cannot
be told from a torn one. Both slots bad means that term and vote are unknown: `HardStateCorrupt`, never term 0. The file is allocated once
at its full size, so that a vote can be stored on a full disk.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from raftmeta.durable import Disk, File
from raftmeta.log.faults import HardStateCorrupt

NAME = "hard-state"
SLOT_BYTES = 128 << 10
MAX_SEGMENTS = 1000  # rows of <= 82 bytes fit one slot with the longest vote
MAX_VOTE_BYTES = 255

_MAGIC = b"rmhard01"
_HEAD_BYTES = len(_MAGIC) + 4 + 32  # magic, length of the body, SHA-256 of both and the body


class SegmentRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One segment as the list knows it. An open segment ends where its marks and records say; a sealed one ends at `end`."""

    serial: int  # names the file
    first_index: int
    previous_term: int  # of record first_index - 1
    previous_crc: int
    sealed: bool = False
    end: int = 0  # offset behind the last record
    last_index: int = 0
    last_term: int = 0
    last_crc: int = 0


class HardState(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    term: int
    voted_for: str  # "" for nobody
    segments: tuple[SegmentRow, ...]  # in order of index, all sealed but the last; empty before the first record


class HardStateFile:
    """The file of one member. `state` is the newest state written or read."""

    def __init__(self, disk: Disk, file: File, state: HardState) -> None:
        self._disk = disk
        self._file = file
        self.state = state
        self.settled = False

    @staticmethod
    def create(disk: Disk, directory: Path) -> HardStateFile:
        """Term 0, no vote, no segments. The name appears only when both slots are durable."""
        temporary, path = directory / f"{NAME}.tmp", directory / NAME
        file = disk.open(temporary, create=True)
        disk.preallocate(file, 2 * SLOT_BYTES)
        disk.pwrite(file, bytes(2 * SLOT_BYTES), 0)
        hard = HardStateFile(disk, file, HardState(0, 0, "", ()))
        hard.write_settled(0, "", ())
        disk.fsync(file)
        disk.rename(temporary, path)
        disk.sync_directory(directory)
        disk.close(file)
        hard._file = disk.open(path)
        return hard

    @staticmethod
    def load(disk: Disk, directory: Path) -> HardStateFile:
        """Read and check both slots, write nothing. Raises HardStateCorrupt when neither is whole."""
        path = directory / NAME
        file = disk.open(path)
        found = []
        states = []
        for slot in (0, 1):
            state = _decode(disk.pread(file, SLOT_BYTES, slot * SLOT_BYTES))
            if isinstance(state, HardState):
                states.append(state)
            else:
                found.append(f"slot {slot}: {state}")
        if not states:
            disk.close(file)
            raise HardStateCorrupt(path, "one whole slot of two", "; ".join(found))
        return HardStateFile(disk, file, max(states, key=lambda state: state.sequence))

    def write(self, term: int, voted_for: str, segments: tuple[SegmentRow, ...]) -> None:
        """Make a state durable in one slot: one write, one sync."""
        state = HardState(self.state.sequence + 1, term, voted_for, segments)
        image = _encode(state)
        self._disk.pwrite(self._file, image, state.sequence % 2 * SLOT_BYTES)
        self._disk.fdatasync(self._file)
        self.settled = (term, voted_for, segments) == (self.state.term, self.state.voted_for, self.state.segments)
        self.state = state

    def mirror(self) -> None:
        """Write the newest state once more, into the other slot."""
        self.write(self.state.term, self.state.voted_for, self.state.segments)

    def write_settled(self, term: int, voted_for: str, segments: tuple[SegmentRow, ...]) -> None:
        """Make a state durable in both slots. For a new list of segments: what depends on it must survive one damaged slot."""
        self.write(term, voted_for, segments)
        self.write(term, voted_for, segments)

    def close(self) -> None:
        self._disk.close(self._file)


def _encode(state: HardState) -> bytes:
    body = _encoder.encode(state)
    if len(body) + _HEAD_BYTES > SLOT_BYTES:
        raise ValueError(f"a hard state of {len(body)} bytes with {len(state.segments)} segments exceeds its slot of {SLOT_BYTES}")
    start = _MAGIC + len(body).to_bytes(4, "little")
    return start + hashlib.sha256(start + body).digest() + body


def _decode(slot: bytes) -> HardState | str:
    """The state, or what is wrong with the slot."""
    start = slot[: len(_MAGIC) + 4]
    length = int.from_bytes(start[len(_MAGIC) :], "little")
    if start[: len(_MAGIC)] != _MAGIC:
        return f"magic {start[: len(_MAGIC)].hex() or 'missing'}"
    if _HEAD_BYTES + length > len(slot):
        return f"{length} bytes announced, {max(0, len(slot) - _HEAD_BYTES)} there"
    body = slot[_HEAD_BYTES : _HEAD_BYTES + length]
    if hashlib.sha256(start + body).digest() != slot[len(start) : _HEAD_BYTES]:
        return "wrong SHA-256"
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as cause:
        return f"undecodable body ({cause})"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(HardState)
