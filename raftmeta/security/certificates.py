"""The cluster's own authority and the certificates it issues. The one place that imports `cryptography`.

Keys are EC P-256. A member's certificate names it as `raftmeta://<cluster id>/member/<member id>` and serves at both ends of a connection;
an agent's can only serve. Times are given by the caller. Nothing is written here.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
LEAF_DAYS = 825
BACKDATE = dt.timedelta(minutes=5)  # clocks of members differ


class Pem(msgspec.Struct, frozen=True):
    certificate: bytes
    key: bytes


class Subject(msgspec.Struct, frozen=True):
    """Whom a certificate is for. `hosts` are DNS names or IP addresses; `uri` is "" for holders that are not members."""

    name: str
    hosts: tuple[str, ...]
    uri: str = ""
    client: bool = True  # may open connections that ask for a certificate


class Validity(msgspec.Struct, frozen=True):
    begin: dt.datetime
    end: dt.datetime

    @classmethod
    def days(cls, now: dt.datetime, days: int) -> Validity:
        return cls(now - BACKDATE, now + dt.timedelta(days=days))


def new_authority(cluster_id: str, validity: Validity) -> Pem:
    """A self-signed authority that may sign leaves only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"raftmeta {cluster_id} authority")
    builder = _builder(name, name, key.public_key(), validity)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return _pem(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Pem, subject: Subject, validity: Validity) -> Pem:
    """A fresh key and a certificate for it, signed by the authority."""
    signer_key = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signer_key, ec.EllipticCurvePrivateKey), "the authority's key is made by new_authority"
    signer = x509.load_pem_x509_certificate(authority.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if subject.client else [])]
    builder = _builder(_name(subject.name), signer.subject, key.public_key(), validity)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(_alternative_names(subject)), critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(_authority_id(signer_key), critical=False)
    return _pem(builder.sign(signer_key, hashes.SHA256()), key)


def _authority_id(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, validity: Validity) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(validity.begin).not_valid_after(validity.end)


def _alternative_names(subject: Subject) -> Sequence[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in subject.hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    if subject.uri:
        names.append(x509.UniformResourceIdentifier(subject.uri))
    return names


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])  # 64: limit of RFC 5280


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pem:
    return Pem(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
