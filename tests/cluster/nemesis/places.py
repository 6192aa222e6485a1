"""Where the members run, and how the links between them are cut.

`Namespaces`: this process lives in network, mount and pid namespaces of its own (see `inside`), is the router between the members, and
cuts a direction with a blackhole rule. Everything that it makes is gone with its last process, whatever ends it, and no packet can leave.
`Loopback` needs no privilege: the members dial each other through a proxy. Clients reach every member in both, also one that is cut off.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from raftmeta.cli.init import LOCAL_HOST, PEER_OFFSET, InitOptions, InitResult
from tests.cluster.nemesis.plan import Kind
from tests.support.link_proxy import LinkProxy

ZONES = ("a", "b", "c")
DISK_MB = 192  # of a member's tmpfs: six segments of 16 MiB, two snapshots, and half as much again
NETWORK = "198.18"  # set aside for tests between networks (RFC 2544); exists inside the namespaces only
CUT_PRIORITY = 100
LISTEN_OFFSET = 200  # of the ports that only the proxy knows, above those of the API
COMMAND_S = 20.0
LEASH = ("setpriv", "--pdeathsig", "KILL")  # a process that ends with the one that started it


class Place(Protocol):
    name: str
    options: InitOptions
    unable: dict[Kind, str]  # faults that cannot be made here, with the reason

    async def open(self, made: InitResult, pids: Callable[[], Mapping[str, int]]) -> None: ...
    def command(self, zone: str) -> list[str]:
        """What stands before a member's own command."""

    def cut(self, sender: str, receiver: str) -> None: ...
    def disturb(self, delay_s: float, loss: float) -> None: ...
    def heal(self) -> None: ...
    async def close(self) -> None: ...


def obstacle() -> str:
    """Why namespaces cannot be had, "" when they can."""
    missing = [tool for tool in ("unshare", "setpriv", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    probe = [*_unshare(), "sh", "-c", "ip link add nemesis0 type veth peer name nemesis1 && ip rule add blackhole priority 1"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=COMMAND_S)
    return tried.stderr.strip()[:200] or "namespaces are refused" if tried.returncode else ""


def inside(module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a module of ours as the first process of fresh namespaces; killing it kills everything in them."""
    return [*_unshare(), sys.executable, "-m", module, *arguments]


def _unshare() -> list[str]:
    unprivileged = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [*LEASH, "unshare", *unprivileged, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Namespaces:
    """One namespace per member, joined by this process as their router: 198.18.N.1 here, 198.18.N.2 there."""

    name = "network namespaces"

    def __init__(self) -> None:
        self.options = InitOptions(hosts=tuple(address(zone) for zone in ZONES))
        self.unable: dict[Kind, str] = {}
        self._cuts: list[tuple[str, str]] = []
        self._disks: list[Path] = []
        self._rough = False

    async def open(self, made: InitResult, pids: Callable[[], Mapping[str, int]]) -> None:
        self.join()
        for zone, file in zip(ZONES, made.servers, strict=True):
            _small_disk(file.parent / "data", f"nemesis-{zone}")
            self._disks.append(file.parent / "data")
        self.unable |= self._without_netem()

    def join(self) -> None:
        """Make the members' namespaces and the links between them."""
        run("mount", "-t", "tmpfs", "nemesis-run", "/run")  # where `ip netns` keeps its names: ours alone in this mount namespace
        run("ip", "link", "set", "lo", "up")
        for zone in ZONES:
            self._join(zone)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def command(self, zone: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{zone}"]

    def cut(self, sender: str, receiver: str) -> None:
        self._rule("add", sender, receiver)
        self._cuts.append((sender, receiver))

    def disturb(self, delay_s: float, loss: float) -> None:
        for zone in ZONES:
            netem = ("netem", "delay", f"{delay_s / 2 * 1000:.0f}ms", f"{delay_s / 2 * 1000:.0f}ms", "loss", f"{loss * 100:.1f}%")
            run("tc", "qdisc", "replace", "dev", f"to-{zone}", "root", *netem)
        self._rough = True

    def heal(self) -> None:
        while self._cuts:
            self._rule("del", *self._cuts.pop())
        if self._rough:
            self._rough = False
            for zone in ZONES:
                run("tc", "qdisc", "del", "dev", f"to-{zone}", "root")

    async def close(self) -> None:
        """The namespaces end with this process; the disks go now, so that the folder that they stand in can be removed."""
        for disk in self._disks:
            run("umount", "--lazy", str(disk))

    def _join(self, zone: str) -> None:
        number = ZONES.index(zone)
        run("ip", "netns", "add", zone)
        run("ip", "link", "add", f"to-{zone}", "type", "veth", "peer", "name", "eth0", "netns", zone)
        run("ip", "addr", "add", f"{NETWORK}.{number}.1/24", "dev", f"to-{zone}")
        run("ip", "link", "set", f"to-{zone}", "up")
        run("ip", "-n", zone, "addr", "add", f"{address(zone)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", zone, "link", "set", device, "up")
        run("ip", "-n", zone, "route", "add", "default", "via", f"{NETWORK}.{number}.1")

    def _rule(self, what: str, sender: str, receiver: str) -> None:
        """A blackhole swallows: neither end is told, as in a network that lost its way."""
        run("ip", "rule", what, "from", address(sender), "to", address(receiver), "blackhole", "priority", str(CUT_PRIORITY))

    def _without_netem(self) -> dict[Kind, str]:
        if shutil.which("tc") is None:
            return {Kind.ROUGH_LINKS: "tc is not installed"}
        try:
            self.disturb(0.01, 0.0)
        except OSError as refused:
            return {Kind.ROUGH_LINKS: f"tc netem is not to be had: {refused}"}
        self.heal()
        return {}


class Loopback:
    """Everything on 127.0.0.1; what the members advertise is the proxy's port, and what they listen on is only known to it."""

    name = "a link proxy on loopback"

    def __init__(self, seed: int) -> None:
        base = _free_base()
        self.options = InitOptions(base_port=base)
        self.unable = {Kind.FULL_DISK: "a small tmpfs needs a mount namespace, and this place does without privileges"}
        self._random = Random(f"links {seed}")
        self._listen = {zone: base + LISTEN_OFFSET + number for number, zone in enumerate(ZONES)}
        self.proxy: LinkProxy | None = None

    async def open(self, made: InitResult, pids: Callable[[], Mapping[str, int]]) -> None:
        routes = {zone: (_peer_port(file), self._listen[zone]) for zone, file in zip(ZONES, made.servers, strict=True)}
        self.proxy = LinkProxy(routes, pids, self._random)
        await self.proxy.start()

    def command(self, zone: str) -> list[str]:
        """With a run that is killed its members are killed too, where the machine can do that."""
        return [*(LEASH if shutil.which(LEASH[0]) else ()), "env", f"RAFTMETA_PEER__LISTEN=127.0.0.1:{self._listen[zone]}"]

    def cut(self, sender: str, receiver: str) -> None:
        assert self.proxy is not None
        self.proxy.cut(sender, receiver)

    def disturb(self, delay_s: float, loss: float) -> None:
        assert self.proxy is not None
        self.proxy.disturb(delay_s, loss)

    def heal(self) -> None:
        assert self.proxy is not None
        self.proxy.heal()

    async def close(self) -> None:
        if self.proxy is not None:
            await self.proxy.close()


def run(*command: str) -> None:
    """A tool that must succeed. Raises OSError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[:300]}")


def _free_base() -> int:
    """A port from which on those of a cluster are free, below the range from which the kernel takes ports for outgoing connections."""
    for _ in range(100):
        base = 10_000 + secrets.randbelow(20_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for offset in (0, PEER_OFFSET, LISTEN_OFFSET):
                for number in range(len(ZONES)):
                    held.enter_context(socket.create_server((LOCAL_HOST, base + offset + number)))
            return base
    raise OSError(f"no {3 * len(ZONES)} free ports between 10000 and 30000 on {LOCAL_HOST}")


def address(zone: str) -> str:
    return f"{NETWORK}.{ZONES.index(zone)}.2"


def _small_disk(data: Path, name: str) -> None:
    """Put a small tmpfs in place of a directory, with what it held."""
    held = {file.name: file.read_bytes() for file in data.iterdir()}
    run("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700", name, str(data))
    for file, content in held.items():
        (data / file).write_bytes(content)


def _peer_port(server: Path) -> int:
    return int(tomllib.loads(server.read_text())["peer"]["advertise"].rpartition(":")[2])
