"""Block sums of the weight-consistency vector in plain NumPy: the backend of the base install.

One pass over a few blocks at a time, so that the scratch array stays in the cache. Integer arithmetic of unsigned arrays wraps modulo 2^64,
which is what the vector asks for. Holds no state and copies no input.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BATCH = 8  # blocks a step: 512 KiB of scratch fit the second-level cache


def block_sums(
    words: NDArray[np.uint64], native_keys: NDArray[np.uint64], swapped_keys: NDArray[np.uint64], out: NDArray[np.uint64]
) -> None:
    """See consistency.vector.Kernel."""
    size = native_keys.size
    whole = words.size // size
    blocks = words[: whole * size].reshape(whole, size)
    scratch = np.empty((min(_BATCH, whole), size), np.uint64)
    for start in range(0, whole, _BATCH):
        batch = blocks[start : start + _BATCH]
        products = scratch[: len(batch)]
        rows = slice(start, start + len(batch))
        np.multiply(batch, native_keys, out=products)
        np.add.reduce(products, axis=1, out=out[rows, 0])
        np.multiply(_swapped(batch), swapped_keys, out=products)
        np.add.reduce(products, axis=1, out=out[rows, 1])
    rest = words[whole * size :]
    if rest.size:
        out[whole, 0] = np.add.reduce(rest * native_keys[: rest.size])
        out[whole, 1] = np.add.reduce(_swapped(rest) * swapped_keys[: rest.size])


def _swapped(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same memory read in the other byte order."""
    return words.view(words.dtype.newbyteorder())
