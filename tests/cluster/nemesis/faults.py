"""The faults: each takes hold, lasts, and is undone, whatever happens in between. One at a time.

Whether members survive what they must survive is judged here: `problems` lists a member that ended when it should have stood it, or went on
when it should have ended. Whether the cluster kept its promises is judged from the clients' history.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from tests.cluster.nemesis.clients import Clients
from tests.cluster.nemesis.members import Members
from tests.cluster.nemesis.places import ZONES
from tests.cluster.nemesis.plan import Kind, Step
from tests.cluster.nemesis.tools import HOUR_S, INJECTED, SYNC_CALL, ToolFailed, tampered

READY_S = 30.0  # from the start of a member to its readiness; not reaching it in time is no problem while other faults may still work
LEADER_S = 10.0
SYNC_S = 20.0  # to the next sync of a member, which may still be starting
DEATH_S = 10.0  # from a failed sync to the end of the process, on a machine with others at work
FILL_S = 60.0  # to use up what room a full disk leaves, up to two segments of 16 MiB; 5 s on two idle cores
POLL_S = 0.05
BALLAST_STEP = 1 << 20
SLOWEST_SYNC_S = 3.0  # two of the longest election timeouts: a leader with such a disk has to give way


class Event(msgspec.Struct, frozen=True):
    """What was done, and when."""

    kind: Kind
    begin: float  # monotonic
    end: float
    what: str
    made: bool  # whether the machine did what was asked of it


class Faults:
    def __init__(self, members: Members, clients: Clients, folder: Path) -> None:
        self._members, self._clients, self._folder = members, clients, folder
        self.events: list[Event] = []
        self.problems: list[str] = []
        self._kinds: dict[Kind, Callable[[Step, str], Awaitable[str]]] = {
            Kind.KILL: self._kill,
            Kind.PAUSE: self._pause,
            Kind.ISOLATE: self._isolate,
            Kind.BRIDGE: self._bridge,
            Kind.ONE_WAY: self._one_way,
            Kind.ROUGH_LINKS: self._rough_links,
            Kind.FULL_DISK: self._full_disk,
            Kind.SLOW_SYNC: self._slow_sync,
            Kind.FAILED_SYNC: self._failed_sync,
            Kind.CLOCK: self._clock,
            Kind.ROLLING: self._rolling,
            Kind.ROLLBACK: self._rollback,
        }

    async def make(self, step: Step) -> Event:
        """One fault, from its begin to its end."""
        await asyncio.sleep(step.calm_s)
        leader = await self._members.wait_leader(LEADER_S)
        self._members.look_for_deaths()
        others = [zone for zone in ZONES if zone != leader]
        victim = leader if step.leads and leader else others[int(step.draw * 1000) % len(others)]
        begin, made = time.monotonic(), True
        try:
            what = await self._kinds[step.kind](step, victim)
        except ToolFailed as refused:
            what, made = f"NOT MADE: {victim}: {refused}", False
        event = Event(step.kind, begin, time.monotonic(), f"{what} ({'leader' if victim == leader else 'follower'})", made)
        self.events.append(event)
        self._members.look_for_deaths()
        return event

    # ------------------------------------------------------------------ processes

    async def _kill(self, step: Step, victim: str) -> str:
        self._members.kill(victim)
        await asyncio.sleep(step.hold_s)
        self._members.start([victim])
        return f"{victim} away for {step.hold_s:.1f} s"

    async def _pause(self, step: Step, victim: str) -> str:
        with self._members.paused(victim):
            await asyncio.sleep(step.hold_s)
        return f"{victim} for {step.hold_s:.1f} s"

    async def _rolling(self, step: Step, victim: str) -> str:
        """One after the other, each ready again before the next; the victim last."""
        await self._members.wait_ready(ZONES, READY_S)  # a process that is just starting has no handler for SIGTERM yet
        for zone in [*(zone for zone in ZONES if zone != victim), victim]:
            try:
                status = await self._members.terminate(zone)
            except subprocess.TimeoutExpired:
                self.problems.append(f"{zone} did not end after SIGTERM")
                self._members.kill(zone)
            else:
                if status:
                    self.problems.append(f"{zone} ended with {status} after SIGTERM: {self._members.last_words(zone)}")
            self._members.start([zone])
            if await self._members.wait_ready([zone], READY_S):
                self.problems.append(f"{zone} was not ready {READY_S:.0f} s after a planned restart: {self._members.last_words(zone)}")
        return f"{victim} last"

    # ------------------------------------------------------------------ links

    async def _cut(self, cuts: list[tuple[str, str]], hold_s: float) -> None:
        try:
            for sender, receiver in cuts:
                self._members.place.cut(sender, receiver)
            await asyncio.sleep(hold_s)
        finally:
            self._members.place.heal()

    async def _isolate(self, step: Step, victim: str) -> str:
        others = [zone for zone in ZONES if zone != victim]
        await self._cut([pair for other in others for pair in ((victim, other), (other, victim))], step.hold_s)
        return f"{victim} for {step.hold_s:.1f} s"

    async def _bridge(self, step: Step, victim: str) -> str:
        """The victim and one other still reach the third, not each other."""
        other = _other(victim, step.draw)
        await self._cut([(victim, other), (other, victim)], step.hold_s)
        return f"{victim} and {other} apart for {step.hold_s:.1f} s"

    async def _one_way(self, step: Step, victim: str) -> str:
        others = [zone for zone in ZONES if zone != victim]
        ways = {
            "is not heard": [(victim, other) for other in others],
            "hears nothing": [(other, victim) for other in others],
            "is not heard by one": [(victim, _other(victim, step.draw))],
        }
        name, cuts = list(ways.items())[int(step.draw * 100) % len(ways)]
        await self._cut(cuts, step.hold_s)
        return f"{victim} {name} for {step.hold_s:.1f} s"

    async def _rough_links(self, step: Step, victim: str) -> str:
        delay_s, loss = 0.02 + 0.15 * step.draw, 0.02 + 0.08 * (1 - step.draw)
        try:
            self._members.place.disturb(delay_s, loss)
            await asyncio.sleep(step.hold_s)
        finally:
            self._members.place.heal()
        return f"up to {delay_s * 1000:.0f} ms, {loss:.0%} lost, for {step.hold_s:.1f} s"

    # ------------------------------------------------------------------ disks

    async def _full_disk(self, step: Step, victim: str) -> str:
        """Until somebody was refused for it, or the time is over: the room that was ready before has to be used up first."""
        refused, deadline = self._clients.counts.refused, time.monotonic() + FILL_S
        with self._flood(victim), _ballast(self._members.data(victim) / "ballast") as fill:
            while self._clients.counts.refused == refused and time.monotonic() < deadline:
                fill()  # again and again: what the member deletes is taken too
                await asyncio.sleep(POLL_S)
            self._clients.flood = ""
            fill()
            await asyncio.sleep(step.hold_s)
            now = await self._members.leader()
        if await self._members.wait_ready([victim], READY_S):
            self.problems.append(f"{victim} was not ready {READY_S:.0f} s after its disk had room: {self._members.last_words(victim)}")
        return f"{victim}, {self._clients.counts.refused - refused} refused with 507, then {now or 'nobody'} led"

    @contextlib.contextmanager
    def _flood(self, zone: str) -> Iterator[None]:
        self._clients.flood = zone
        try:
            yield
        finally:
            self._clients.flood = ""

    async def _slow_sync(self, step: Step, victim: str) -> str:
        delay_s = max(0.02, SLOWEST_SYNC_S * step.draw**2)  # mostly short, so that the member still works
        output = self._folder / f"slow-{len(self.events)}.strace"
        async with tampered(self._members.pid(victim), f"delay_enter={delay_s * 1e6:.0f}", output):
            await asyncio.sleep(step.hold_s)
        return f"{victim}, {_lines(output, SYNC_CALL)} syncs of {delay_s * 1000:.0f} ms more, for {step.hold_s:.1f} s"

    async def _failed_sync(self, step: Step, victim: str) -> str:
        """The member has to end, saying why, before it acknowledges anything that rests on that sync."""
        output = self._folder / f"failed-{len(self.events)}.strace"
        server = self._members.servers[victim]
        process, before = server.process, len(server.text())
        assert process is not None
        async with tampered(process.pid, "error=EIO", output):
            failed = await _until(SYNC_S, lambda: process.poll() is not None or _lines(output, INJECTED) > 0)
            ended = failed and await _until(DEATH_S, lambda: process.poll() is not None)
        if not failed:
            raise ToolFailed(f"it made no sync in {SYNC_S:.0f} s")
        if not ended:
            self.problems.append(f"{victim} went on {DEATH_S:.0f} s after a sync failed: {self._members.last_words(victim)}")
            self._members.kill(victim)
            status = -9
        else:
            status = server.exited()
            if status == 0 or "sync" not in server.text()[before:]:
                self.problems.append(
                    f"{victim} ended with {status} after a failed sync and did not say so: {self._members.last_words(victim)}"
                )
        await asyncio.sleep(step.hold_s)
        self._members.start([victim])
        return f"{victim} ended with {status} after {_lines(output, INJECTED)} failed syncs"

    async def _clock(self, step: Step, victim: str) -> str:
        hours = 1 if step.draw < 0.5 else -1
        self._members.set_clock(victim, hours * HOUR_S)
        await asyncio.sleep(step.hold_s)
        self._members.set_clock(victim, 0)
        return f"{victim} {hours:+d} h for {step.hold_s:.1f} s"

    # ------------------------------------------------------------------ planted

    async def _rollback(self, step: Step, victim: str) -> str:
        """Two disks are put back to what they were; together they are a majority, and what was acknowledged in between is forgotten.

        No product that needs a majority can survive this: it is here so that a run can be seen to fail.
        """
        pair = [zone for zone in ZONES if zone != victim]
        for zone in pair:
            self._members.kill(zone)
        old = {zone: self._folder / f"old-{zone}" for zone in pair}
        for zone, copy in old.items():
            shutil.copytree(self._members.data(zone), copy)
        self._members.start(pair)
        await self._members.wait_ready(ZONES, READY_S)
        await asyncio.sleep(step.hold_s)
        for zone in ZONES:
            self._members.kill(zone)
        for zone, copy in old.items():
            _replace(self._members.data(zone), copy)
        self._members.start(pair)
        await self._members.wait_ready(pair, READY_S)
        await asyncio.sleep(step.hold_s)
        self._members.start([victim])
        return f"{' and '.join(pair)} forgot {step.hold_s:.1f} s"


def _other(victim: str, draw: float) -> str:
    others = [zone for zone in ZONES if zone != victim]
    return others[int(draw * 10_000) % len(others)]


async def _until(bound_s: float, holds: Callable[[], bool]) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + bound_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


@contextlib.contextmanager
def _ballast(path: Path) -> Iterator[Callable[[], None]]:
    """A function that takes what room is left on the disk; all of it is given back at the end."""

    def fill() -> None:
        for step in (BALLAST_STEP, 4096):
            try:
                while True:
                    file.write(bytes(step))
            except OSError as full:
                if full.errno != errno.ENOSPC:
                    raise

    with path.open("wb", buffering=0) as file:
        try:
            yield fill
        finally:
            path.unlink()


def _lines(file: Path, mark: str) -> int:
    return sum(mark in line for line in file.read_text(errors="replace").splitlines()) if file.exists() else 0


def _replace(data: Path, copy: Path) -> None:
    """The content of a directory, which may be a mount, by that of a copy."""
    for entry in data.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(copy, data, dirs_exist_ok=True)
