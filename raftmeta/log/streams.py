"""Non-blocking byte streams over a connected socket: TLS between members, plain for members that share a loopback.

A stream turns the many ways in which a socket or OpenSSL says "not now", "ended" and "refused" into three: WOULD_BLOCK, 0 bytes,
and an exception (`Refused` with a reason, or OSError when the connection is lost). It never waits and keeps no bytes of its own.
"""

from __future__ import annotations

import socket
import ssl
from enum import Enum
from typing import Protocol

from raftmeta.log.hello import Identity, Refusal, Refused, identity_of

WOULD_BLOCK = -1


class Step(Enum):
    """What a handshake waits for."""

    DONE = "done"
    READ = "read"
    WRITE = "write"


class Stream(Protocol):
    wants_write: bool  # a read could not go on before something is written

    def handshake(self) -> Step: ...

    def identity(self) -> Identity | None:
        """Who the other end proved to be; None when the stream cannot prove it."""

    def read_into(self, view: memoryview) -> int:
        """Bytes read, 0 at the end of the stream, WOULD_BLOCK."""

    def write(self, view: memoryview) -> int:
        """Bytes written or WOULD_BLOCK. After WOULD_BLOCK the next call must offer the same bytes again."""

    def pending(self) -> bool:
        """Bytes wait inside the stream, so the socket would not report them."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class PlainStream:
    """No proof of identity; the transport allows it on loopback only."""

    wants_write = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def handshake(self) -> Step:
        return Step.DONE

    def identity(self) -> Identity | None:
        return None

    def read_into(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view)
        except BlockingIOError:
            return WOULD_BLOCK

    def write(self, view: memoryview) -> int:
        try:
            return self._sock.send(view)
        except BlockingIOError:
            return WOULD_BLOCK

    def pending(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


class TlsStream:
    """One end of a mutually authenticated TLS 1.3 connection."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._sock = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        self._proven = False  # our end has verified the other; it may still refuse ours
        self.wants_write = False

    def handshake(self) -> Step:
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            return Step.READ
        except ssl.SSLWantWriteError:
            return Step.WRITE
        except ssl.SSLError as error:
            raise translated(error) from error
        self._proven = True
        return Step.DONE

    def identity(self) -> Identity | None:
        certificate = self._sock.getpeercert() if self._proven else None
        if not certificate:
            raise Refused(Refusal.CERTIFICATE_MISSING, "the other end showed no certificate")
        return identity_of(certificate)

    def read_into(self, view: memoryview) -> int:
        self.wants_write = False
        try:
            return self._sock.recv_into(view)
        except ssl.SSLWantReadError:
            return WOULD_BLOCK
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return WOULD_BLOCK
        except ssl.SSLError as error:
            raise translated(error) from error

    def write(self, view: memoryview) -> int:
        try:
            return self._sock.send(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return WOULD_BLOCK
        except ssl.SSLError as error:
            raise translated(error) from error

    def pending(self) -> bool:
        return self._sock.pending() > 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


# Numbers of OpenSSL's x509_vfy.h.
_VERIFY_CODES = {9: Refusal.CERTIFICATE_NOT_YET_VALID, 10: Refusal.CERTIFICATE_EXPIRED}


def translated(error: ssl.SSLError) -> Exception:
    """What an error of OpenSSL means: a refusal with its reason, or merely a connection that went away."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refused(_VERIFY_CODES.get(error.verify_code, Refusal.CERTIFICATE_UNTRUSTED), error.verify_message)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLSyscallError | ssl.SSLZeroReturnError):
        return ConnectionResetError("the other end closed the connection")
    reason = error.reason or ""
    if "ALERT" in reason:
        return Refused(Refusal.REFUSED_BY_PEER, reason)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Refused(Refusal.CERTIFICATE_MISSING, reason)
    return Refused(Refusal.BAD_TLS, reason or str(error))
