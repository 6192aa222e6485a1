"""The end of a server that was asked to end: nobody who arrives late keeps it up."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from pathlib import Path

import pytest

from raftmeta.security.server_tls import ServerTls
from tests.support.api_server import running, wait_until
from tests.support.certificates import TestAuthority

REQUEST = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
MANY = 1_000_000  # requests; the server ends the connection before, at the latest when its grace is over


class Handshake:
    """A TLS client that says each thing when the test wants it said."""

    def __init__(self, plain: socket.socket, authority: Path) -> None:
        self._plain, self._incoming, self._outgoing = plain, ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(authority))
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    def begin(self) -> None:
        """Until only the client's last word is missing."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        while True:
            self._plain.sendall(self._outgoing.read())
            self._incoming.write(self._plain.recv(65_536))
            with contextlib.suppress(ssl.SSLWantReadError):
                return self._tls.do_handshake()

    def ask(self) -> bytes:
        """Send what is due and a request; what comes back, b"" at the end of the connection."""
        try:
            self._tls.write(REQUEST)
            self._plain.sendall(self._outgoing.read())
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    return self._tls.read(65_536)
                data = self._plain.recv(65_536)
                if not data:
                    return b""
                self._incoming.write(data)
        except (ConnectionError, ssl.SSLError):
            return b""


def test_a_connection_whose_handshake_ends_after_the_server_was_asked_to_end_is_ended_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = TestAuthority(tmp_path).agent("api")
    with caplog.at_level(logging.ERROR, "uvicorn.error"), running(tls=ServerTls(files.certificate, files.key)) as server:
        with server.connect() as plain:
            late = Handshake(plain, files.authority)
            late.begin()
            server.stop()
            wait_until(lambda: server.service.draining and not server.server.servers[0].is_serving())
            for _ in range(MANY):
                if not late.ask():
                    break
        wait_until(lambda: not server.server.server_state.connections)
    assert [record.getMessage() for record in caplog.records] == []
