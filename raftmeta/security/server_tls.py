"""The certificate of an HTTP port, current with its files: a replaced file takes effect for new connections, without a restart.

Files are tried in a context of their own first, since a context that took half of a new pair would refuse everybody; a pair that cannot be
used leaves the former one in force and is said in the log.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import structlog

from raftmeta.core.errors import RaftmetaError

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
        self.context = self._made()

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
            self._made()
            self.context.load_cert_chain(self._certificate, self._key, self._no_password)
        except (RaftmetaError, OSError) as fault:
            log.error("certificate_not_taken", detail=str(fault))
        else:
            log.info("certificate_taken", certificate=str(self._certificate))

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._minimum
        try:
            context.load_cert_chain(self._certificate, self._key, self._no_password)
        except OSError as cause:  # ssl.SSLError is one
            raise RaftmetaError("bad_field", f"TLS certificate {self._certificate} with key {self._key}: {cause}") from cause
        return context

    def _no_password(self) -> str:
        """Called for an encrypted key alone. The library would ask for one on the terminal, and wait."""
        raise RaftmetaError("bad_field", f"TLS key {self._key} is encrypted; expected one without a password")

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._certificate, self._key):
            try:
                seen = path.stat()
            except OSError:
                return ()
            found.append((seen.st_mtime_ns, seen.st_size, seen.st_ino))
        return tuple(found)
