"""A member that sets itself aside: what it holds is kept as evidence, and it begins again with nothing and without a vote.

Used when a majority of the members has another state at the same revision, and when journal or snapshot are damaged where others can fill
the gap. Its term and vote go along, so that it never votes twice in a term. The mark is durable before anything is moved, so a crash in
between goes on at the next start; `joining` (no vote before everything is here again) is durable before the first file leaves. One set of
kept files at a time: a member that would have to do it again before somebody looked stops instead, since its hardware or this build is at
fault, and the disk must not fill.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, read_file, write_file
from raftmeta.log import joining
from raftmeta.log.journal import Journal
from raftmeta.log.marker import consume_marker

MARK_NAME = "quarantine"
KEPT_NAME = "quarantined"  # folder of what was set aside
RECORD_NAME = "record"  # in it: why
_MOVED = ("journal", "snapshots")


class Quarantine(msgspec.Struct, frozen=True):
    """Why a member set itself aside."""

    cause: str  # state_differs | journal_damaged | snapshot_damaged
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
    """Why the files that are kept were set aside, None when there are none."""
    return _read(disk, data_dir / KEPT_NAME / RECORD_NAME)


def finish(disk: Disk, data_dir: Path) -> Quarantine | None:
    """If the member is marked, move its journal and snapshots away; why. Call before they are opened. May be cut off and repeated."""
    why = _read(disk, data_dir / MARK_NAME)
    if why is None:
        return None
    joining.mark(disk, data_dir)
    kept = data_dir / KEPT_NAME
    for name in _MOVED:
        source, target = data_dir / name, kept / name
        if disk.exists(source):
            disk.make_directory(target)
            for file in disk.listdir(source):
                disk.rename(source / file, target / file)
            disk.sync_directory(source)
            disk.sync_directory(target)
    consume_marker(disk, data_dir)  # who the members are, the others say
    disk.make_directory(kept)
    disk.rename(data_dir / MARK_NAME, kept / RECORD_NAME)
    disk.sync_directory(kept)
    disk.sync_directory(data_dir)
    return why


def keep_promises(kept: Quarantine, journal: Journal) -> None:
    """Give the new journal the term and vote of the one that was set aside. Call while the member has not caught up."""
    if journal.term < kept.term:
        journal.set_hard_state(kept.term, kept.voted_for)
        journal.sync()


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
