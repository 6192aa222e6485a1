"""Every changing call of a member's disk as the moment of its death; `python -m tests.scenarios.crash_points` tries them all.

Scripts over the real replica: a member alone, one of three, and one of three with a damaged record. Between them the member that dies
bootstraps, votes, fills segments, takes snapshots and compacts, loses a suffix to another leader, installs a snapshot, and is set aside. A
script runs once undisturbed and notes the calls; then it runs again for each call and each way to die, restarts the member on what is left,
and goes on to its end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from raftmeta.log.records import DATA_START
from tests.support.memory_disk import MemoryDisk
from tests.support.scripted_cluster import Crash, Members
from tests.support.scripted_member import ScriptedMember

CRASHES = (
    Crash("power lost, nothing un-synced survives", 0.0),
    Crash("power lost, all of it survives", 1.0),
    Crash("power lost, half of it survives", 0.5, 1),
    Crash("power lost, another half", 0.5, 2),
    Crash("process killed", None),
    Crash("power lost, and again in the restart", 0.5, 3, 1),
    Crash("power lost, and again later in the restart", 0.0, 4, 9),
    Crash("power lost, and again just after the restart", 0.5, 5, 24),
)
ALL_LOST = CRASHES[0]
REQUIRED = ("pwrite", "fsync", "fdatasync", "rename", "unlink")


def alone(world: Members) -> None:
    """One member: elections, batches, rolled segments, snapshots, compaction, restarts in good order."""
    world.start()
    world.write("a0")
    world.run(0.1)
    world.write(*(f"b{number}" for number in range(6)))
    for number in range(14):
        world.write(f"c{number}")
    world.restart(world.victim)
    for number in range(8):
        world.write(f"d{number}", f"e{number}", f"f{number}")
        world.run(0.05)
    world.restart(world.victim)
    world.write("g0")
    world.converge()


def one_of_three(world: Members) -> None:
    """The member that dies leads, is overruled, falls behind, has another state than the others, and comes back each time."""
    victim = world.victim
    world.start()
    world.write("a0")
    world.write(*(f"b{number}" for number in range(6)))
    for number in range(4):
        world.write(f"c{number}")
    _overruled(world, victim)
    _left_behind(world, victim)
    world.restart(victim)
    world.write("g0")
    _contradicted(world, victim)
    world.write("h0", "h1")
    world.converge()


def _overruled(world: Members, victim: ScriptedMember) -> None:
    """A leader without its peers appends what another leader's entries then replace."""
    world.leader()
    world.isolate(victim)
    world.propose(victim, "d0")
    world.run(0.05)
    world.write("d1", "d2")
    world.heal(victim)
    world.write("d0")
    world.converge()


def _left_behind(world: Members, victim: ScriptedMember) -> None:
    """The others compact away what it would need next."""
    world.isolate(victim)
    for number in range(14):
        world.write(f"e{number}")
    world.heal(victim)
    world.converge()
    world.write("f0")


def _contradicted(world: Members, victim: ScriptedMember) -> None:
    """Its state becomes another one behind its back; the majority tells."""
    world.converge()
    before = victim.told["caught up"]
    if victim.replica is not None:
        state = victim.replica.state
        victim.replica.state = msgspec.structs.replace(state, hash_sum=state.hash_sum ^ (1 << 200))
    world.isolate(victim)
    world.heal(victim)
    world.write("g1")
    world.isolate(victim)
    world.heal(victim)
    world.run(12.0, lambda: victim.told["caught up"] > before)
    world.converge()


def damaged(world: Members) -> None:
    """A record rots while it is stopped; it sets its files aside and takes everything from the others."""
    victim = world.victim

    def rot() -> None:
        active = max(path for path in victim.disk.files() if path.name.startswith("segment-"))
        victim.disk.flip(active, DATA_START)
        victim.promises.set_aside = True

    world.start()
    world.write("a0")
    world.write(*(f"b{number}" for number in range(6)))
    world.converge()
    world.restart(victim, rot)
    world.write("c0")
    world.converge()


class Script(NamedTuple):
    name: str
    names: tuple[str, ...]
    play: Callable[[Members], None]


TRIO = ("m1", "m2", "m3")
SCRIPTS = (Script("alone", ("m1",), alone), Script("one of three", TRIO, one_of_three), Script("one of three, damaged", TRIO, damaged))


class Calls:
    """Notes the changing calls of a disk: which, and on what kind of file."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk, self._before = disk, disk.calls
        self.seen: list[tuple[str, str]] = []
        disk.on_call = self._note

    def _note(self, call: str, path: Path) -> None:
        if self._disk.calls - self._before > len(self.seen):
            self.seen.append((call, _kind(path)))


def _kind(path: Path) -> str:
    name = path.name.removeprefix(".").split("-")[0].removesuffix(".tmp")
    return f"kept {name}" if "quarantined" in path.parts else name


def undisturbed(script: Script) -> tuple[Members, list[tuple[str, str]]]:
    """The run without a crash, and the calls in it at which to crash."""
    world = Members(script.names)
    calls = Calls(world.victim.disk)
    script.play(world)
    world.check()
    return world, calls.seen


def die(script: Script, call: int, crash: Crash, disk: MemoryDisk | None = None) -> bool:
    """Run the script with a crash at this call. Whether the script came that far."""
    world = Members(script.names, disk=disk)
    world.plan(call, crash)
    try:
        script.play(world)
        world.check()
    except Exception as fault:
        fault.add_note(f"script {script.name!r}, died before call {call}: {crash}")
        raise
    return world.crashes > 0


def table(calls: Sequence[tuple[str, str]]) -> str:
    """How many crash points there are, by call and by file."""
    by_call = Counter(call for call, _ in calls)
    lines = []
    for call, count in sorted(by_call.items()):
        files = Counter(file for name, file in calls if name == call)
        lines.append(f"  {call:16} {count:>5}   " + ", ".join(f"{file} {number}" for file, number in sorted(files.items())))
    return "\n".join(lines)


class Point(NamedTuple):
    """One run: which script, before which call, and how."""

    script: int
    call: int
    crash: int


def every_point() -> list[Point]:
    """Every call of every script with every way to die."""
    return [
        Point(number, call, crash)
        for number, script in enumerate(SCRIPTS)
        for call in range(len(undisturbed(script)[1]))
        for crash in range(len(CRASHES))
    ]


def some_points(number: int, calls: Sequence[tuple[str, str]], count: int) -> list[Point]:
    """At most `count` calls of each kind on each kind of file, the first and the last among them; the ways to die take turns."""
    chosen: list[int] = []
    for kind in sorted(set(calls)):
        same = [call for call, found in enumerate(calls) if found == kind]
        step = max(1, (len(same) - 1) // max(1, count - 1))
        chosen += {*same[::step][: count - 1], same[-1]}
    return [Point(number, call, turn % len(CRASHES)) for turn, call in enumerate(sorted(chosen))]


def tried(point: Point) -> str:
    """What went wrong at this point, "" if nothing did."""
    try:
        reached = die(SCRIPTS[point.script], point.call, CRASHES[point.crash])
    except Exception as fault:  # noqa: BLE001 - every point is told, whatever went wrong there
        return f"{type(fault).__name__}: {fault}; {'; '.join(getattr(fault, '__notes__', ()))}"
    return "" if reached else f"{point}: the script ended before this call"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.crash_points", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--every", type=int, default=1, help="try one point of so many, best an odd number")
    options = parser.parse_args()
    began = time.perf_counter()
    for script in SCRIPTS:
        _, calls = undisturbed(script)
        print(f"{script.name}: {len(calls)} crash points", table(calls), sep="\n", flush=True)
    todo = every_point()[:: options.every]
    failed = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for fault in pool.map(tried, todo, chunksize=16):
            if fault:
                failed += 1
                print(fault, flush=True)
    ways = ", ".join(crash.name for crash in CRASHES)
    print(f"{len(CRASHES)} ways to die: {ways}")
    print(f"{len(todo)} runs, {failed} of them failed, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
