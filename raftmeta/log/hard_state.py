"""What a member promised, and the list of its journal segments, in two alternating checked slots of one file.

It names the member that promised, so that another's file is refused, and says whether this one may vote at all: a member that starts with
nothing may not, since its predecessor promised to hold entries and a vote that it no longer knows. A majority that counts a wiped disk is
none. It may again once a leader's commit index of the leader's own term is applied here, for everything that was ever acknowledged with
this member's help is then here again; or once every member that is to form the cluster with it said that it holds nothing either.

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
from raftmeta.log.faults import HardStateCorrupt, WrongMember

NAME = "hard-state"
SLOT_BYTES = 128 << 10
MAX_SEGMENTS = 1000  # rows of <= 82 bytes fit one slot with the longest vote
MAX_VOTE_BYTES = 255

_MAGIC = b"rmhard02"
_HEAD_BYTES = len(_MAGIC) + 4 + 32  # magic, length of the body, SHA-256 of both and the body


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Whose promises these are."""

    cluster_id: str = ""
    member_id: str = ""


NOBODY = Owner()  # whose journals tests make


class Promise(msgspec.Struct, frozen=True, array_like=True):
    """What others rely on, whatever becomes of the process."""

    term: int = 0
    voted_for: str = ""  # "" for nobody
    joining: bool = False  # no vote: what an earlier life of this member promised may not be here
    awaited: tuple[int, int] = (0, 0)  # (index, term) of the received snapshot that takes the journal's place; (0, 0) for none


class SegmentRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One segment as the list knows it. A sealed one ends at `end`; an open one, not before it: an older copy of the file is noticed."""

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
    owner: Owner
    promise: Promise
    segments: tuple[SegmentRow, ...]  # in order of index, all sealed but the last; empty before the first record


class HardStateFile:
    """The file of one member. `state` is the newest state written or read; `since` numbers the write that first said what matters of it."""

    def __init__(self, disk: Disk, file: File, state: HardState) -> None:
        self._disk = disk
        self._file = file
        self.state = state
        self.since = state.sequence
        self.settled = False

    @staticmethod
    def create(disk: Disk, directory: Path, owner: Owner, promise: Promise) -> HardStateFile:
        """No segments. The name appears only when both slots are durable."""
        temporary, path = directory / f"{NAME}.tmp", directory / NAME
        file = disk.open(temporary, create=True)
        disk.preallocate(file, 2 * SLOT_BYTES)
        disk.pwrite(file, bytes(2 * SLOT_BYTES), 0)
        hard = HardStateFile(disk, file, HardState(0, owner, promise, ()))
        hard.write_settled(promise, ())
        disk.fsync(file)
        disk.rename(temporary, path)
        disk.sync_directory(directory)
        disk.close(file)
        hard._file = disk.open(path)
        return hard

    @staticmethod
    def load(disk: Disk, directory: Path, owner: Owner | None = None) -> HardStateFile:
        """Read and check both slots, write nothing. Raises HardStateCorrupt when neither is whole, WrongMember for another owner's."""
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
        hard = HardStateFile(disk, file, max(states, key=lambda state: state.sequence))
        hard.since = min(state.sequence for state in states if _says_the_same(state, hard.state))
        if owner is not None and hard.state.owner != owner:
            disk.close(file)
            raise WrongMember(path, _name(owner), _name(hard.state.owner))
        return hard

    def write(self, promise: Promise, segments: tuple[SegmentRow, ...]) -> None:
        """Make a state durable in one slot: one write, one sync."""
        state = HardState(self.state.sequence + 1, self.state.owner, promise, segments)
        image = _encode(state)
        self._disk.pwrite(self._file, image, state.sequence % 2 * SLOT_BYTES)
        self._disk.fdatasync(self._file)
        self.settled = _says_the_same(state, self.state)
        if not self.settled:
            self.since = state.sequence
        self.state = state

    def mirror(self) -> None:
        """Write the newest state once more, into the other slot."""
        self.write(self.state.promise, self.state.segments)

    def write_settled(self, promise: Promise, segments: tuple[SegmentRow, ...]) -> None:
        """Make a state durable in both slots. For a new list of segments: what depends on it must survive one damaged slot."""
        self.write(promise, segments)
        self.write(promise, segments)

    def close(self) -> None:
        self._disk.close(self._file)


def _says_the_same(one: HardState, other: HardState) -> bool:
    """In all but how far the open segment had come."""
    return _outline(one) == _outline(other)


def _outline(state: HardState) -> tuple[Promise, tuple[SegmentRow, ...], list[int]]:
    return state.promise, state.segments[:-1], [row.serial for row in state.segments[-1:]]


def _name(owner: Owner) -> str:
    return f"member {owner.member_id!r} of cluster {owner.cluster_id!r}"


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
