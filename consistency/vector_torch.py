"""Block sums of the weight-consistency vector with torch: for bytes that lie in a device's memory, computed where they lie.

The only file of this package that imports torch, and only when this backend is asked for by name. Torch has no unsigned 64-bit product on
every device, so words are int64: products and sums keep their low 64 bits, which are the same with and without a sign. Should a device
saturate or trap instead, `require` refuses it, as the other backends are refused, before anything is believed. The bytes of a word are
reversed on the device. Work goes piece by piece; a piece, its products and its swapped copy together take at most `EXTRA_BYTES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from consistency import vector
from consistency.vector import BLOCK_BYTES, WORDS, Words
from raftmeta.core.errors import RaftmetaError

EXTRA_BYTES: Final = 64 << 20
PIECE_BYTES: Final = EXTRA_BYTES // 4  # a copy of it, its products and its swapped words, and room for the allocator's rounding
_WORD: Final = 8


def block_sums(words: Words, native_keys: Words, swapped_keys: Words, out: Words) -> None:
    """See consistency.vector.Kernel: host memory, which may be read-only and begin at any byte, so each piece is copied first."""
    keys = _on(torch.device("cpu"), native_keys), _on(torch.device("cpu"), swapped_keys)
    step = PIECE_BYTES // _WORD
    for begin in range(0, words.size, step):
        piece = np.zeros(-(-min(step, words.size - begin) // WORDS) * WORDS, np.int64)  # a short block counts as padded with zeros
        given = words[begin : begin + step]
        piece[: given.size] = given.view(np.int64)
        sums = _sums(torch.from_numpy(piece).view(-1, WORDS), *keys)
        first = begin // WORDS
        out[first : first + len(sums)] = unsigned(sums)


def block_checks(data: Tensor) -> Words:
    """Checks [blocks, 2] of flat bytes (uint8) that begin a block, on whichever device they lie; returns once they are computed.

    What writes the bytes comes before, on the device's current stream or waited for. Raises RaftmetaError bad_field.
    """
    return unsigned(enqueue(data).cpu())


def enqueue(data: Tensor) -> Tensor:
    """The same as int64 [blocks, 2] on the device, asked for and perhaps not computed yet."""
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.data_ptr() % _WORD:
        found = f"{data.dtype} of {data.dim()} dimensions at {data.data_ptr():#x}"
        raise RaftmetaError("bad_field", f"block checks are computed from flat bytes at a multiple of {_WORD}, found {found}")
    low, high = _keys(data.device)
    native, swapped = (low, high) if sys.byteorder == "little" else (high, low)
    size = data.numel()
    whole = size - size % BLOCK_BYTES
    parts = [
        _sums(data[begin : min(begin + PIECE_BYTES, whole)].view(torch.int64).view(-1, WORDS), native, swapped)
        for begin in range(0, whole, PIECE_BYTES)
    ]
    if whole < size:
        last = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=data.device)
        last[: size - whole] = data[whole:]
        parts.append(_sums(last.view(torch.int64).view(1, WORDS), native, swapped))
    sums = torch.cat(parts) if parts else torch.zeros((0, 2), dtype=torch.int64, device=data.device)
    return sums if native is low else sums.flip(1)


def unsigned(sums: Tensor) -> Words:
    """The same memory of the host as block checks."""
    words: Words = sums.numpy().view(np.uint64)
    return words


def require(device: torch.device, checks: Callable[[Tensor], Words] = block_checks) -> None:
    """Raises RaftmetaError integrity unless this device answers the stored vectors as bytes of its own memory; `checks` computes them."""
    for data, expected in (vector.CHECK_SHORT, vector.CHECK_LONG):
        there = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(device)
        entry = vector.entry_of("U8", (len(data),), len(data), checks(there))
        if entry != expected:
            detail = f"the vector on {device} fails its check over {len(data)} bytes: expected entry {expected}, found {entry}"
            raise RaftmetaError("integrity", detail)


def _sums(blocks: Tensor, native_keys: Tensor, swapped_keys: Tensor) -> Tensor:
    """Sums [blocks, 2] of int64 words [blocks, WORDS]; the products of one lane are let go before those of the other are made."""
    sums = torch.empty((len(blocks), 2), dtype=torch.int64, device=blocks.device)
    torch.sum(blocks * native_keys, dim=1, out=sums[:, 0])
    swapped = blocks.view(torch.uint8).view(-1, WORDS, _WORD).flip(-1).view(torch.int64).view(-1, WORDS)
    torch.sum(swapped.mul_(swapped_keys), dim=1, out=sums[:, 1])
    return sums


@cache
def _keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """k[0..8191] and k[1..8192] on this device."""
    keys = vector.keys()
    return _on(device, keys[:-1]), _on(device, keys[1:])


def _on(device: torch.device, keys: Words) -> Tensor:
    return torch.from_numpy(np.array(keys).view(np.int64)).to(device)
