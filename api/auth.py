"""Who calls: the bearer token of a request, handed to the one authorizer.

A member without principals answers callers without a token as `anonymous`; that is for one's own machine. So such a caller must come from
loopback, by a loopback name (a page of another site can point its name here), and not from a page of another origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from api.deps import Authorizer
from api.operation import Scope
from raftmeta.addresses import is_loopback
from raftmeta.core.errors import RaftmetaError
from raftmeta.security.roles import Principal
from raftmeta.security.tokens import bearer_token


def identify(authorizer: Authorizer, scope: Scope, headers: Mapping[bytes, bytes]) -> Principal:
    """Raises RaftmetaError unauthenticated or forbidden."""
    given = headers.get(b"authorization")
    if given is not None:
        return authorizer.authenticate(bearer_token(given))
    caller = authorizer.authenticate("")
    _refuse_strangers(scope.get("client"), headers)
    return caller


def reidentify(authorizer: Authorizer, headers: Mapping[bytes, bytes]) -> Principal:
    """Whether a caller who was let in would be let in now, for what lasts long. Raises RaftmetaError unauthenticated."""
    given = headers.get(b"authorization")
    return authorizer.authenticate("" if given is None else bearer_token(given))


def _refuse_strangers(client: Any, headers: Mapping[bytes, bytes]) -> None:
    if not client or not _is_loopback(client[0]):
        raise RaftmetaError("unauthenticated", "a call without a token is taken from loopback only")
    host = headers.get(b"host", b"")
    if not _names_loopback(b"//" + host):
        raise RaftmetaError("forbidden", f"a call without a token must name a loopback host, found {host[:80]!r}")
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != host:
        raise RaftmetaError("forbidden", "a call without a token may not come from a page of another origin")


@lru_cache(maxsize=1_024)
def _names_loopback(url: bytes) -> bool:
    try:
        return _is_loopback(urlsplit(url.decode("latin-1")).hostname or "")
    except ValueError:
        return False


_is_loopback = lru_cache(maxsize=1_024)(is_loopback)
