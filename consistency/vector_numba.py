"""Block sums of the weight-consistency vector, compiled by numba: the backend of an agent.

Two neighbouring blocks run in one loop: they share the key loads and give the memory system two streams, which measured 10 GB/s against
8 GB/s for one block at a time (a memory copy of the same run: 11.7). From the cache it does 21 GB/s, against 19 with whole products. The
interpreter lock is released. Compiled at import in about half a second and not cached on disk, because numba's cache files are pickles, and
this program reads no pickle. Indices are not checked in here: the caller (`Backend.sums`) has fixed the shapes.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray


def _swap_bytes(word: Any) -> Any:
    # The compiler recognises this as one byte shuffle.
    bytes_apart, pairs_apart = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
    eight, sixteen, half = np.uint64(8), np.uint64(16), np.uint64(32)
    word = ((word >> eight) & bytes_apart) | ((word & bytes_apart) << eight)
    word = ((word >> sixteen) & pairs_apart) | ((word & pairs_apart) << sixteen)
    return (word >> half) | (word << half)


_swap = numba.njit(inline="always")(_swap_bytes)


def _products_of(word: Any, key: Any, other: Any) -> Any:
    # Of the word and a key, then of its swapped bytes and the other key: the product of the lower halves, and the sum of the cross terms.
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    mirrored = _swap(word)
    return (
        (word & low) * (key & low),
        (word & low) * (key >> half) + (word >> half) * (key & low),
        (mirrored & low) * (other & low),
        (mirrored & low) * (other >> half) + (mirrored >> half) * (other & low),
    )


_products = numba.njit(inline="always")(_products_of)


def _block_sums(words: Any, native_keys: Any, swapped_keys: Any, out: Any) -> None:
    # Of a product mod 2^64 the two cross terms of its halves count for the upper half alone, so their sum is shifted once at the end:
    # the processor multiplies 32 bits by 32 and would shift and add for every word.
    half = np.uint64(32)
    size = native_keys.size
    pairs = words.size // (2 * size)
    for pair in range(pairs):
        first, second = 2 * pair * size, (2 * pair + 1) * size
        native_0 = swapped_0 = native_1 = swapped_1 = np.uint64(0)
        cross_0 = swapped_cross_0 = cross_1 = swapped_cross_1 = np.uint64(0)
        for i in range(size):
            key, other = native_keys[i], swapped_keys[i]
            add, add_cross, add_swapped, add_swapped_cross = _products(words[first + i], key, other)
            native_0, cross_0 = native_0 + add, cross_0 + add_cross
            swapped_0, swapped_cross_0 = swapped_0 + add_swapped, swapped_cross_0 + add_swapped_cross
            add, add_cross, add_swapped, add_swapped_cross = _products(words[second + i], key, other)
            native_1, cross_1 = native_1 + add, cross_1 + add_cross
            swapped_1, swapped_cross_1 = swapped_1 + add_swapped, swapped_cross_1 + add_swapped_cross
        out[2 * pair, 0], out[2 * pair, 1] = native_0 + (cross_0 << half), swapped_0 + (swapped_cross_0 << half)
        out[2 * pair + 1, 0], out[2 * pair + 1, 1] = native_1 + (cross_1 << half), swapped_1 + (swapped_cross_1 << half)
    for block in range(2 * pairs, out.shape[0]):  # at most a whole one and a short one
        start = block * size
        native = swapped = np.uint64(0)
        for i in range(min(size, words.size - start)):
            word = words[start + i]
            native += word * native_keys[i]
            swapped += _swap(word) * swapped_keys[i]
        out[block, 0], out[block, 1] = native, swapped


# Input may be read-only (shared memory of another process) and begin at any byte of a file.
_input = types.Array(types.uint64, 1, "C", readonly=True, aligned=False)
_output = types.Array(types.uint64, 2, "C")
_signature = types.void(_input, _input, _input, _output)
_compiled = numba.njit([_signature], nogil=True, error_model="numpy", boundscheck=False)(_block_sums)


def block_sums(
    words: NDArray[np.uint64], native_keys: NDArray[np.uint64], swapped_keys: NDArray[np.uint64], out: NDArray[np.uint64]
) -> None:
    """See consistency.vector.Kernel."""
    _compiled(words, native_keys, swapped_keys, out)
