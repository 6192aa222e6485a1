"""Frames and calls over a Unix socket, with one end misbehaving at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from node_agent.ipc import CallFailed, ConnectionLost, Link, Server, frame
from node_agent.messages import MAX_FRAME_BYTES, Acknowledge, Answering, Done, Fault, GetStatus, Json, Numbered, Push, Reply, WorkerState

STATE = WorkerState(0, 1, ())


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))


async def echo(call: Numbered) -> Reply:
    if isinstance(call, Acknowledge):
        return Answering(call.number, 0, call.deployment, "")
    return Fault(call.number, 400, "bad_request", "no")


class Ends:
    """A server and a link to it."""

    def __init__(self, path: Path, handler: Callable[[Numbered], Awaitable[Reply]] = echo, greet: Push | None = STATE) -> None:
        self.path = path
        self.server = Server(handler, lambda: greet)
        self.pushed: list[Push] = []
        self.lost = asyncio.Event()
        self.link = Link(self.pushed.append, self.lost.set)

    async def __aenter__(self) -> Ends:
        await self.server.start(self.path)
        await self.link.connect(self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.link.close()
        await self.server.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def test_calls_overlap_and_each_gets_its_own_reply(tmp_path: Path) -> None:
    async def handler(call: Numbered) -> Reply:
        assert isinstance(call, Acknowledge)
        await asyncio.sleep(0.01 if call.deployment == "slow" else 0)
        return Answering(call.number, 0, call.deployment, "")

    async def work() -> None:
        async with Ends(tmp_path / "s", handler) as ends:
            names = ["slow", "a", "b", "slow", "c"]
            replies = await asyncio.gather(*(ends.link.call(lambda n, name=name: Acknowledge(n, name), 5) for name in names))
            assert [reply.label for reply in replies] == names  # type: ignore[attr-defined]

    run(work)


def test_the_socket_is_for_this_user_only_and_replaces_a_dead_ones(tmp_path: Path) -> None:
    async def work() -> None:
        async with Ends(tmp_path / "s"):
            assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        async with Ends(tmp_path / "s") as ends:
            assert isinstance(await ends.link.call(lambda n: Acknowledge(n, "x"), 5), Answering)

    run(work)


def test_a_path_too_long_for_a_socket_address_works(tmp_path: Path) -> None:
    async def work() -> None:
        deep = tmp_path / ("d" * 100) / ("e" * 100)
        deep.mkdir(parents=True)
        async with Ends(deep / "s") as ends:
            await ends.link.call(lambda n: Acknowledge(n, "x"), 5)

    run(work)


def test_whoever_connects_is_greeted_and_told_of_changes(tmp_path: Path) -> None:
    async def work() -> None:
        async with Ends(tmp_path / "s") as ends:
            await until(lambda: len(ends.pushed) == 1)
            ends.server.push(WorkerState(0, 2, ()))
            await until(lambda: len(ends.pushed) == 2)
            assert ends.pushed == [STATE, WorkerState(0, 2, ())]

    run(work)


def test_a_fault_is_raised_with_what_it_says(tmp_path: Path) -> None:
    async def work() -> None:
        async with Ends(tmp_path / "s") as ends:
            with pytest.raises(CallFailed, match="bad_request: no"):
                await ends.link.call(GetStatus, 5)

    run(work)


def test_a_handler_that_raises_is_answered_as_a_fault_and_the_connection_goes_on(tmp_path: Path) -> None:
    async def broken(call: Numbered) -> Reply:
        if isinstance(call, GetStatus):
            raise ValueError("operation forbidden on released memoryview object")
        return Done(call.number)

    async def work() -> None:
        async with Ends(tmp_path / "s", broken) as ends:
            with pytest.raises(CallFailed, match="internal: ValueError: operation forbidden"):
                await ends.link.call(GetStatus, 5)
            assert isinstance(await ends.link.call(lambda n: Acknowledge(n, "x"), 5), Done)

    run(work)


def test_every_open_call_ends_when_the_other_process_goes(tmp_path: Path) -> None:
    async def never(call: Numbered) -> Reply:
        await asyncio.sleep(60)
        return Done(call.number)

    async def work() -> None:
        async with Ends(tmp_path / "s", never) as ends:
            calls = [asyncio.create_task(ends.link.call(GetStatus, 30)) for _ in range(3)]
            await asyncio.sleep(0.05)
            await ends.server.stop()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [ConnectionLost] * 3
            await asyncio.wait_for(ends.lost.wait(), 5)
            assert not ends.link.connected
            with pytest.raises(ConnectionLost):
                await ends.link.call(GetStatus, 5)

    run(work)


def test_a_call_that_takes_too_long_ends_and_its_late_reply_is_nobodys(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def slow(call: Numbered) -> Reply:
        await gate.wait()
        return Done(call.number)

    async def work() -> None:
        async with Ends(tmp_path / "s", slow) as ends:
            with pytest.raises(TimeoutError):
                await ends.link.call(GetStatus, 0.02)
            gate.set()
            assert await ends.link.call(GetStatus, 5) == Done(2)

    run(work)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5hello", (MAX_FRAME_BYTES + 1).to_bytes(4, "big"), frame(Done(1)), b"\0\0\0\4\x81\xa1t\xc0"],
    ids=["http", "no msgpack", "too large", "a reply", "no tag"],
)
def test_what_is_no_call_closes_the_connection_and_nothing_else(tmp_path: Path, garbage: bytes) -> None:
    async def work() -> None:
        async with Ends(tmp_path / "s", greet=None) as ends:
            reader, writer = await asyncio.open_unix_connection(ends.path)
            writer.write(garbage)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            assert isinstance(await ends.link.call(lambda n: Acknowledge(n, "x"), 5), Answering)

    run(work)


def test_an_answer_larger_than_a_frame_becomes_a_fault(tmp_path: Path) -> None:
    async def large(call: Numbered) -> Reply:
        return Json(call.number, bytes(MAX_FRAME_BYTES + 1))

    async def work() -> None:
        async with Ends(tmp_path / "s", large) as ends:
            with pytest.raises(CallFailed, match="body_too_large"):
                await ends.link.call(GetStatus, 15)

    run(work)


def test_a_server_hears_when_a_connection_has_ended(tmp_path: Path) -> None:
    async def work() -> None:
        gone: list[str] = []
        server = Server(echo, lambda: None, lambda: gone.append("gone"))
        await server.start(tmp_path / "s")
        link = Link(lambda push: None, lambda: None)
        await link.connect(tmp_path / "s")
        await link.call(lambda n: Acknowledge(n, "x"), 5)
        assert gone == []
        await link.close()
        await until(lambda: gone == ["gone"])
        await server.stop()

    run(work)
