"""What a data directory holds, checked record by record, before anything is changed in it.

`inspect` only reads: a member that refuses to start has touched no file. It stops at the first damage and keeps what precedes it, which is
what `accept_loss` cuts to. A hard state that is older than a segment is refused before anything is made of its list. `adopt` makes an
undamaged finding the state to go on with, and removes files that the list of segments does not name and that a crash may leave.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, DiskFailed
from raftmeta.log.faults import Damage, HardStateCorrupt
from raftmeta.log.hard_state import NAME, HardStateFile, Owner, Promise, SegmentRow
from raftmeta.log.records import BLOCK_BYTES, DATA_START, Known, Mark, cluster_digest, decode_header
from raftmeta.log.segment import Segment
from raftmeta.log.segments import SegmentList
from raftmeta.log.spares import InlineWorker, SparePool, segment_path

_SEGMENT, _SPARE = "segment-", "spare-"


class Findings(msgspec.Struct):
    """`segments` are checked in full, but for the last when there is damage: that one is whole up to its `end`."""

    hard: HardStateFile | None  # None in a directory that never held a journal
    segments: list[Segment]
    damage: Damage | None
    spares: list[int]  # serials
    leftovers: list[str]  # names of files that nothing refers to
    next_serial: int


def inspect(disk: Disk, directory: Path, owner: Owner, spare_bytes: int) -> Findings:
    """Raises HardStateCorrupt, WrongMember or WrongCluster; damage of records is returned."""
    cluster = cluster_digest(owner.cluster_id)
    names = disk.listdir(directory)
    serials = {name: _serial(name) for name in names}
    spares = [
        serial for name, serial in serials.items() if serial and name.startswith(_SPARE) and _fits(disk, directory / name, spare_bytes)
    ]
    next_serial = max((serial for serial in serials.values() if serial), default=0) + 1
    segment_names = {name for name, serial in serials.items() if serial and name.startswith(_SEGMENT)}
    if NAME not in names:
        if segment_names:
            raise HardStateCorrupt(directory / NAME, f"a file beside {len(segment_names)} segments", "none")
        return Findings(None, [], None, sorted(spares), _leftovers(names, set(), spares), next_serial)
    hard = HardStateFile.load(disk, directory, owner)
    rows = hard.state.segments
    known = {segment_path(directory, row.serial).name for row in rows}
    findings = Findings(
        hard, [], None, sorted(spares), _leftovers(names, known, spares), max([next_serial, *(row.serial + 1 for row in rows)])
    )
    try:
        _check_age(disk, directory, hard, segment_names - known)
        _check_segments(disk, directory, cluster, findings)
    except BaseException:
        close(findings)
        raise
    return findings


def close(findings: Findings) -> None:
    for segment in findings.segments:
        segment.close()
    if findings.hard is not None:
        findings.hard.close()


def adopt(disk: Disk, directory: Path, findings: Findings, owner: Owner, promise: Promise) -> HardStateFile:
    """Make an undamaged finding the durable state: leftovers gone, torn bytes cleared, both slots and the newest records written once more.

    What was read may be in the page cache only, after a sync that failed; it has to be durable before anyone acts on it. Where there is
    none, owner and promise are those of a new one.
    """
    hard = findings.hard or HardStateFile.create(disk, directory, owner, promise)
    hard.write_settled(hard.state.promise, hard.state.segments)
    if findings.segments:
        active = findings.segments[-1]
        active.renew(Known(hard.since, active.mark.known.committed))
    for name in findings.leftovers:  # last: until here the other slot may still name them
        disk.unlink(directory / name)
    return hard


def accept_loss(disk: Disk, directory: Path, index: int, *, owner: Owner, segment_bytes: int) -> tuple[int, int]:
    """Give up the records from `index` on, which must be the damaged one that `inspect` named. Returns the range that is lost.

    Only for a single member whose operator said so. The damaged bytes stay on disk, as `lost-` files or behind the new end.
    """
    findings = inspect(disk, directory, owner, segment_bytes)
    damage = findings.damage
    if damage is None or damage.index != index:
        close(findings)
        found = "no damage" if damage is None else f"damage from record {damage.index} on"
        raise RaftmetaError("bad_field", f"{directory}: expected damage from record {index} on, found {found}; nothing was changed")
    assert findings.hard is not None
    state = findings.hard.state
    bad = findings.segments[-1]
    previous = bad.end
    if bad.last_index < bad.first_index:
        findings.segments.pop().close()
    else:
        bad.sync()
        bad.seal(bad.end)
    lost = [row.serial for row in state.segments[len(findings.segments) :]]
    pool = SparePool(disk, directory, segment_bytes, 0, InlineWorker(), findings.next_serial, deque(findings.spares))
    segments = SegmentList(findings.hard, findings.segments, pool, cluster_digest(owner.cluster_id))
    segments.committed = min(segments.committed, previous.index)
    segments.begin(previous, len(segments.all), state.promise)
    for serial in lost:
        path = segment_path(directory, serial)
        if disk.exists(path):
            disk.rename(path, directory / f"lost-{path.name}")
    disk.sync_directory(directory)
    segments.close()
    return damage.index, damage.through


def _check_segments(disk: Disk, directory: Path, cluster: bytes, findings: Findings) -> None:
    assert findings.hard is not None
    state = findings.hard.state
    for row in state.segments:
        segment = Segment(disk, directory, row, 0)
        findings.segments.append(segment)
        if not disk.exists(segment.path):
            wrong = "no such file"
        else:
            wrong = segment.check_header(cluster)
        promised = row.last_index if row.end else row.first_index - 1
        findings.damage = segment.damage(segment.end, wrong, promised) if wrong else segment.check(promised)
        if findings.damage is not None:
            through = max(findings.damage.through, _promised(disk, directory, findings.hard))
            findings.damage = msgspec.structs.replace(findings.damage, through=through)
            return
        if row.sealed:
            segment.close()
    term = state.promise.term
    if findings.segments and findings.segments[-1].end.term > term:
        path = directory / NAME
        raise HardStateCorrupt(path, f"a term of at least {findings.segments[-1].end.term}, that of the last record", f"term {term}")


def _check_age(disk: Disk, directory: Path, hard: HardStateFile, unlisted: set[str]) -> None:
    """Raises HardStateCorrupt when a segment knows of a newer hard state, or is one that a newer hard state must have listed.

    A crash leaves segments that are not listed: one that was to be the next and holds nothing yet, and older ones that were to go.
    """
    path, state = directory / NAME, hard.state
    last = state.segments[-1].serial if state.segments else 0
    for name in sorted(unlisted):
        if _serial(name) > last and not _holds_nothing(disk, directory / name):
            raise HardStateCorrupt(path, f"a list that names {name}, which is not empty", f"one that ends with segment {last}")
    if state.segments:
        mark = _newest_mark(disk, directory, state.segments[-1])
        if mark is not None and mark.known.promised > state.sequence:
            raise HardStateCorrupt(path, f"state {mark.known.promised} or a later one, as segment {last} says", f"state {state.sequence}")


def _holds_nothing(disk: Disk, path: Path) -> bool:
    """Whether this is a segment as `begin` makes it, before its first record."""
    file = disk.open(path)
    try:
        header = decode_header(disk.pread(file, BLOCK_BYTES, 0))
        return not isinstance(header, str) and not any(disk.pread(file, BLOCK_BYTES, DATA_START))
    finally:
        disk.close(file)


def _newest_mark(disk: Disk, directory: Path, row: SegmentRow) -> Mark | None:
    segment = Segment(disk, directory, row, 0)
    if not disk.exists(segment.path):
        return None
    try:
        return segment.newest_mark()
    finally:
        segment.close()


def _promised(disk: Disk, directory: Path, hard: HardStateFile) -> int:
    """The last record that anything speaks of: the list, or a mark of the active segment."""
    row = hard.state.segments[-1]
    mark = _newest_mark(disk, directory, row)
    return max(row.first_index - 1, row.last_index, mark.cursor.index if mark else 0)


def _serial(name: str) -> int:
    """The serial in the name of a segment or spare, 0 for any other file."""
    for prefix in (_SEGMENT, _SPARE):
        digits = name.removeprefix(prefix)
        if digits != name and digits.isdigit():
            return int(digits)
    return 0


def _fits(disk: Disk, path: Path, spare_bytes: int) -> bool:
    try:
        file = disk.open(path)
    except DiskFailed:
        return False
    try:
        return disk.size(file) == spare_bytes
    finally:
        disk.close(file)


def _leftovers(names: list[str], known: set[str], spares: list[int]) -> list[str]:
    kept = known | {f"{_SPARE}{serial:012d}" for serial in spares}
    ours = [name for name in names if _serial(name) or (name.startswith((_SPARE, NAME)) and name.endswith(".tmp"))]
    return [name for name in ours if name not in kept]
