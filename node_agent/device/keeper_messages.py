"""What a keeper and those who use its memory say to each other: one packet asks, one packet answers, a descriptor comes along.

Packets of a Unix socket (SOCK_SEQPACKET) arrive whole or not at all, so there is no framing to get wrong; none is longer than `MAX_BYTES`.
Both sides ask the kernel who the other one is: memory is handed out to, and taken from, processes of the same user only.
"""

from __future__ import annotations

import array
import os
import re
import socket
import struct
from typing import Final

import msgspec

MAX_BYTES: Final = 16 << 10  # MAX_HELD names and sizes take less than 10 KiB
MAX_HELD: Final = 64  # allocations of one keeper: one for each deployment that a node may take part in
NAME: Final = re.compile(r"[a-z0-9-]{1,64}\Z")
_UCRED: Final = "3i"  # pid, uid, gid


class Hold(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Give the memory of this name; make it first if there is none."""

    name: str
    size_bytes: int


class Open(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Give the memory of this name, if it is held."""

    name: str


class List(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Release(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Let this memory go; it is free once nobody maps it."""

    name: str


class Given(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Comes with a descriptor."""

    name: str
    size_bytes: int
    created: bool  # by this very request: nothing is known of its bytes


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    size_bytes: int


class Listing(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    held: tuple[Held, ...]
    limit_bytes: int


class Released(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    was_held: bool


class NotHeld(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    name: str


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A Refusal in words."""

    kind: str
    subject: str
    expected: str
    found: str


Request = Hold | Open | List | Release
Answer = Given | Listing | Released | NotHeld | Refused


def send(connection: socket.socket, message: Request | Answer, descriptor: int | None = None) -> None:
    """Raises OSError; BlockingIOError or TimeoutError when the other side does not read."""
    body = msgspec.msgpack.encode(message)
    assert len(body) <= MAX_BYTES, len(body)
    passed = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    connection.sendmsg([body], passed)


def receive_request(connection: socket.socket) -> Request | None:
    """None when the other side has gone. Descriptors that come along are dropped by the kernel. Raises ValueError for anything else."""
    body = connection.recv(MAX_BYTES)  # what is longer is cut, and then no message
    if not body:
        return None
    try:
        known: Request = msgspec.msgpack.decode(body, type=Request)
    except msgspec.MsgspecError as cause:
        raise ValueError(f"no request: {cause}") from cause
    if not isinstance(known, List) and not NAME.match(known.name):
        raise ValueError(f"no name: {known.name[:80]!r}")
    if isinstance(known, Hold) and not 0 < known.size_bytes < 1 << 62:
        raise ValueError(f"no size: {known.size_bytes}")
    return known


def receive_answer(connection: socket.socket) -> tuple[Answer, int | None]:
    """With the descriptor that came along. Raises ValueError for what is no answer, EOFError when the keeper has gone."""
    room = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
    body, passed, _, _ = connection.recvmsg(MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = _descriptors(passed)
    try:
        if not body:
            raise EOFError("the keeper has gone")
        try:
            answer: Answer = msgspec.msgpack.decode(body, type=Answer)
        except msgspec.MsgspecError as cause:
            raise ValueError(f"no answer: {cause}") from cause
        if isinstance(answer, Given) != (len(descriptors) == 1):
            raise ValueError(f"{len(descriptors)} descriptors with {type(answer).__name__}")
    except (EOFError, ValueError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return answer, descriptors[0] if descriptors else None


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_UCRED))
    user: int = struct.unpack(_UCRED, raw)[1]
    return user


def _descriptors(passed: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in passed:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
