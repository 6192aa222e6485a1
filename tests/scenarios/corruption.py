"""Every byte of a small quiet directory flipped, zeroed and cut off; `python -m tests.scenarios.corruption` tries all of that.

A quiet directory is that of a member that was stopped in good order: everything synced, the marks written, both slots of the hard state
equal. Opened with one of its bytes wrong, it must come back exactly as it was, or be refused with no file changed, or, where there are
other members, be set aside with every file kept and begin again without a vote. Anything else is a silent loss or a silent change.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

from raftmeta import codec
from raftmeta.core.apply import apply_batch
from raftmeta.core.errors import RaftmetaError
from raftmeta.log import configuration as cfg
from raftmeta.log.boot import Recovered
from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.journal import Journal
from raftmeta.log.proposals import commands_of
from raftmeta.log.quarantine import KEPT_NAME, RECORD_NAME
from raftmeta.log.records import DATA_START
from raftmeta.log.setup import OP_COMMANDS
from raftmeta.log.snapshots import SnapshotStore
from tests.support.memory_disk import MemoryDisk
from tests.support.scripted_cluster import Members
from tests.support.scripted_member import CLUSTER_ID, DATA, ScriptedMember, open_member
from tests.support.state_hash import recompute_hash

FLIP, ZERO, CUT, TAIL = "flipped", "zeroed", "cut", "tail zeroed"
SAME, REFUSED, SET_ASIDE = "as before", "refused", "set aside"
ZERO_STRIDE = 256  # within a run of zeros one byte of so many is tried, and both ends
AGAIN_STRIDE = 5  # at one place of so many the power goes after the start
SHARE = 2_000  # damages that a worker tries at a time


class Damage(NamedTuple):
    kind: str
    path: Path
    offset: int  # of the byte, or of the first that goes

    def on(self, undamaged: MemoryDisk) -> MemoryDisk:
        """A copy of the disk with this damage."""
        disk = undamaged.clone()
        if self.kind == FLIP:
            disk.flip(self.path, self.offset, flipped_bit(self.offset))
        elif self.kind == ZERO:
            disk.put(self.path, b"\0", self.offset)
        elif self.kind == TAIL:
            disk.put(self.path, bytes(len(disk.contents(self.path)) - self.offset), self.offset)
        else:
            disk.cut(self.path, self.offset)
        return disk


def flipped_bit(offset: int) -> int:
    """Each bit in turn."""
    return 1 << offset * 5 % 8


class Open(Protocol):
    def __call__(self, disk: MemoryDisk, *, has_peers: bool) -> tuple[Journal, Recovered]: ...


class Held(NamedTuple):
    """What a member knows after it was opened, once all of its journal is applied."""

    term: int
    voted_for: str
    first_index: int
    records: tuple[tuple[int, int, bytes], ...]
    members: bytes
    state_hash: bytes
    joining: bool


def held(journal: Journal, recovered: Recovered) -> Held:
    records = tuple(journal.entries(journal.first_index, journal.last_index + 1, 1 << 30))
    state = recovered.state
    for index, _, payload in records:
        if index > recovered.applied_index and payload[0] == OP_COMMANDS:
            state = apply_batch(state, commands_of(payload[1:])).state
    assert recompute_hash(state) == state.state_hash
    members = cfg.encode(recovered.configurations[-1][1])
    return Held(journal.term, journal.voted_for, journal.first_index, records, members, state.state_hash, recovered.joining)


# quiet directories


def of_one(world: Members) -> None:
    """A few segments, two snapshots, and a vote, of a member alone."""
    world.start()
    world.write("a0", "a1")
    for number in range(9):
        world.write(f"b{number}")
    world.restart(world.victim)
    world.write("c0")


def of_one_begun_twice(world: Members) -> None:
    """Restarted while its last segment was empty, and then one sync: the older mark of that segment says nothing."""
    world.start()
    world.write("a0")
    world.converge()
    member = world.victim
    assert member.replica is not None and member.journal is not None
    journal, engine = member.journal, member.replica.engine
    index, term = engine.applied_index, journal.last_term
    store = SnapshotStore(member.disk, DATA / "snapshots", CLUSTER_ID)
    store.write(index, term, cfg.encode(engine.configuration), codec.snapshot_chunks(member.replica.state))
    journal.reset(index, term)
    journal.close()
    journal, _ = open_member(member.disk, has_peers=False)
    for number in range(1, 4):
        journal.append(index + number, term, bytes((OP_COMMANDS,)) + b"\x90")
    member.journal = journal


def of_one_in_three(world: Members) -> None:
    """A follower that installed a snapshot and went on."""
    world.start()
    world.write("a0")
    world.isolate(world.victim)
    for number in range(14):
        world.write(f"b{number}")
    world.heal(world.victim)
    world.converge()
    assert world.victim.told["snapshot installed"]
    world.write("c0", "c1")
    world.converge()


def of_one_set_aside(world: Members) -> None:
    """Set aside for a damaged record and stopped before it caught up: without a vote, with the term and vote that it had."""
    of_one_in_three(world)
    member = world.victim
    assert member.journal is not None
    member.journal.close()
    active = max(path for path in member.disk.files() if path.name.startswith("segment-"))
    member.disk.flip(active, DATA_START)
    member.journal, _ = open_member(member.disk, has_peers=True)


class Quiet(NamedTuple):
    name: str
    names: tuple[str, ...]
    keep_entries: int  # below a snapshot
    play: Callable[[Members], None]
    modes: tuple[bool, ...] = (False, True)  # of has_peers


TRIO = ("m1", "m2", "m3")
DIRECTORIES = (
    Quiet("alone", ("m1",), 8, of_one),
    Quiet("alone, begun twice", ("m1",), 2, of_one_begun_twice),
    Quiet("one of three", TRIO, 2, of_one_in_three),
    Quiet("one of three, set aside", TRIO, 2, of_one_set_aside, (True,)),
)


def quiet(directory: Quiet) -> tuple[MemoryDisk, Held]:
    """Its disk, and what a member that opens it undamaged holds."""
    world = Members(directory.names, exchange=ExchangeSettings(entries=6, keep_entries=directory.keep_entries, keep_files=2))
    directory.play(world)
    member: ScriptedMember = world.victim
    assert member.journal is not None
    member.journal.close()
    member.disk.crash(1.0)
    return member.disk, held(*open_member(member.disk.clone(), has_peers=len(directory.names) > 1))


def damages(disk: MemoryDisk) -> Iterator[Damage]:
    """All of them; within runs of zeros only some. What was set aside is evidence and not read, but for the record that says why."""
    for path, data in disk.files().items():
        if KEPT_NAME in path.parts and path.name != RECORD_NAME:
            continue
        end = len(data.rstrip(b"\0"))
        for offset in _places(data):
            yield Damage(FLIP, path, offset)
            yield Damage(CUT, path, offset)
            if offset < end:
                yield Damage(TAIL, path, offset)
            if data[offset]:
                yield Damage(ZERO, path, offset)


def some(every: list[Damage], count: int) -> list[Damage]:
    """About so many of each kind in each file, from its first byte to its last."""
    chosen: list[Damage] = []
    for _, group in groupby(sorted(every, key=_file_and_kind), key=_file_and_kind):
        same = list(group)
        step = max(1, (len(same) - 1) // count)
        chosen += sorted({*same[::step], same[-1]})
    return chosen


def _file_and_kind(damage: Damage) -> tuple[Path, str]:
    return damage.path, damage.kind


def _places(data: bytes) -> Iterator[int]:
    for is_zero, run in groupby(range(len(data)), key=lambda offset: data[offset] == 0):
        offsets = list(run)
        if is_zero:
            yield from sorted({*offsets[::ZERO_STRIDE], offsets[-1]})
        else:
            yield from offsets


def outcome(disk: MemoryDisk, expected: Held, *, has_peers: bool, again: bool = True, opened: Open = open_member) -> str:
    """How a member meets a damaged directory. AssertionError when it loses or changes anything silently.

    With `again` the power goes after the start, and it must come back with the same once more.
    """
    before = disk.files()
    try:
        found = held(*opened(disk, has_peers=has_peers))
    except RaftmetaError as refusal:
        assert refusal.code == "integrity", refusal
        after = disk.files()
        changed = sorted(str(path) for path in {*before, *after} if before.get(path) != after.get(path))
        assert not changed, f"refused, but changed {changed}"
        return REFUSED
    aside = found.joining and not expected.joining
    if aside:
        assert has_peers, "set aside although nobody else has it"
        assert (found.term, found.voted_for, found.records) == (expected.term, expected.voted_for, ())
        after = disk.files()
        for path, data in before.items():
            assert after.get(DATA / KEPT_NAME / path.relative_to(DATA)) == data, f"{path} was not kept as it was"
    else:
        assert found == expected, f"silently changed: {_difference(found, expected)}"
    if again:
        disk.crash(0.0)
        assert held(*opened(disk, has_peers=has_peers)) == found, "changed once more by power loss after the start"
    return SET_ASIDE if aside else SAME


def _difference(found: Held, expected: Held) -> str:
    names = [name for name, one, other in zip(Held._fields, found, expected, strict=True) if one != other]
    return f"{', '.join(names)}; {len(found.records)} of {len(expected.records)} records"


class Share(NamedTuple):
    """What one worker tries at a time."""

    directory: int
    has_peers: bool
    part: slice


@functools.cache
def prepared(directory: int) -> tuple[MemoryDisk, Held, list[Damage]]:
    """The disk of this directory, what is on it, and every damage to it."""
    disk, expected = quiet(DIRECTORIES[directory])
    return disk, expected, list(damages(disk))


def _try(share: Share) -> tuple[Counter[tuple[str, str, str]], list[str]]:
    """Counts by file, kind and outcome, and what went wrong."""
    disk, expected, every = prepared(share.directory)
    counts: Counter[tuple[str, str, str]] = Counter()
    faults: list[str] = []
    for damage in every[share.part]:
        try:
            again = damage.offset % AGAIN_STRIDE == 0
            found = outcome(damage.on(disk), expected, has_peers=share.has_peers, again=again)
        except Exception as fault:  # noqa: BLE001 - every damage is told, whatever came of it
            found = "FAILED"
            faults.append(f"{damage}: {type(fault).__name__}: {fault}")
        counts[damage.path.name.split("-0")[0], damage.kind, found] += 1
    return counts, faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.corruption", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--every", type=int, default=1, help="try one damage of so many")
    options = parser.parse_args()
    began = time.perf_counter()
    tried = failed = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for number, directory in enumerate(DIRECTORIES):
            total = len(prepared(number)[2])
            for has_peers in directory.modes:
                shares = [Share(number, has_peers, slice(begin, begin + SHARE, options.every)) for begin in range(0, total, SHARE)]
                counts: Counter[tuple[str, str, str]] = Counter()
                for found, faults in pool.map(_try, shares):
                    counts.update(found)
                    failed += len(faults)
                    print(*faults[:10], sep="\n", end="\n" if faults else "", flush=True)
                tried += counts.total()
                print(f"{directory.name}, {'with' if has_peers else 'without'} peers: {counts.total()} damages")
                for (file, kind, result), count in sorted(counts.items()):
                    print(f"  {file:12} {kind:12} {result:10} {count:>7}", flush=True)
    print(f"{tried} damages, {failed} of them failed, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
