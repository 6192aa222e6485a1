"""Links between processes on loopback that can be cut one way, slowed and broken, without any privilege.

Each member is reached through a port of the proxy. Who calls is read from /proc: the accepted connection's other end is a socket of exactly
one of the processes that the proxy was told about. A cut holds what the sender says, as a network that swallows packets does; when the cut
ends, connections that it held are closed, for what they carried is lost by then. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

CHUNK = 64 << 10
LOST_TICK_S = 0.25  # how often a lossy link decides whether it breaks
CONNECT_S = 2.0

Pids = Callable[[], Mapping[str, int]]  # of the members that run, by name


@dataclass(eq=False)
class _Link:
    """One connection that is being carried."""

    caller: str
    target: str
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None
    held: bool = False
    pumps: list[asyncio.Task[None]] = field(default_factory=list)

    def close(self) -> None:
        for pump in self.pumps:
            pump.cancel()
        for writer in (self.near, self.far):
            if writer is not None:
                writer.transport.abort()


class LinkProxy:
    """`routes` names each member's public port, where the proxy listens, and its real one."""

    def __init__(self, routes: Mapping[str, tuple[int, int]], pids: Pids, random: Random) -> None:
        self._routes, self._pids, self._random = dict(routes), pids, random
        self._servers: list[asyncio.Server] = []
        self._links: set[_Link] = set()
        self._cuts: set[tuple[str, str]] = set()  # (sender, receiver)
        self._open = asyncio.Event()  # replaced when cuts change, so that what waits looks again
        self._delay_s = self._loss = 0.0
        self._breaker: asyncio.Task[None] | None = None
        self.carried = 0  # bytes
        self.broken = 0  # connections closed by loss

    async def start(self) -> None:
        for target, (port, _) in self._routes.items():
            self._servers.append(await asyncio.start_server(self._accepting(target), "127.0.0.1", port))
        self._breaker = asyncio.create_task(self._break_some())

    async def close(self) -> None:
        if self._breaker is not None:
            self._breaker.cancel()
        for server in self._servers:
            server.close()
        for link in list(self._links):
            link.close()
        for server in self._servers:
            await server.wait_closed()

    def cut(self, sender: str, receiver: str) -> None:
        """Nothing that `sender` says reaches `receiver` any more; the other direction is left as it is."""
        self._cuts.add((sender, receiver))

    def disturb(self, delay_s: float, loss: float) -> None:
        """Hold every chunk up to `delay_s`, and close each connection with probability `loss` per LOST_TICK_S."""
        self._delay_s, self._loss = delay_s, loss

    def heal(self) -> None:
        self._cuts.clear()
        self._delay_s = self._loss = 0.0
        for link in [link for link in self._links if link.held]:
            self._drop(link)
        self._open.set()
        self._open = asyncio.Event()

    def _accepting(self, target: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            caller = self._who(writer.get_extra_info("peername")[1], self._routes[target][0])
            link = _Link(caller, target, writer)
            self._links.add(link)
            link.pumps.append(asyncio.create_task(self._carry(link, reader)))

        return accept

    def _who(self, port: int, to_port: int) -> str:
        """The member whose socket the connection's other end is, "" when it is none of theirs (or gone already)."""
        inode = _inode(port, to_port)
        for name, pid in self._pids().items():
            if inode and inode in _sockets(pid):
                return name
        return ""

    async def _carry(self, link: _Link, reader: asyncio.StreamReader) -> None:
        """The life of a connection: reach the target once the way there is free, then pump both directions until one ends."""
        try:
            await self._passable(link, link.caller, link.target)
            far_reader, far = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self._routes[link.target][1]), CONNECT_S)
            link.far = far
            back = asyncio.create_task(self._pump(link, far_reader, link.near, (link.target, link.caller)))
            link.pumps.append(back)
            back.add_done_callback(lambda _: self._drop(link))
            await self._pump(link, reader, far, (link.caller, link.target))
        except (OSError, TimeoutError):
            pass
        finally:
            self._drop(link)

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: tuple[str, str]) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._random.uniform(0, self._delay_s))
                await self._passable(link, *way)
                self.carried += len(data)
                writer.write(data)
                await writer.drain()

    async def _passable(self, link: _Link, sender: str, receiver: str) -> None:
        while (sender, receiver) in self._cuts:
            link.held = True
            await self._open.wait()

    async def _break_some(self) -> None:
        while True:
            await asyncio.sleep(LOST_TICK_S)
            for link in list(self._links):
                if self._loss and self._random.random() < self._loss:
                    self.broken += 1
                    self._drop(link)

    def _drop(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            link.close()


def _inode(port: int, to_port: int) -> str:
    """The socket from 127.0.0.1:port to 127.0.0.1:to_port, as /proc/net/tcp lists it."""
    ends = [f"0100007F:{port:04X}", f"0100007F:{to_port:04X}"]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends:
            return fields[9]
    return ""


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds; none when it is gone."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)  # noqa: PTH115 - one call per descriptor, often
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found
