"""The HTTP port under TLS: rotation without a restart, pairs that do not fit, clients that never finish a handshake."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from api.server import Listen, make_server
from raftmeta.core.errors import RaftmetaError
from raftmeta.security.server_tls import ServerTls
from tests.support.api_server import SHORT, Running, running
from tests.support.certificates import TestAuthority


def serial_of(server: Running, authority: Path, minimum: ssl.TLSVersion | None = None) -> int:
    """Serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(authority))
    if minimum is not None:
        context.maximum_version = minimum
    with server.connect() as plain, context.wrap_socket(plain, server_hostname="localhost") as secured:
        secured.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert secured.recv(65_536).startswith(b"HTTP/1.1 200")
        shown = secured.getpeercert()
        assert shown is not None
        return int(str(shown["serialNumber"]), 16)


def test_a_replaced_certificate_is_shown_to_new_connections_without_a_restart(tmp_path: Path) -> None:
    made = TestAuthority(tmp_path)
    files = made.agent("api")
    tls = ServerTls(files.certificate, files.key)
    with running(tls=tls) as server:
        before = serial_of(server, files.authority)
        made.agent("api")
        tls.refresh()
        assert serial_of(server, files.authority) != before


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"no PEM"), Path.unlink], ids=["garbage", "missing"])
def test_a_pair_that_cannot_be_used_leaves_the_former_one_in_force(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    made = TestAuthority(tmp_path)
    files, other = made.agent("api"), made.agent("other")
    tls = ServerTls(files.certificate, files.key)
    with running(tls=tls) as server:
        before = serial_of(server, files.authority)
        files.certificate.write_bytes(other.certificate.read_bytes())  # a new certificate with the old key
        tls.refresh()
        assert serial_of(server, files.authority) == before
        spoil(files.certificate)
        tls.refresh()
        assert serial_of(server, files.authority) == before


class Between(ssl.SSLContext):
    """The files are replaced after they were tried and before they are taken."""

    replace: Callable[[], object] = staticmethod(lambda: None)

    def load_cert_chain(self, *files: Any) -> None:  # type: ignore[override]
        self.replace()
        super().load_cert_chain(*files)


def test_files_that_are_replaced_while_they_are_taken_leave_no_half_of_a_pair_in_force(tmp_path: Path) -> None:
    made = TestAuthority(tmp_path)
    files, other = made.agent("api"), made.agent("other")
    tls = ServerTls(files.certificate, files.key)
    tls.context = between = Between(ssl.PROTOCOL_TLS_SERVER)
    made.agent("api")
    new = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    between.replace = lambda: files.certificate.write_bytes(other.certificate.read_bytes())  # type: ignore[method-assign]
    tls.refresh()
    with running(tls=tls) as server:
        assert serial_of(server, files.authority) == new.serial_number


def test_older_protocols_and_plain_text_are_turned_away(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).agent("api")
    with running(tls=ServerTls(files.certificate, files.key)) as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            serial_of(server, files.authority, ssl.TLSVersion.TLSv1_2)
        with server.connect() as plain:
            plain.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert not rest_of(plain).startswith(b"HTTP")
        assert serial_of(server, files.authority)


def test_a_handshake_that_is_never_finished_is_cut(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).agent("api")
    limits = msgspec.structs.replace(SHORT, handshake_s=0.3)
    with running(limits, tls=ServerTls(files.certificate, files.key)) as server:
        with server.connect() as silent:
            assert serial_of(server, files.authority)
            rest_of(silent)  # returns because the server ends it
        assert serial_of(server, files.authority)


@pytest.mark.parametrize("missing", ["certificate", "key"])
def test_files_that_cannot_be_used_at_the_start_are_named(tmp_path: Path, missing: str) -> None:
    files = TestAuthority(tmp_path).agent("api")
    getattr(files, missing).unlink()
    with pytest.raises(RaftmetaError) as refused:
        ServerTls(files.certificate, files.key)
    assert refused.value.code == "bad_field"
    assert str(files.certificate) in refused.value.detail


def test_an_encrypted_key_is_refused_instead_of_asking_for_its_password(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).agent("api")
    key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    with pytest.raises(RaftmetaError, match=r"api\.key is encrypted"):
        ServerTls(files.certificate, files.key)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RaftmetaError) as refused:
            make_server(None, Listen("127.0.0.1", port), SHORT, lambda: None)
        assert (refused.value.code, f"127.0.0.1:{port}" in refused.value.detail) == ("bad_field", True)


def rest_of(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)
