"""The weight-consistency vector: a linear check per 64 KiB block, an entry per tensor, one root per version.

docs/wcv.md states the format; this file is its reference. Block checks are sums modulo 2^64 of the words of a block, read once in each byte
order, times odd keys. They may be computed in any pieces, on any number of threads, by any backend: the result depends on the bytes alone.
A backend answers two stored vectors before its first use and is refused otherwise. The vector proves transport and memory, not intent:
whoever can write the weights can forge it. Nothing here copies the data it is given, except what a `BlockVector` holds back of a block.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from consistency.entries import BLOCK_BYTES, WORDS, entry_of, pack_blocks, root
from raftmeta.core.errors import RaftmetaError

__all__ = [
    "BACKENDS", "BLOCK_BYTES", "CHECK_LONG", "CHECK_SHORT", "WORDS", "Backend", "BlockVector", "Buffer", "Kernel", "TensorVector", "Words",
    "backend", "block_checks", "blocks_within", "entry_of", "keys", "pack_blocks", "root", "self_check", "tensor_entry", "unpack_blocks",
    "update_blocks",
]  # fmt: skip

_MASK = (1 << 64) - 1
_KEY_SEED = b"raftmeta-wcv-1"
BACKENDS = ("numba", "numpy", "torch")

Words = NDArray[np.uint64]  # one or two dimensions of 64-bit words
Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]

# The stored vectors: (bytes, entry as U8 of one dimension). The second crosses three blocks and ends inside a word.
CHECK_SHORT = (bytes(range(256)), "96e3022a0ab3d5e477f38d72170ffbc13f3f49bb20229cb77755f98aaba06d4d")
CHECK_LONG = (
    hashlib.shake_128(b"raftmeta-wcv-1 check").digest(3 * BLOCK_BYTES + 13),
    "72834d6ffaa2593adbc4b87f9541306e1f57c376090c04aa1e4e19a14ec665b8",
)


class Kernel(Protocol):
    """Fills out[n, 0] with the sum of word x native_keys and out[n, 1] with the sum of byte-swapped word x swapped_keys of block n."""

    def __call__(self, words: Words, native_keys: Words, swapped_keys: Words, out: Words) -> None: ...


@dataclass(frozen=True)
class Backend:
    """A kernel and the byte order in which it reads words. `byteorder` is that of the host, except in tests."""

    name: str
    kernel: Kernel
    byteorder: str = sys.byteorder

    def sums(self, words: Words, out: Words) -> None:
        """Block checks (a, b) of whole words into out, one row a block; the last block may be short."""
        assert out.shape == (-(-words.size // WORDS), 2), (out.shape, words.size)
        low, high = keys()[:-1], keys()[1:]
        if self.byteorder == "little":
            self.kernel(words, low, high, out)
            return
        native_first = np.empty_like(out)
        self.kernel(words, high, low, native_first)
        out[:] = native_first[:, ::-1]


@dataclass(frozen=True)
class TensorVector:
    entry: str  # 64 lower-case hex characters
    blocks: Words  # [blocks, 2]: a and b of every block


class BlockVector:
    """The block checks of one tensor whose bytes arrive in pieces of any size: `update` for each, `finish` once."""

    def __init__(self, using: Backend | None = None) -> None:
        self._backend = using or backend()
        self._done: list[Words] = []
        self._held = bytearray()  # the beginning of a block, always shorter than one
        self.size_bytes = 0

    def update(self, data: Buffer) -> None:
        piece = _as_bytes(data)
        self.size_bytes += piece.size
        if self._held:
            missing = BLOCK_BYTES - len(self._held)
            self._held += piece[:missing].data
            piece = piece[missing:]
            if len(self._held) < BLOCK_BYTES:
                return
            self._done.append(block_checks(self._held, self._backend))
            self._held = bytearray()
        whole = piece.size - piece.size % BLOCK_BYTES
        if whole:
            self._done.append(block_checks(piece[:whole], self._backend))
        if whole < piece.size:
            self._held += piece[whole:].data

    def finish(self, dtype: str, shape: tuple[int, ...]) -> TensorVector:
        """The tensor of all bytes so far. Raises RaftmetaError bad_field when dtype and shape need another number of bytes."""
        parts = [*self._done, block_checks(self._held, self._backend)]
        blocks = np.concatenate(parts)
        return TensorVector(entry_of(dtype, shape, self.size_bytes, blocks), blocks)


def tensor_entry(data: Buffer, dtype: str, shape: tuple[int, ...], using: Backend | None = None) -> TensorVector:
    """The vector of one contiguous row-major tensor."""
    raw = _as_bytes(data)
    blocks = block_checks(raw, using)
    return TensorVector(entry_of(dtype, shape, raw.size, blocks), blocks)


def block_checks(data: Buffer, using: Backend | None = None) -> Words:
    """Checks [blocks, 2] of bytes that begin at a block boundary; a short last block counts as padded with zeros to whole words."""
    chosen = using or backend()
    raw = _as_bytes(data)
    out = np.zeros((-(-raw.size // BLOCK_BYTES), 2), np.uint64)
    whole = raw.size // 8
    if whole:
        chosen.sums(raw[: whole * 8].view(np.uint64), out[: -(-whole // WORDS)])
    if raw.size % 8:
        _add_tail(out, raw[whole * 8 :].tobytes(), whole % WORDS)
    return out


def update_blocks(data: Buffer, checks: Words, numbers: Iterable[int], using: Backend | None = None) -> Words:
    """The block checks of a tensor of which at most the blocks with these numbers changed since `checks`; the others are not read.

    Its entry is `entry_of` the result. Raises RaftmetaError bad_field for checks of another size or a block that there is not.
    """
    raw = _as_bytes(data)
    count = -(-raw.size // BLOCK_BYTES)
    if checks.shape != (count, 2):
        raise RaftmetaError("bad_field", f"{raw.size} bytes have block checks of shape {(count, 2)}, found {checks.shape}")
    made = checks.copy()
    for number in numbers:
        if not 0 <= number < count:
            raise RaftmetaError("bad_field", f"the tensor has blocks 0..{count - 1}, found {number}")
        made[number] = block_checks(raw[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES], using)
    return made


def blocks_within(begin: int, end: int) -> range:
    """Numbers of the blocks that the bytes [begin, end) of a tensor lie in."""
    return range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)) if begin < end else range(0)


def unpack_blocks(data: bytes) -> Words:
    """The block checks of these bytes. Raises RaftmetaError bad_field for a broken pair."""
    if len(data) % 16:
        raise RaftmetaError("bad_field", f"block checks come in pairs of 16 bytes, found {len(data)} bytes")
    return np.frombuffer(data, "<u8").astype(np.uint64).reshape(-1, 2)


@cache
def keys() -> Words:
    """k[0] ... k[8192], read-only: SHAKE-128 of the seed as little-endian u64, each made odd."""
    stream = hashlib.shake_128(_KEY_SEED).digest((WORDS + 1) * 8)
    made = np.frombuffer(stream, "<u8").astype(np.uint64) | np.uint64(1)
    made.flags.writeable = False
    return made


@cache
def backend(name: str | None = None) -> Backend:
    """A checked backend: "numba", "numpy", "torch", or the faster of the first two that is installed.

    Raises RaftmetaError integrity when its check fails. Torch is for bytes in a device's memory (`vector_torch.block_checks`).
    """
    if name is None:
        try:
            return backend("numba")
        except ImportError:  # not installed, or not for this NumPy
            return backend("numpy")
    if name not in BACKENDS:
        raise RaftmetaError("bad_field", f"vector backend {name!r} is unknown, expected one of {', '.join(BACKENDS)}")
    made = Backend(name, importlib.import_module(f"consistency.vector_{name}").block_sums)
    self_check(made)
    return made


def self_check(candidate: Backend) -> None:
    """Raises RaftmetaError integrity unless the backend answers both stored vectors."""
    for data, expected in (CHECK_SHORT, CHECK_LONG):
        found = tensor_entry(data, "U8", (len(data),), candidate).entry
        if found != expected:
            raise RaftmetaError(
                "integrity",
                f"vector backend {candidate.name!r} fails its check over {len(data)} bytes: expected entry {expected}, found {found}",
            )


def _as_bytes(data: Buffer) -> NDArray[np.uint8]:
    """The same memory as flat bytes. Raises RaftmetaError bad_field unless it is contiguous."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise RaftmetaError("bad_field", "the tensor's bytes must be contiguous in memory")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view.cast("B"), np.uint8)


def _add_tail(out: Words, tail: bytes, index: int) -> None:
    """Adds the last word, padded with zeros, which stands at `index` of the last block."""
    padded = tail.ljust(8, b"\0")
    low, high = int(keys()[index]), int(keys()[index + 1])
    out[-1, 0] = (int(out[-1, 0]) + int.from_bytes(padded, "little") * low) & _MASK
    out[-1, 1] = (int(out[-1, 1]) + int.from_bytes(padded, "big") * high) & _MASK
