"""What the listening socket takes in is bounded before anybody has said a word."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import structlog

from api.listener import Listener
from api.server import TOLD_AWAY
from raftmeta.security.server_tls import ServerTls
from tests.support.api_server import SHORT, Running, running, wait_until
from tests.support.certificates import TestAuthority
from tests.unit.api.harness import run

PATIENT = msgspec.structs.replace(SHORT, handshake_s=60.0, head_s=60.0)
BOUND = PATIENT.max_connections + TOLD_AWAY
REQUEST = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def held(server: Running) -> int:
    listener = server.server.servers[0]
    assert isinstance(listener, Listener)
    return len(listener._handshakes) + len(server.server.server_state.connections)


@contextmanager
def crowd(server: Running, number: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(server.connect()) for _ in range(number)]


def test_strangers_who_never_finish_a_handshake_are_bounded_and_others_get_through(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).agent("api")
    context = ssl.create_default_context(cafile=str(files.authority))
    with running(PATIENT, tls=ServerTls(files.certificate, files.key)) as server, crowd(server, 3 * BOUND):
        wait_until(lambda: held(server) >= BOUND - 1)
        with server.connect() as plain, context.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(REQUEST)
            assert client.recv(65_536).startswith(b"HTTP/1.1 200")
        assert held(server) <= BOUND


def test_connections_beyond_the_bound_wait_until_others_have_left() -> None:
    with running(PATIENT) as server, server.connect() as late:
        with crowd(server, BOUND - 1) as silent:
            told = [connection.recv(65_536) for connection in silent[PATIENT.max_connections :]]
            assert all(b'"overloaded"' in answer for answer in told)
        late.sendall(REQUEST)
        assert late.recv(65_536).startswith(b"HTTP/1.1 200")


def test_what_is_written_leaves_at_once() -> None:
    """Otherwise the second of two events on a watch waits for the first to be acknowledged, some 40 ms."""
    taken: list[int] = []

    async def work() -> None:
        async def take(sock: socket.socket) -> None:
            taken.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            sock.close()

        with socket.create_server(("127.0.0.1", 0)) as sock, socket.socket() as client:
            listener = Listener(sock, 8, (), take, shakes=False)
            client.connect(sock.getsockname())
            while not taken:
                await asyncio.sleep(0)
            listener.close()

    run(work())
    assert taken == [1]


class DrySocket(socket.socket):
    """The process has no descriptor left for what it accepts."""

    dry = True
    tried = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tried += 1
        if self.dry:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_a_descriptor_the_listener_stays_and_takes_connections_again_later() -> None:
    async def work() -> None:
        taken = asyncio.Event()
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

        async def take(sock: socket.socket) -> None:
            sock.close()
            taken.set()

        with DrySocket() as sock, socket.socket() as client:
            sock.bind(("127.0.0.1", 0))
            sock.listen(8)
            listener = Listener(sock, 8, (), take, shakes=True)
            client.connect(sock.getsockname())
            while sock.tried < 3:
                await asyncio.sleep(0.01)
            sock.dry = False
            await taken.wait()
            listener.close()
        assert faults == []

    with structlog.testing.capture_logs() as lines:
        run(work())
    assert [line["event"] for line in lines] == ["accept_paused"]


def test_what_a_handshake_raises_that_is_not_the_clients_doing_is_logged() -> None:
    async def work() -> None:
        async def take(sock: socket.socket) -> None:
            sock.close()
            raise (ValueError("a defect"), ConnectionResetError())[len(raised)]

        raised: list[None] = []
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen(8)
            listener = Listener(sock, 8, (), take, shakes=True)
            for _ in range(2):
                with socket.socket() as client:
                    client.connect(sock.getsockname())
                    while not listener._handshakes:
                        await asyncio.sleep(0)
                    while listener._handshakes:
                        await asyncio.sleep(0)
                raised.append(None)
            listener.close()

    with structlog.testing.capture_logs() as lines:
        run(work())
    assert [line["event"] for line in lines] == ["a connection failed"]
