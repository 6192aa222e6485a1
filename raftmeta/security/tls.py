"""TLS contexts between members: TLS 1.3 only, both ends with a certificate of the cluster's own authority.

Contexts are built from files and built again when a file changes, so a certificate is rotated by replacing its file; a file that cannot
be used leaves the former contexts in force and is counted. Who is on the other end is decided by the name in the verified certificate
(`raftmeta.log.hello`), not by a host name, so host names are not checked here.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from raftmeta.core.errors import RaftmetaError

_log = structlog.get_logger("raftmeta.security")


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files: own certificate (chain), its private key, and the authority that the other end's certificate must come from."""

    certificate: Path
    key: Path
    authority: Path

    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key, self.authority)


def peer_context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    """A context for one end of a connection between members. Raises RaftmetaError that names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # members keep one connection; resumption would only prolong a certificate's life
    load_files(context, files)
    return context


def load_files(context: ssl.SSLContext, files: TlsFiles) -> None:
    for path in files.paths():
        if not os.access(path, os.R_OK):
            raise RaftmetaError("bad_field", f"TLS file {path}: expected a readable PEM file, found none")
    try:
        context.load_cert_chain(files.certificate, files.key, no_password(files.key))
    except (ssl.SSLError, OSError) as error:
        raise RaftmetaError("bad_field", f"TLS certificate {files.certificate} with key {files.key}: {error}") from error
    try:
        context.load_verify_locations(files.authority)
    except (ssl.SSLError, OSError) as error:
        raise RaftmetaError("bad_field", f"TLS authority {files.authority}: {error}") from error


def no_password(key: Path) -> Callable[[], str]:
    """What is asked for the pass-phrase of an encrypted key, of that alone: the library would ask for it on the terminal, and wait."""

    def refuse() -> str:
        raise RaftmetaError("bad_field", f"TLS key {key} is encrypted; expected one without a password")

    return refuse


class _Stamp(NamedTuple):
    mtime_ns: int
    size: int
    inode: int


class PeerTls:
    """The two contexts of a member, current with the files. Use from one thread."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = self._read_stamps()
        self._server = peer_context(files, server=True)
        self._client = peer_context(files, server=False)
        self.reloads = 0
        self.reload_failures = 0

    def server_context(self) -> ssl.SSLContext:
        self._refresh()
        return self._server

    def client_context(self) -> ssl.SSLContext:
        self._refresh()
        return self._client

    def _refresh(self) -> None:
        """Three stat calls per new connection; a failed build is tried again only when the files change again."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            server, client = peer_context(self._files, server=True), peer_context(self._files, server=False)
        except RaftmetaError as error:
            self.reload_failures += 1
            _log.error("tls_reload_failed", detail=error.detail)
            return
        self._server, self._client = server, client
        self.reloads += 1
        _log.info("tls_reloaded", certificate=str(self._files.certificate))

    def _read_stamps(self) -> tuple[_Stamp | None, ...]:
        return tuple(_stamp(path) for path in self._files.paths())


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_mtime_ns, found.st_size, found.st_ino)
