"""`python -m tests.cluster.nemesis --minutes N --seed S [--faults kill,pause,...] [--place namespaces|loopback]`

Starts three members, lets clients work, makes one fault after the other, heals, and judges. The exit status is 0 when every promise was
kept, 1 when one was broken (logs and history are kept then), 2 when the run could not begin. Each chosen fault that the machine can make
happens at least once, however short the run.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.cluster.nemesis import places
from tests.cluster.nemesis.clients import CLIENTS, Clients
from tests.cluster.nemesis.faults import Faults
from tests.cluster.nemesis.members import Members
from tests.cluster.nemesis.plan import ORDINARY, Kind, steps
from tests.cluster.nemesis.tools import clock_shim, unable_to_trace
from tests.cluster.nemesis.verdict import judge, longest_gaps, missing_writes

START_S = 30.0
CONVERGE_S = 40.0
HEALED_S = 1.0  # clients go on for a moment after the last fault, so that they meet the healed cluster
MAX_TOLD = 30  # violations
INSIDE = "--inside-namespaces"  # given to the run by itself only


class CannotBegin(Exception):
    """There is no cluster to harm."""


class Options(msgspec.Struct, frozen=True):
    seconds: float
    seed: int
    kinds: tuple[Kind, ...]
    folder: Path


def main(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    if not chosen.inside and chosen.place != "loopback":
        why = places.obstacle()
        if not why:
            return _wait(places.inside("tests.cluster.nemesis", [*arguments, f"--seed={chosen.seed}", INSIDE]))
        print(f"NOT DONE HERE: network namespaces: {why}")
        if chosen.place == "namespaces":
            return 2
    place: places.Place = places.Namespaces() if chosen.inside else places.Loopback(chosen.seed)
    signal.signal(signal.SIGTERM, _interrupted)  # pid 1 of a namespace has no default for it
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="raftmeta-nemesis-"))
    folder.mkdir(parents=True, exist_ok=True)
    held = False
    try:
        held = asyncio.run(Run(Options(chosen.minutes * 60, chosen.seed, chosen.faults, folder), place).run())
    except CannotBegin as refused:
        print(refused)
        return 2
    finally:
        if held and chosen.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"logs and history are kept in {folder}")
    return 0 if held else 1


def _wait(command: Sequence[str]) -> int:
    """The exit status of the run inside. `unshare` blocks SIGTERM, so this process takes it; Ctrl-C reaches the run by itself."""
    process = subprocess.Popen(command)

    def end(number: int, frame: object) -> None:
        print("ended by SIGTERM", flush=True)
        process.kill()

    signal.signal(signal.SIGTERM, end)
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            continue
        return status if status >= 0 else 128 - status


class Run:
    def __init__(self, options: Options, place: places.Place) -> None:
        self._options, self._place = options, place
        self._violations: list[str] = []
        self._began = time.monotonic()

    async def run(self) -> bool:
        """Whether every promise was kept."""
        options = self._options
        shim = clock_shim(options.folder) if Kind.CLOCK in options.kinds else None
        members = Members(options.folder, self._place, shim if isinstance(shim, Path) else None)
        try:
            await self._place.open(members.made, members.pids)
            kinds = self._possible(await unable_to_trace(options.folder), shim if isinstance(shim, str) else "")
            members.start()
            if late := await members.wait_ready(list(places.ZONES), START_S):
                raise CannotBegin(f"{', '.join(late)} did not get ready: {members.last_words(late[0])}")
            clients = Clients(members, options.seed)
            try:
                await self._storm(members, clients, kinds)
            finally:
                await clients.close()
        finally:
            await members.close()
            await self._place.close()
        return not self._violations

    def _possible(self, untraceable: dict[Kind, str], no_clock: str) -> list[Kind]:
        unable = {**self._place.unable, **untraceable} | ({Kind.CLOCK: no_clock} if no_clock else {})
        print(f"seed {self._options.seed}, {self._options.seconds:.0f} s of faults, three members in {self._place.name}, {CLIENTS} clients")
        for kind in self._options.kinds:
            if kind in unable:
                print(f"NOT DONE HERE: {kind}: {unable[kind]}")
        return [kind for kind in self._options.kinds if kind not in unable]

    async def _storm(self, members: Members, clients: Clients, kinds: list[Kind]) -> None:
        await clients.prepare()
        faults = Faults(members, clients, self._options.folder)
        working = asyncio.create_task(clients.run())
        try:
            await self._make(faults, kinds)
        finally:
            self._place.heal()
            clients.stop()
            await working
        ended = time.monotonic()
        await self._check(members, clients, faults)
        self._tell(clients, faults, ended)
        _keep(self._options.folder, clients, faults)
        if self._violations:
            _keep_data(self._options.folder, members)

    async def _make(self, faults: Faults, kinds: list[Kind]) -> None:
        deadline = time.monotonic() + self._options.seconds
        for made, step in enumerate(steps(self._options.seed, self._options.seconds, kinds) if kinds else ()):
            if made >= len(kinds) and time.monotonic() >= deadline:
                break
            event = await faults.make(step)
            print(f"{event.begin - self._began:7.1f} s  {event.kind:16} {event.what}", flush=True)
        await asyncio.sleep(HEALED_S)

    # ------------------------------------------------------------------ afterwards

    async def _check(self, members: Members, clients: Clients, faults: Faults) -> None:
        found = await members.converged(CONVERGE_S)
        members.look_for_deaths()
        if isinstance(found, str):
            self._violations.append(f"the members do not agree {CONVERGE_S:.0f} s after the last fault: {found}")
        else:
            print(f"all members are at revision {found[0]} with state {found[1][:12]}")
        shown, unread = await clients.read_everything()
        missing = [*missing_writes(clients.history, shown), *await clients.missing_versions()]
        judged = judge(clients.history)
        self._violations += [*judged.violations, *(f"lost: {what}" for what in missing), *unread]
        self._violations += [*faults.problems, *members.ended, *members.complaints(), *clients.problems]
        print(f"acknowledged writes: {len(clients.acknowledged)}, missing: {len(missing)}")
        verdict = "refused" if judged.violations else "accepted"
        print(
            f"history of {len(clients.history)} operations {verdict}: by revision, and {judged.searched} registers by search"
            + (f" ({judged.too_large} more were too much for it)" if judged.too_large else "")
        )

    def _tell(self, clients: Clients, faults: Faults, ended: float) -> None:
        counts, times = clients.counts, Counter(event.kind for event in faults.events if event.made)
        print(
            f"{counts.written} writes acknowledged, {counts.read} reads answered, {counts.failed_writes} writes not applied, "
            f"{counts.failed_reads} reads failed, {counts.unknown} writes unknown, {counts.refused} times 507"
        )
        print(f"{'fault':18}{'times':>7}{'longest write gap':>20}")
        for kind, gap in sorted(longest_gaps(clients.acknowledged, faults.events, ended).items()):
            print(f"{kind:18}{times[kind]:>7}{gap:>18.2f} s")
        for violation in self._violations[:MAX_TOLD]:
            print(f"VIOLATED: {violation}")
        if len(self._violations) > MAX_TOLD:
            print(f"VIOLATED: {len(self._violations) - MAX_TOLD} more")
        print(f"{'FAILED' if self._violations else 'held'}: seed {self._options.seed}, {time.monotonic() - self._began:.0f} s in all")


def _keep(folder: Path, clients: Clients, faults: Faults) -> None:
    encode = msgspec.json.encode
    (folder / "history.jsonl").write_bytes(b"".join(encode(operation) + b"\n" for operation in clients.history))
    (folder / "faults.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in faults.events))


def _keep_data(folder: Path, members: Members) -> None:
    """The members' directories, which may stand on a tmpfs that goes with this process."""
    members.end_all()
    for zone in places.ZONES:
        shutil.copytree(members.data(zone), folder / f"data-{zone}", ignore=shutil.ignore_patterns("spare-*"), dirs_exist_ok=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.nemesis", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--faults", type=_kinds, default=ORDINARY, help=f"of {', '.join(Kind)}; all but the last by default")
    parser.add_argument("--place", choices=("auto", "namespaces", "loopback"), default="auto")
    parser.add_argument(
        "--folder", type=Path, default=None, help="of logs and history, kept in any case; else a temporary one, kept on failure"
    )
    parser.add_argument(INSIDE, dest="inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _kinds(text: str) -> tuple[Kind, ...]:
    return tuple(Kind(name) for name in text.split(",") if name)


def _interrupted(number: int, frame: object) -> None:
    print("ended by SIGTERM", flush=True)
    raise SystemExit(128 + number)
