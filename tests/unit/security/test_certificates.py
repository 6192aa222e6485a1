"""Certificates that the authority issues: who they name, what they may be used for, and that nobody else's pass."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from raftmeta.security.certificates import BACKDATE, Pem, Subject, Validity, issue, new_authority

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
VALIDITY = Validity.days(NOW, 10)


def read(pem: Pem) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.certificate)


def test_a_member_is_named_by_hosts_and_by_uri_and_serves_both_ends() -> None:
    authority = new_authority("c1", VALIDITY)
    certificate = read(issue(authority, Subject("a", ("localhost", "127.0.0.1", "::1"), "raftmeta://c1/member/a"), VALIDITY))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["raftmeta://c1/member/a"]
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    certificate.verify_directly_issued_by(read(authority))


def test_an_agent_can_only_serve_and_is_no_member() -> None:
    certificate = read(issue(new_authority("c1", VALIDITY), Subject("n", ("localhost",), client=False), VALIDITY))
    assert set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == {ExtendedKeyUsageOID.SERVER_AUTH}
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == []


def test_the_authority_signs_leaves_only_and_a_leaf_signs_nothing() -> None:
    authority = new_authority("c1", VALIDITY)
    constraints = read(authority).extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    leaf = read(issue(authority, Subject("a", ("localhost",)), VALIDITY))
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not leaf.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_keys_are_p256_and_fresh_and_times_are_the_callers_with_room_for_clocks_that_differ() -> None:
    authority = new_authority("c1", VALIDITY)
    one, two = (read(issue(authority, Subject("a", ("localhost",)), VALIDITY)) for _ in range(2))
    assert isinstance(one.public_key(), ec.EllipticCurvePublicKey)
    assert one.public_key() != two.public_key()
    assert one.serial_number != two.serial_number
    assert (one.not_valid_before_utc, one.not_valid_after_utc) == (NOW - BACKDATE, NOW + dt.timedelta(days=10))


def test_openssl_takes_the_chain(tmp_path: Path) -> None:
    authority = new_authority("c1", VALIDITY)
    leaf = issue(authority, Subject("a", ("localhost",)), VALIDITY)
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    (tmp_path / "a.pem").write_bytes(leaf.certificate)
    (tmp_path / "a.key").write_bytes(leaf.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "a.pem", tmp_path / "a.key")
    context.load_verify_locations(tmp_path / "ca.pem")


def test_a_name_longer_than_a_common_name_may_be_is_cut_there_and_kept_in_the_uri() -> None:
    uri = "raftmeta://c1/member/" + "m" * 128
    certificate = read(issue(new_authority("c" * 128, VALIDITY), Subject("m" * 128, ("localhost",), uri), VALIDITY))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [uri]


@pytest.mark.parametrize("host", ["zone-a.example", "10.0.0.1", "fd00::1"])
def test_hosts_may_be_names_or_addresses(host: str) -> None:
    certificate = read(issue(new_authority("c1", VALIDITY), Subject("a", (host,)), VALIDITY))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))] == [host]
