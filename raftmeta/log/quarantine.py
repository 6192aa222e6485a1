"""A member that sets itself aside: what it holds is kept as evidence, and it begins again with nothing and without a vote.

Used when a majority of the members has another state at the same revision, and when journal or snapshot are damaged where others can fill
the gap. Its term and vote go along, so that it never votes twice in a term. The mark is durable before anything is moved, and goes once the
new hard state stands, which has no vote before everything is here again; so a crash in between goes on at the next start. One set of kept
files at a time: a member that would have to do it again before somebody looked stops instead, since its hardware or this build is at
fault, and the disk must not fill.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, read_file, write_file
from raftmeta.log.hard_state import NAME, HardStateFile, Owner, Promise
from raftmeta.log.marker import consume_marker

MARK_NAME = "quarantine"
KEPT_NAME = "quarantined"  # folder of what was set aside
RECORD_NAME = "record"  # in it: why
UNKNOWN = "unknown"  # cause of what is kept without a record that can be read
_JOURNAL, _SNAPSHOTS = "journal", "snapshots"


class Quarantine(msgspec.Struct, frozen=True):
    """Why a member set itself aside."""

    cause: str  # state_differs | journal_damaged | snapshot_damaged | unknown
    detail: str
    term: int  # and vote of the journal that goes: what this member promised it does not forget
    voted_for: str


class Quarantined(Exception):
    """The log ends here; the member opens its directory again, which sets aside what is marked and helps where only memory is wrong."""


def mark(disk: Disk, data_dir: Path, why: Quarantine) -> None:
    """Durably decide it. Raises RaftmetaError integrity when files of an earlier time are still kept."""
    kept = set_aside_before(disk, data_dir)
    if kept is not None:
        raise RaftmetaError(
            "integrity",
            f"{why.detail}; this member was set aside before ({kept.detail}), so its hardware or this build is at fault. "
            f"Look into {data_dir / KEPT_NAME}, then remove it and start the member again",
        )
    write_file(disk, data_dir / MARK_NAME, _encoder.encode(why))


def is_marked(disk: Disk, data_dir: Path) -> bool:
    return disk.exists(data_dir / MARK_NAME)


def set_aside_before(disk: Disk, data_dir: Path) -> Quarantine | None:
    """Why the files that are kept were set aside, None when there are none. Nothing hangs on what the record says: it may be damaged."""
    kept = data_dir / KEPT_NAME
    try:
        why = _read(disk, kept / RECORD_NAME)
    except RaftmetaError as damage:
        if damage.code != "integrity":
            raise
        return Quarantine(UNKNOWN, f"the record of why cannot be read: {damage.detail}", 0, "")
    if why is None and disk.exists(kept / _JOURNAL / NAME):
        return Quarantine(UNKNOWN, f"{kept / RECORD_NAME}, which said why, is missing", 0, "")
    return why


def finish(disk: Disk, data_dir: Path, owner: Owner) -> Quarantine | None:
    """If the member is marked, move its journal and snapshots away; why. Call before they are opened. May be cut off and repeated."""
    why = _read(disk, data_dir / MARK_NAME)
    if why is None:
        return None
    kept = data_dir / KEPT_NAME
    for name in (_SNAPSHOTS, _JOURNAL):
        _move(disk, data_dir / name, kept / name)
    consume_marker(disk, data_dir)  # who the members are, the others say
    _begin(disk, data_dir / _JOURNAL, owner, _promise(disk, kept / _JOURNAL, why))
    disk.make_directory(kept)
    disk.rename(data_dir / MARK_NAME, kept / RECORD_NAME)
    disk.sync_directory(kept)
    disk.sync_directory(data_dir)
    return why


def _move(disk: Disk, source: Path, target: Path) -> None:
    """All files, the hard state last: one that is there although one was kept already is the new one, and nothing else is left."""
    if not disk.exists(source) or disk.exists(target / NAME):
        return
    disk.make_directory(target)
    for file in sorted(disk.listdir(source), key=lambda file: (file == NAME, file)):
        if file == NAME:
            disk.sync_directory(target)
        disk.rename(source / file, target / file)
    disk.sync_directory(source)
    disk.sync_directory(target)


def _promise(disk: Disk, kept: Path, why: Quarantine) -> Promise:
    """Term and vote as they were decided to be kept, or those of the files if these are newer; and no vote."""
    promise = Promise(why.term, why.voted_for, joining=True)
    if disk.exists(kept / NAME):
        hard = HardStateFile.load(disk, kept)
        hard.close()
        if hard.state.promise.term > why.term:
            promise = Promise(hard.state.promise.term, hard.state.promise.voted_for, joining=True)
    return promise


def _begin(disk: Disk, directory: Path, owner: Owner, promise: Promise) -> None:
    disk.make_directory(directory)
    if not disk.exists(directory / NAME):
        HardStateFile.create(disk, directory, owner, promise).close()


def _read(disk: Disk, path: Path) -> Quarantine | None:
    data = read_file(disk, path)
    if data is None:
        return None
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as cause:
        raise RaftmetaError("integrity", f"{path}: expected the record of a quarantine, found {cause}") from cause


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Quarantine)
