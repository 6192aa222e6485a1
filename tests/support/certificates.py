"""Certificates of a small cluster on disk, good ones and bad ones, for tests."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from raftmeta.log.hello import member_uri
from raftmeta.security.certificates import Pem, Subject, Validity, issue, new_authority
from raftmeta.security.tls import TlsFiles

HOSTS = ("localhost", "127.0.0.1")


class TestAuthority:
    """One cluster's authority in a directory of its own."""

    __test__ = False

    def __init__(self, directory: Path, cluster_id: str = "c1", now: dt.datetime | None = None) -> None:
        self.directory = directory
        self.cluster_id = cluster_id
        self.now = now or dt.datetime.now(dt.UTC)
        directory.mkdir(parents=True, exist_ok=True)
        self.pem: Pem = new_authority(cluster_id, Validity.days(self.now, 30))
        (directory / "ca.pem").write_bytes(self.pem.certificate)

    def member(self, member_id: str, cluster_id: str | None = None) -> TlsFiles:
        uri = member_uri(cluster_id or self.cluster_id, member_id)
        return self.files(member_id, Subject(name=member_id, hosts=HOSTS, uri=uri), Validity.days(self.now, 10))

    def expired(self, member_id: str) -> TlsFiles:
        long_ago = self.now - dt.timedelta(days=20)
        subject = Subject(name=member_id, hosts=HOSTS, uri=member_uri(self.cluster_id, member_id))
        return self.files(f"{member_id}-expired", subject, Validity.days(long_ago, 10))

    def agent(self, node: str) -> TlsFiles:
        return self.files(node, Subject(name=node, hosts=HOSTS, client=False), Validity.days(self.now, 10))

    def files(self, name: str, subject: Subject, validity: Validity) -> TlsFiles:
        pem = issue(self.pem, subject, validity)
        files = TlsFiles(self.directory / f"{name}.pem", self.directory / f"{name}.key", self.directory / "ca.pem")
        files.certificate.write_bytes(pem.certificate)
        files.key.write_bytes(pem.key)
        return files
