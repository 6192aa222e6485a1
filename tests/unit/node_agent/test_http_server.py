"""The front's listener over real sockets: TLS, clients that misbehave, and an orderly end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from node_agent import http_server
from node_agent.config import AgentConfig
from node_agent.http_server import ReadLimits
from node_agent.journal import DeploymentRecord, Journal
from node_agent.plan import Target
from node_agent.runtime import Runtime
from node_agent.tls import server_tls
from raftmeta.core.types import SideName
from tests.support.certificates import TestAuthority
from tests.support.front_scene import TEXT, FakeWorker

LIMITS = ReadLimits(head_s=0.2, head_bytes=2000, body_s=0.2)


class Listening:
    def __init__(self, root: Path, limits: ReadLimits = LIMITS, **settings: Any) -> None:
        self.limits = limits
        values = {"node": "n1", "zone": "a", "member_urls": ["http://127.0.0.1:1"], "store_dir": root, "drain_s": 0.1}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.runtime = Runtime(AgentConfig(**(values | settings)), "boot-1", self.port)
        self.runtime.run_dir.mkdir(parents=True)

    async def __aenter__(self) -> Listening:
        self.task = asyncio.create_task(http_server.run(self.runtime, self._socket, self.limits))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.runtime.stopping.set()
        await asyncio.wait_for(self.task, 10)

    def serves(self, name: str) -> None:
        pin = Target("encoder", "1.0.0", "a" * 64, "b" * 64)
        record = DeploymentRecord(name, "encoder", SideName.PRIMARY, "x.arena", "x.control", pin=pin)
        Journal(self.runtime.config.store_dir, "n1").put(record)

    async def talk(self, data: bytes, pieces: int = 1) -> bytes:
        """What comes back until the other side closes, when the bytes are sent in pieces."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        size = max(1, -(-len(data) // pieces))
        try:
            for begin in range(0, len(data), size):
                writer.write(data[begin : begin + size])
                await writer.drain()
                if pieces > 1:
                    await asyncio.sleep(0.02)
            return await asyncio.wait_for(reader.read(), 10)
        except ConnectionError:
            return b""
        finally:
            writer.close()


def run(root: Path, work: Callable[[Listening], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        async with Listening(root, **settings) as listening:
            await work(listening)

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_client_that_sends_its_head_too_slowly_is_cut_while_others_are_served(tmp_path: Path) -> None:
    async def work(listening: Listening) -> None:
        slow = asyncio.create_task(listening.talk(b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 30, pieces=60))
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{listening.port}/livez")).status_code == 200
        assert await slow == b""

    run(tmp_path, work)


def test_a_connection_that_says_nothing_is_cut(tmp_path: Path) -> None:
    async def work(listening: Listening) -> None:
        assert await listening.talk(b"") == b""

    run(tmp_path, work)


def test_a_head_without_end_is_cut(tmp_path: Path) -> None:
    async def work(listening: Listening) -> None:
        assert await listening.talk(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 100_000) == b""

    run(tmp_path, work, limits=ReadLimits(head_s=60, head_bytes=2000))


@pytest.mark.parametrize("request_line", [b"POST /v2/models/search/infer", b"GET /livez"])
@pytest.mark.parametrize("pieces", [1, 60])
def test_a_body_that_stalls_or_trickles_is_cut_while_others_are_served(tmp_path: Path, request_line: bytes, pieces: int) -> None:
    head = request_line + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n7fffffff\r\n"

    async def work(listening: Listening) -> None:
        listening.serves("search")
        reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        writer.write(head)
        ended = asyncio.create_task(reader.read())
        with suppress(ConnectionError):
            for _ in range(pieces if pieces > 1 else 0):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
                if ended.done():
                    break
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{listening.port}/livez")).status_code == 200
        with suppress(ConnectionError):
            await asyncio.wait_for(ended, 3)  # far below the request's deadline and the time an idle connection may stay
        writer.close()

    run(tmp_path, work)


def test_a_slow_body_may_take_the_time_that_its_bytes_earn(tmp_path: Path) -> None:
    head = b"POST /v2/models/search/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 200\r\n\r\n"

    async def work(listening: Listening) -> None:
        listening.serves("search")
        assert (await listening.talk(head + b" " * 200, pieces=40)).startswith(b"HTTP/1.1 400"), "it was read to its end"

    run(tmp_path, work, limits=ReadLimits(head_s=5, body_s=0.1, body_bytes_per_s=10))


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"\0" * 64, b"SSH-2.0-x\r\n", b"GET\r\n\r\n"])
def test_garbage_ends_its_own_connection_only(tmp_path: Path, garbage: bytes) -> None:
    async def work(listening: Listening) -> None:
        found = await listening.talk(garbage)
        assert found == b"" or found.startswith(b"HTTP/1.1 400")
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{listening.port}/livez")).status_code == 200

    run(tmp_path, work)


def test_an_idle_connection_may_be_used_again(tmp_path: Path) -> None:
    async def work(listening: Listening) -> None:
        async with httpx.AsyncClient() as http:
            for _ in range(2):
                assert (await http.get(f"http://127.0.0.1:{listening.port}/livez")).status_code == 200
                await asyncio.sleep(0.3)

    run(tmp_path, work)


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """The status line and head of the answer to `data`; its body is read too."""
    writer.write(data)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return head


@pytest.mark.parametrize(
    ("request_bytes", "rest"),
    [
        (b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n", b"x"),
    ],
)
def test_bytes_that_begin_no_request_keep_no_connection_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_bytes: bytes, rest: bytes
) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1)

    async def work(listening: Listening) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        assert b" 200 " in await answered(reader, writer, request_bytes)
        writer.write(rest)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()

    run(tmp_path, work)


@pytest.mark.parametrize("first", [b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b""])
def test_connections_that_wait_for_a_request_give_way_to_new_ones_at_the_limit(tmp_path: Path, first: bytes) -> None:
    async def work(listening: Listening) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", listening.port) for _ in range(4)]
        for reader, writer in idle if first else ():
            await answered(reader, writer, first)
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{listening.port}/v2")).status_code == 200
        with suppress(ConnectionError):
            assert await asyncio.wait_for(idle[0][0].read(), 5) == b"", "the one that waited longest"
        assert not idle[1][0].at_eof()
        for _, writer in idle:
            writer.close()

    run(tmp_path, work, limits=ReadLimits(head_s=60), connection_limit=4)


def test_health_is_answered_while_every_connection_of_the_limit_is_at_work(tmp_path: Path) -> None:
    head = b"POST /v2/models/search/infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"

    async def work(listening: Listening) -> None:
        listening.serves("search")
        busy = [await asyncio.open_connection("127.0.0.1", listening.port) for _ in range(2)]
        for _, writer in busy:
            writer.write(head)
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.port}") as http:
            assert (await http.get("/livez")).status_code == 200
            metrics, protocol = await http.get("/metrics"), await http.get("/v2")
        assert (metrics.status_code, metrics.json()["code"], metrics.headers["connection"]) == (503, "overloaded", "close")
        assert (protocol.status_code, list(protocol.json()), protocol.headers["retry-after"]) == (503, ["error"], "1")
        for _, writer in busy:
            writer.close()

    run(tmp_path, work, limits=ReadLimits(), connection_limit=2)


CHUNKED = b"POST /v2/models/search/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("begin", [b"2\r\n{}\r\n0\r\n", b"2\r\n{}\r\n0\r\nx: ", b"2;"])
def test_what_stands_behind_or_between_the_chunks_of_a_body_is_bounded_like_a_head(tmp_path: Path, begin: bytes) -> None:
    line = b"y" * 1000 if begin.endswith((b" ", b";")) else b"a: " + b"y" * 1000 + b"\r\n"

    async def work(listening: Listening) -> None:
        listening.serves("search")
        _, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        sent = 0
        with suppress(ConnectionError):
            writer.write(CHUNKED + begin)
            while sent < 64 << 20:
                writer.write(line * 100)
                await writer.drain()
                sent += len(line) * 100
        writer.close()
        assert sent < 64 << 20, "nobody ended it"

    run(tmp_path, work, limits=ReadLimits(head_s=60, body_s=60, head_bytes=2000))


def test_a_field_behind_a_body_is_no_field_of_the_request(tmp_path: Path) -> None:
    async def work(listening: Listening) -> None:
        listening.serves("search")
        answer = await listening.talk(CHUNKED + b"2\r\n{}\r\n0\r\ncontent-type: text/plain\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400"), "415 says that it was taken for one"

    run(tmp_path, work)


def test_requests_whose_clients_left_leave_the_queue(tmp_path: Path) -> None:
    async def work(listening: Listening) -> None:
        listening.serves("search")
        worker = FakeWorker(listening.runtime.worker_socket(0))
        worker.hold = asyncio.Event()
        await worker.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.port}", timeout=10) as http:
            while (await http.get("/v2/models/search/ready")).status_code != 200:
                await asyncio.sleep(0.01)
            tasks = [asyncio.create_task(http.post("/v2/models/search/infer", json=TEXT)) for _ in range(3)]
            while "raftmeta_agent_queued_requests 2.0" not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            while "raftmeta_agent_queued_requests 0.0" not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.01)
        assert len(worker.calls) == 1
        await worker.die()

    run(tmp_path, work, limits=ReadLimits(), worker_depth=1)


class Secured:
    """A node's certificate and how clients trust it."""

    def __init__(self, root: Path) -> None:
        self.authority = TestAuthority(root)
        self.files = self.authority.agent("n1")
        self.settings = {"tls_cert": self.files.certificate, "tls_key": self.files.key}

    async def serial(self, port: int, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> str:
        """Of the certificate that a new connection is shown, once a request over it was answered."""
        context = ssl.create_default_context(cafile=str(self.files.authority))
        context.maximum_version = newest
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            return str(writer.get_extra_info("peercert")["serialNumber"])
        finally:
            writer.close()


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_with_a_certificate_only_tls_of_1_2_and_newer_is_spoken(tmp_path: Path, newest: ssl.TLSVersion) -> None:
    secured = Secured(tmp_path / "tls")

    async def work(listening: Listening) -> None:
        assert await secured.serial(listening.port, newest)
        assert not (await listening.talk(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(tmp_path / "node", work, **secured.settings)
    made = server_tls(AgentConfig(node="n1", zone="a", member_urls=("http://x",), store_dir=tmp_path, **secured.settings))
    assert made is not None
    assert made.context.minimum_version is ssl.TLSVersion.TLSv1_2, "also where the machine's OpenSSL would still speak an older one"


def test_a_replaced_certificate_is_shown_to_new_connections_and_one_without_its_key_is_not(tmp_path: Path) -> None:
    secured = Secured(tmp_path / "tls")

    async def work(listening: Listening) -> None:
        before = await secured.serial(listening.port)
        other = secured.authority.agent("other")
        secured.files.certificate.write_bytes(other.certificate.read_bytes())  # with the key of the former
        await asyncio.sleep(0.2)
        assert await secured.serial(listening.port) == before
        secured.files.key.write_bytes(other.key.read_bytes())
        async with asyncio.timeout(10):
            while await secured.serial(listening.port) == before:
                await asyncio.sleep(0.02)

    run(tmp_path / "node", work, limits=ReadLimits(certificate_look_s=0.02), **secured.settings)


def test_a_handshake_that_is_never_finished_is_cut_while_others_are_served(tmp_path: Path) -> None:
    secured = Secured(tmp_path / "tls")

    async def work(listening: Listening) -> None:
        silent = asyncio.create_task(listening.talk(b""))
        assert await secured.serial(listening.port)
        assert await silent == b""

    run(tmp_path / "node", work, limits=ReadLimits(handshake_s=0.2), **secured.settings)


def test_a_caller_without_a_token_hears_so_although_its_body_never_comes(tmp_path: Path) -> None:
    (tmp_path / "principals.toml").write_text(f'[[principal]]\nname = "app"\nrole = "inference"\ntoken_sha256 = "{"0" * 64}"\n')
    head = b"POST /v2/models/search/infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000000\r\n\r\n"

    async def work(listening: Listening) -> None:
        listening.serves("search")
        said = await listening.talk(head + b"{")
        assert said.startswith(b"HTTP/1.1 401"), "it ended the connection after the answer"
        assert b"www-authenticate: Bearer" in said

    run(tmp_path / "node", work, limits=ReadLimits(), principals_file=tmp_path / "principals.toml")


def test_stopping_is_not_ready_first_and_then_refuses_connections(tmp_path: Path) -> None:
    async def work(listening: Listening) -> None:
        async with httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{listening.port}/v2/health/ready"
            await http.get(url)
            listening.runtime.stopping.set()
            await asyncio.sleep(0.03)
            reply = await http.get(url)
            assert (reply.status_code, reply.json()["reason"]) == (503, "the node is shutting down")
            await asyncio.wait_for(listening.task, 10)
            with pytest.raises(httpx.ConnectError):
                await http.get(url)

    run(tmp_path, work)
