"""The certificate of an HTTP port, current with its files: a replaced file takes effect for new connections, without a restart.

Files are read once and tried in a context of their own first, since a context that took half of a new pair would refuse everybody; a pair
that cannot be used leaves the former one in force and is said in the log.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from raftmeta.core.errors import RaftmetaError
from raftmeta.security.tls import no_password

log = structlog.get_logger(__name__)

LOOK_S = 5.0


class ServerTls:
    """Raises RaftmetaError bad_field, when made, for files that cannot be used, a key that is not the certificate's among them."""

    def __init__(self, certificate: Path, key: Path, minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, look_s: float = LOOK_S) -> None:
        """`minimum`: the oldest protocol that is spoken; `look_s`: between two looks at the files."""
        self._certificate, self._key = certificate, key
        self._minimum = minimum
        self._look_s = look_s
        self._stamp = self._read_stamp()
        self.context = self._new_context()
        self._load(self.context, self._read())

    async def follow(self) -> None:
        """Looks at the files now and then until it is cancelled."""
        while True:
            await asyncio.sleep(self._look_s)
            self.refresh()

    def refresh(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            pair = self._read()
            self._load(self._new_context(), pair)
            self._load(self.context, pair)
        except (RaftmetaError, OSError) as fault:
            log.error("certificate_not_taken", detail=str(fault))
        else:
            log.info("certificate_taken", certificate=str(self._certificate))

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._minimum
        return context

    def _read(self) -> tuple[bytes, bytes]:
        """Certificate and key, once: what is tried is what is taken, though the files may be replaced between the two."""
        try:
            return self._certificate.read_bytes(), self._key.read_bytes()
        except OSError as cause:
            raise self._unusable(cause) from cause

    def _load(self, context: ssl.SSLContext, pair: tuple[bytes, bytes]) -> None:
        with _file_of(pair[0]) as certificate, _file_of(pair[1]) as key:
            try:
                context.load_cert_chain(certificate, key, no_password(self._key))
            except OSError as cause:  # ssl.SSLError is one
                raise self._unusable(cause) from cause

    def _unusable(self, cause: OSError) -> RaftmetaError:
        return RaftmetaError("bad_field", f"TLS certificate {self._certificate} with key {self._key}: {cause}")

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._certificate, self._key):
            try:
                seen = path.stat()
            except OSError:
                return ()
            found.append((seen.st_mtime_ns, seen.st_size, seen.st_ino))
        return tuple(found)


@contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """The path of a file in memory, since the library reads files alone; a key is written nowhere else."""
    file = os.memfd_create("raftmeta-tls")
    try:
        os.write(file, data)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
