"""Reading a request's body within its limit.

A declared length above the limit is refused before a byte is read; an undeclared one is counted while it arrives. Only plain JSON is
taken: no other media type, no content coding (a compressed body could hide any size).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from api.operation import Receive
from raftmeta.core.errors import RaftmetaError


class ClientGone(Exception):
    """The client closed the connection before its request was complete; there is nobody to answer."""


def check_headers(headers: Mapping[bytes, bytes], limit: int) -> None:
    """Raises RaftmetaError body_too_large, unsupported_media_type or bad_request."""
    length = headers.get(b"content-length")
    if length is not None:
        if not length.isdigit():
            raise RaftmetaError("bad_request", f"content-length is {length[:40]!r}")
        if len(length) > 15 or int(length) > limit:
            raise RaftmetaError("body_too_large", f"the body has {length[:20].decode()} bytes, the limit is {limit}", limit_bytes=limit)
    media = headers.get(b"content-type")
    if media is not None and media != b"application/json":
        name, _, parameters = media.decode("latin-1").lower().partition(";")
        if name.strip() != "application/json" or parameters.strip() not in ("", "charset=utf-8"):
            raise RaftmetaError("unsupported_media_type", f"content-type is {media[:80].decode('latin-1')!r}, expected application/json")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise RaftmetaError("unsupported_media_type", "the body has a content-encoding, expected none")


async def read(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises RaftmetaError body_too_large or ClientGone."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        _refuse_beyond(len(body), limit)
        return body
    parts: list[bytes] = []
    size = 0
    while message["type"] == "http.request":
        part: bytes = message.get("body", b"")
        size += len(part)
        _refuse_beyond(size, limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()
    raise ClientGone


async def drain(receive: Receive, limit: int, limit_s: float) -> None:
    """Reads and drops what is left of a refused body, within bounds, so that the client sees the answer before the connection ends."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while size <= limit:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def _refuse_beyond(size: int, limit: int) -> None:
    if size > limit:
        raise RaftmetaError("body_too_large", f"the body has more than {limit} bytes", limit_bytes=limit)
