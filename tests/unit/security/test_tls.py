"""TLS contexts: strict by construction, and current with their files."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from raftmeta.core.errors import RaftmetaError
from raftmeta.security.tls import PeerTls, TlsFiles, peer_context
from tests.support.certificates import TestAuthority
from tests.support.mesh import Mesh


@pytest.mark.parametrize("server", [True, False])
def test_a_context_is_tls_1_3_with_both_ends_proven(tmp_path: Path, server: bool) -> None:
    context = peer_context(TestAuthority(tmp_path).member("a"), server=server)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1, "the cluster's own authority and no other"


@pytest.mark.parametrize("lost", ["certificate", "key", "authority"])
def test_a_missing_file_is_named(tmp_path: Path, lost: str) -> None:
    files = TestAuthority(tmp_path).member("a")
    path: Path = getattr(files, lost)
    path.unlink()
    with pytest.raises(RaftmetaError, match=f"TLS file {path}: expected a readable PEM file") as caught:
        PeerTls(files)
    assert caught.value.code == "bad_field"


def test_a_key_of_another_certificate_and_rubbish_are_named(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    a, b = authority.member("a"), authority.member("b")
    with pytest.raises(RaftmetaError, match=f"{a.certificate} with key {b.key}"):
        PeerTls(TlsFiles(a.certificate, b.key, a.authority))
    a.authority.write_bytes(b"rubbish")
    with pytest.raises(RaftmetaError, match=f"TLS authority {a.authority}"):
        PeerTls(a)


def test_an_encrypted_key_that_is_put_in_place_is_refused_instead_of_asking_for_its_password(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).member("a")
    tls = PeerTls(files)
    former = tls.client_context()
    key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    assert tls.client_context() is former
    assert tls.reload_failures == 1
    with pytest.raises(RaftmetaError, match=r"a\.key is encrypted"):
        PeerTls(files)


def test_a_replaced_certificate_is_used_for_the_next_connection_without_a_restart(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a = mesh.add("a")
        b = mesh.add("b", files=mesh.authority.expired("b"))
        mesh.introduce()
        mesh.pump(lambda: a.count("refused_certificate_expired") > 0)
        assert b.files is not None
        fresh = mesh.authority.member("b")
        fresh.certificate.rename(b.files.certificate)
        fresh.key.rename(b.files.key)
        mesh.pump(mesh.linked)
        mesh.everybody_talks()


def test_links_stay_up_while_certificates_and_the_authority_rotate(tmp_path: Path) -> None:
    """First both authorities are trusted, then the certificates change: no link is lost, and restarted members get in."""
    with Mesh(tmp_path) as mesh:
        members = mesh.trio()
        old = mesh.authority
        new = TestAuthority(tmp_path / "new", "c1")
        both = old.pem.certificate + new.pem.certificate
        (old.directory / "ca.pem").write_bytes(both)
        for member in members:
            assert member.files is not None
            fresh = new.member(member.settings.member_id)
            fresh.certificate.rename(member.files.certificate)
            fresh.key.rename(member.files.key)
        mesh.everybody_talks()
        assert all(len(member.links()) == 2 for member in members)
        members[1].transport.close()
        mesh.add("b", files=members[1].files)
        mesh.introduce()
        mesh.pump(mesh.linked)
        mesh.everybody_talks()


def test_a_half_written_file_leaves_the_former_contexts_in_force(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).member("a")
    tls = PeerTls(files)
    server, client = tls.server_context(), tls.client_context()
    whole = files.certificate.read_bytes()
    files.certificate.write_bytes(whole[:100])
    assert (tls.server_context(), tls.client_context()) == (server, client)
    assert (tls.reloads, tls.reload_failures) == (0, 1), "tried once per change, not once per connection"
    files.certificate.write_bytes(whole)
    assert tls.server_context() is not server
    assert (tls.reloads, tls.reload_failures) == (1, 1)
    files.key.unlink()
    assert tls.server_context() is not server
    assert tls.reload_failures == 2
