"""The three members: made by `raftmeta init`, started where the place says, observed over HTTP, and handled by process id.

The cluster is a day old by its certificates, so that a wall clock that is set back an hour does not stand before they begin. Journal
segments are as small as they may be, so that a disk fills, and a snapshot is due, within a short run.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import signal
import ssl
import struct
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from raftmeta.cli.init import InitResult, init_cluster
from tests.cluster.nemesis.places import ZONES, Place
from tests.support.real_cluster import Server

AGE = dt.timedelta(days=1)
LOOK_S = 1.5  # for one look at a member; a stopped one does not answer
POLL_S = 0.1
STOP_S = 20.0  # from SIGTERM to the end of the process
COMPLAINTS = ("set_aside", "Traceback", "a request failed")
SETTINGS = {
    "RAFTMETA_LIMITS__SEGMENT_BYTES": str(16 << 20),
    "RAFTMETA_LIMITS__SNAPSHOT_JOURNAL_BYTES": str(32 << 20),
}


class Members:
    """`shim`: a library that shifts a member's wall clock, None where there is none."""

    def __init__(self, folder: Path, place: Place, shim: Path | None) -> None:
        self.place, self._shim = place, shim
        self.made: InitResult = init_cluster(folder / "cluster", ZONES, place.options, dt.datetime.now(dt.UTC) - AGE)
        self.urls = dict(zip(ZONES, self.made.urls, strict=True))
        client = tomllib.loads(self.made.client.read_text())
        self.authority = self.made.directory / client["ca_file"]
        self.token = (self.made.directory / client["token_file"]).read_text().strip()
        context = ssl.create_default_context(cafile=str(self.authority))
        self._http = httpx.AsyncClient(verify=context, headers={"Authorization": f"Bearer {self.token}"}, timeout=LOOK_S, trust_env=False)
        self.logs = folder / "logs"
        self.logs.mkdir()
        self._clocks = folder / "clocks"
        self._clocks.mkdir()
        self.servers: dict[str, Server] = {}
        for zone, file in zip(ZONES, self.made.servers, strict=True):
            self.set_clock(zone, 0)
            self.servers[zone] = Server(["--config", str(file)], self.logs / f"{zone}.log", self._prefix(zone))
        self.ended: list[str] = []  # of processes that ended although nobody ended them

    def _prefix(self, zone: str) -> list[str]:
        settings = dict(SETTINGS)
        if self._shim is not None:
            settings |= {"LD_PRELOAD": str(self._shim), "NEMESIS_CLOCK": str(self._clocks / zone)}
        return [*self.place.command(zone), "env", *(f"{name}={value}" for name, value in settings.items())]

    # ------------------------------------------------------------------ processes

    def start(self, zones: Sequence[str] = ZONES) -> None:
        for zone in zones:
            self.servers[zone].start()

    def kill(self, zone: str) -> None:
        self.servers[zone].kill()

    async def terminate(self, zone: str) -> int:
        """SIGTERM; the exit status. Raises subprocess.TimeoutExpired."""
        return await asyncio.to_thread(self.servers[zone].terminate, STOP_S)

    @contextlib.contextmanager
    def paused(self, zone: str) -> Iterator[None]:
        """SIGSTOP inside, SIGCONT behind it."""
        pid = self.pid(zone)
        os.killpg(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGCONT)

    def pid(self, zone: str) -> int:
        process = self.servers[zone].process
        assert process is not None, f"{zone} is not running"
        return process.pid

    def pids(self) -> dict[str, int]:
        return {zone: server.process.pid for zone, server in self.servers.items() if server.process is not None}

    def running(self) -> list[str]:
        return list(self.pids())

    def look_for_deaths(self, expected: str = "") -> None:
        """Take note of members whose process ended by itself, and start them again; `expected` may be down."""
        for zone, server in self.servers.items():
            if zone == expected or server.process is None or server.process.poll() is None:
                continue
            self.ended.append(f"{zone} ended by itself with status {server.process.returncode}: {self.last_words(zone)}")
            server.process = None
            server.start()

    def last_words(self, zone: str) -> str:
        return " | ".join(self.servers[zone].text().splitlines()[-3:])[-600:]

    def complaints(self) -> list[str]:
        """What a healthy member never says: it was set aside although nobody damaged it, or something unexpected was raised."""
        return [
            f"{zone} says: {line[:300]}"
            for zone, server in self.servers.items()
            for line in server.text().splitlines()
            if any(word in line for word in COMPLAINTS)
        ]

    def end_all(self) -> None:
        for server in self.servers.values():
            if server.process is not None:
                server.kill()

    # ------------------------------------------------------------------ clocks and disks

    def set_clock(self, zone: str, offset_s: int) -> None:
        """Written in place: the member has the file mapped."""
        with (self._clocks / zone).open("r+b" if (self._clocks / zone).exists() else "w+b") as file:
            file.write(struct.pack("=q", offset_s))

    def data(self, zone: str) -> Path:
        return self.made.servers[ZONES.index(zone)].parent / "data"

    # ------------------------------------------------------------------ looks

    async def look(self, zone: str, consistency: str = "stale") -> dict[str, Any] | None:
        """GET /v1/cluster of one member; None when it does not answer for good."""
        try:
            answer = await self._http.get(f"{self.urls[zone]}/v1/cluster", params={"consistency": consistency})
        except httpx.HTTPError:
            return None
        return dict(answer.json()) if answer.status_code == 200 else None

    async def leader(self) -> str:
        """Who says that it leads in the highest term, "" when nobody does."""
        looks = await asyncio.gather(*(self.look(zone) for zone in self.running()))
        leading = [look for look in looks if look is not None and look["role"] == "leader"]
        return str(max(leading, key=lambda look: int(look["term"]))["member_id"]) if leading else ""

    async def wait_leader(self, bound_s: float) -> str:
        deadline = time.monotonic() + bound_s
        while not (found := await self.leader()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return found

    async def wait_ready(self, zones: Sequence[str], bound_s: float) -> list[str]:
        """Those that are still not ready after a bounded time."""
        waiting, deadline = list(zones), time.monotonic() + bound_s
        while waiting and time.monotonic() < deadline:
            if await self._ready(waiting[0]):
                waiting.pop(0)
            else:
                await asyncio.sleep(POLL_S)
        return waiting

    async def _ready(self, zone: str) -> bool:
        try:
            return (await self._http.get(f"{self.urls[zone]}/readyz")).status_code == 200
        except httpx.HTTPError:
            return False

    async def converged(self, bound_s: float) -> tuple[int, str] | str:
        """The revision and state hash that all members show together, or what they showed last."""
        deadline = time.monotonic() + bound_s
        while True:
            looks = {zone: await self.look(zone) for zone in ZONES}
            shown = {zone: (look["revision"], look["state_hash"]) if look else None for zone, look in looks.items()}
            first, *others = shown.values()
            if first is not None and all(other == first for other in others):
                return first
            if time.monotonic() > deadline:
                return "; ".join(f"{zone}: {_told(found)}" for zone, found in shown.items())
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        self.end_all()
        await self._http.aclose()


def _told(found: tuple[int, str] | None) -> str:
    return "no answer" if found is None else f"revision {found[0]}, state {found[1][:12]}"
