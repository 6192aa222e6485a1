"""The weight-consistency vector once more, from docs/wcv.md alone, in plain integers and slowly: what the backends are compared with."""

from __future__ import annotations

import hashlib
import struct

MASK = (1 << 64) - 1
BLOCK = 65536
KEYS = [key | 1 for key in struct.unpack("<8193Q", hashlib.shake_128(b"raftmeta-wcv-1").digest(8 * 8193))]


def blocks(data: bytes) -> list[tuple[int, int]]:
    padded = data + bytes(-len(data) % 8)
    return [_block(padded[start : start + BLOCK]) for start in range(0, len(padded), BLOCK)]


def entry(data: bytes, dtype: str, shape: tuple[int, ...]) -> str:
    name = dtype.encode("ascii")
    message = b"raftmeta-wcv-1 tensor\0" + len(name).to_bytes(4, "little") + name + len(shape).to_bytes(4, "little")
    for dim in (*shape, len(data), BLOCK):
        message += dim.to_bytes(8, "little")
    for a, b in blocks(data):
        message += a.to_bytes(8, "little") + b.to_bytes(8, "little")
    return hashlib.sha256(message).hexdigest()


def _block(data: bytes) -> tuple[int, int]:
    a = b = 0
    for index in range(len(data) // 8):
        word = data[8 * index : 8 * index + 8]
        a += int.from_bytes(word, "little") * KEYS[index]
        b += int.from_bytes(word, "big") * KEYS[index + 1]
    return a & MASK, b & MASK
