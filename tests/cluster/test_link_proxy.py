"""The proxy that stands between members where there are no namespaces does what the faults ask of it, one way at a time."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

import pytest

from raftmeta.cli.init import free_ports
from tests.support.link_proxy import LinkProxy

WAIT_S = 10.0
SHORT_S = 0.2  # a held message stays away at least so long

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Scene:
    """A connection from member a, which is this process, to member b behind the proxy."""

    proxy: LinkProxy
    near: Ends  # a's
    far: Ends  # b's
    arrived: asyncio.Queue[Ends]  # further connections that reached b


def pair(body: Callable[[Scene], Awaitable[None]]) -> None:

    async def run() -> None:
        public, real = free_ports(2)
        arrived: asyncio.Queue[Ends] = asyncio.Queue()
        server = await asyncio.start_server(lambda reader, writer: arrived.put_nowait((reader, writer)), "127.0.0.1", real)
        proxy = LinkProxy({"b": (public, real)}, lambda: {"a": os.getpid()}, Random(1))
        await proxy.start()
        try:
            near = await asyncio.open_connection("127.0.0.1", public)
            far = await asyncio.wait_for(arrived.get(), WAIT_S)
            await body(Scene(proxy, near, far, arrived))
            near[1].close()
            far[1].close()
        finally:
            await proxy.close()
            server.close()

    asyncio.run(run())


async def heard(end: Ends, seconds: float = WAIT_S) -> bytes:
    """What arrives in time: some bytes, b"" for the end of the connection, b"nothing"."""
    try:
        return await asyncio.wait_for(end[0].read(100), seconds)
    except TimeoutError:
        return b"nothing"
    except ConnectionResetError:
        return b""


def test_what_one_says_the_other_hears() -> None:
    async def body(scene: Scene) -> None:
        scene.near[1].write(b"ping")
        assert await heard(scene.far) == b"ping"
        scene.far[1].write(b"pong")
        assert await heard(scene.near) == b"pong"
        assert scene.proxy.carried == 8

    pair(body)


@pytest.mark.parametrize("cut", ["caller", "called"])
def test_a_cut_direction_is_silent_and_the_other_is_not_and_healing_ends_the_connection(cut: str) -> None:
    async def body(scene: Scene) -> None:
        scene.proxy.cut(*(("a", "b") if cut == "caller" else ("b", "a")))
        muted, other = (scene.near, scene.far) if cut == "caller" else (scene.far, scene.near)
        muted[1].write(b"unheard")
        other[1].write(b"heard")
        assert await heard(muted) == b"heard"
        assert await heard(other, SHORT_S) == b"nothing"
        scene.proxy.heal()
        assert await heard(other) == b""  # as lost, not late

    pair(body)


def test_nobody_who_is_cut_off_is_connected_before_the_cut_ends() -> None:
    async def body(scene: Scene) -> None:
        scene.proxy.cut("a", "b")
        port = scene.near[1].get_extra_info("peername")[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        assert await heard((reader, writer), SHORT_S) == b"nothing"
        assert scene.arrived.empty()
        scene.proxy.heal()
        assert await heard((reader, writer)) == b""
        writer.close()

    pair(body)


def test_a_cut_between_others_is_not_felt() -> None:
    async def body(scene: Scene) -> None:
        scene.proxy.cut("c", "b")
        scene.near[1].write(b"ping")
        assert await heard(scene.far) == b"ping"

    pair(body)


def test_a_link_that_loses_everything_is_closed() -> None:
    async def body(scene: Scene) -> None:
        scene.proxy.disturb(0.0, 1.0)
        assert await heard(scene.far) == b""
        assert await heard(scene.near) == b""
        assert scene.proxy.broken == 1

    pair(body)


def test_a_caller_is_known_as_the_member_whose_socket_it_has() -> None:
    async def body(scene: Scene) -> None:
        scene.proxy.cut("", "b")  # of nobody's sockets, for this process is member a
        scene.near[1].write(b"ping")
        assert await heard(scene.far) == b"ping"

    pair(body)


def test_ports_are_given_back() -> None:
    ports: list[int] = []

    async def body(scene: Scene) -> None:
        ports.append(scene.near[1].get_extra_info("peername")[1])

    pair(body)
    with socket.create_server(("127.0.0.1", ports[0])):
        pass
