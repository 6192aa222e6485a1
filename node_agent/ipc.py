"""Frames and calls between the processes of one agent, over Unix sockets.

A frame is a big-endian u32 length and that many bytes of msgpack. Messages are a closed tagged union (`messages`); anything else closes
the connection. Every caller numbers its calls; replies carry the number, so calls may overlap. When a connection ends, each call that
waits on it ends with `ConnectionLost`, and its caller decides whether to repeat it. Frames, and calls per connection, are bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from node_agent.messages import MAX_FRAME_BYTES, Fault, Message, Numbered, Push, Reply, decode, encode
from node_agent.runtime import log

MAX_CALLS = 1024  # open calls on one connection
STOP_S = 1.0  # for the connections of a server that stops to end
_HEAD = 4


class ConnectionLost(Exception):
    """The other process went away, or sent what is no message."""


class CallFailed(Exception):
    """The other process answered with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.code}: {fault.detail}")
        self.fault = fault


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next message, None at a clean end. Raises ConnectionLost for a cut, oversized or undecodable frame."""
    try:
        head = await reader.readexactly(_HEAD)
        size = int.from_bytes(head, "big")
        if size > MAX_FRAME_BYTES:
            raise ConnectionLost(f"a frame of {size} bytes, the limit is {MAX_FRAME_BYTES}")
        return decode(await reader.readexactly(size))
    except asyncio.IncompleteReadError as cause:
        if not cause.partial and cause.expected == _HEAD:
            return None
        raise ConnectionLost("the connection ended inside a frame") from cause
    except OSError as cause:
        raise ConnectionLost(f"the connection broke: {cause}") from cause
    except msgspec.MsgspecError as cause:
        raise ConnectionLost(f"a frame that is no message: {cause}") from cause


def frame(message: Message) -> bytes:
    """The bytes that carry a message. Raises ValueError when it exceeds a frame."""
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_HEAD, "big") + body


class Link:
    """The calling end. `on_push` gets what the other side says unasked, `on_lost` is called once when the connection ends."""

    def __init__(self, on_push: Callable[[Push], None], on_lost: Callable[[], None]) -> None:
        self._on_push = on_push
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def outstanding(self) -> int:
        return len(self._waiting)

    async def connect(self, path: Path) -> None:
        """Raises OSError when nobody listens."""
        with _short(path) as short:
            reader, self._writer = await asyncio.open_unix_connection(short)
        self._task = asyncio.create_task(self._read(reader))

    async def call(self, make: Callable[[int], Numbered], timeout_s: float) -> Reply:
        """Raises ConnectionLost, CallFailed, TimeoutError, or ValueError for a call that exceeds a frame."""
        if self._writer is None:
            raise ConnectionLost("not connected")
        if len(self._waiting) >= MAX_CALLS:
            raise ConnectionLost(f"{MAX_CALLS} calls are open on this connection")
        number = next(self._numbers)
        data = frame(make(number))
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(data)
                with suppress(ConnectionError):  # the reader ends the call
                    await self._writer.drain()
                reply = await future
        finally:
            self._waiting.pop(number, None)
        if isinstance(reply, Fault):
            raise CallFailed(reply)
        return reply

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await read_message(reader)) is not None:
                if isinstance(message, Push):
                    self._on_push(message)
                elif isinstance(message, Reply):
                    future = self._waiting.get(message.number)
                    if future is not None and not future.done():
                        future.set_result(message)
        except ConnectionLost:
            pass
        finally:
            self._end()

    def _end(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionLost("the connection ended before the reply"))
        self._on_lost()


Handler = Callable[[Numbered], Awaitable[Reply]]


class Server:
    """The answering end: every call runs `handler` in its own task; `push` reaches all who are connected."""

    def __init__(self, handler: Handler, greet: Callable[[], Push | None], gone: Callable[[], None] = lambda: None) -> None:
        """`greet`: what a caller is told on connecting; `gone`: called when a connection has ended."""
        self._handler = handler
        self._gone = gone
        self._greet = greet
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._answering: dict[asyncio.Task[None], Numbered] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        """Listen on a socket that only this user may use; one that a dead process left is replaced."""
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                path.unlink()
        with _short(path) as short:
            self._server = await asyncio.start_unix_server(self._serve, short)
        path.chmod(0o600)

    async def finish(self) -> None:
        """Until every call that came so far is answered, and the answer is on its way."""
        while self._answering:
            await asyncio.wait(self._answering)

    async def answered(self, call: Numbered, limit_s: float) -> None:
        """Until the answer to this call is on its way, or the limit."""
        tasks = [task for task, asked in self._answering.items() if asked is call]
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=STOP_S)  # they see the end of their connections

    def push(self, message: Push) -> None:
        data = frame(message)
        for writer in tuple(self._writers):
            if writer.transport.get_write_buffer_size() > MAX_FRAME_BYTES:
                writer.transport.abort()  # a reader that stands still must not grow our memory
            else:
                writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        self._writers.add(writer)
        tasks: set[asyncio.Task[None]] = set()
        try:
            greeting = self._greet()
            if greeting is not None:
                writer.write(frame(greeting))
            while (message := await read_message(reader)) is not None:
                if not isinstance(message, Numbered) or len(tasks) >= MAX_CALLS:
                    break
                task = asyncio.create_task(self._answer(message, writer))
                self._answering[task] = message
                task.add_done_callback(self._answering.pop)
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except ConnectionLost:
            pass
        finally:
            self._writers.discard(writer)
            for task in tasks:
                task.cancel()
            writer.close()
            self._gone()

    async def _answer(self, call: Numbered, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await self._handler(call)
        except Exception as cause:  # noqa: BLE001 - the outermost frame of a call: its caller must not wait for nothing
            log.error("call_failed", call=type(call).__name__, exc_info=True)
            reply = Fault(number=call.number, status=500, code="internal", detail=f"{type(cause).__name__}: {cause}"[:1000])
        try:
            data = frame(reply)
        except ValueError as cause:
            data = frame(Fault(number=call.number, status=413, code="body_too_large", detail=f"the answer is {cause}"))
        if not writer.is_closing():
            writer.write(data)
            with suppress(ConnectionError):
                await writer.drain()


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the same place that fits into the 107 bytes of a socket address, however deep the directory lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
