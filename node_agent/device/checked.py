"""A small record in memory that either reads back whole or not at all.

Layout: SHA-256 of the rest, length as little-endian u32, msgpack. A process killed in the middle of `write` leaves a record that does not
check, and `read` answers None: the caller then knows nothing, and must not guess. One writer; a reader beside it may see None in between.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

_DIGEST = 32
_LENGTH = 4

T = TypeVar("T", bound=msgspec.Struct)


def write(page: memoryview, record: msgspec.Struct) -> None:
    """Overwrite the page's record; what is left of a longer one behind it is not read."""
    packed = encode(record, len(page))
    page[: len(packed)] = packed


def mend(memory: memoryview, record: msgspec.Struct, limit: int) -> bool:
    """Write the record at the beginning of the memory again where it is not what it should be. True when it was not."""
    packed = encode(record, limit)
    if memory[: len(packed)] == packed:
        return False
    memory[: len(packed)] = packed
    return True


def encode(record: msgspec.Struct, limit: int) -> bytes:
    body = msgspec.msgpack.encode(record)
    body = len(body).to_bytes(_LENGTH, "little") + body
    if _DIGEST + len(body) > limit:
        raise ValueError(f"a record of {len(body)} bytes does not fit into a page of {limit}")
    return hashlib.sha256(body).digest() + body


def read(page: memoryview | bytes, kind: type[T]) -> T | None:
    """The record, or None when the bytes do not check."""
    data = bytes(page)
    length = int.from_bytes(data[_DIGEST : _DIGEST + _LENGTH], "little")
    end = _DIGEST + _LENGTH + length
    if end > len(data) or hashlib.sha256(data[_DIGEST:end]).digest() != data[:_DIGEST]:
        return None
    try:
        return msgspec.msgpack.decode(data[_DIGEST + _LENGTH : end], type=kind)
    except msgspec.MsgspecError:  # another program's record, or a later format's
        return None
