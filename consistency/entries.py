"""What block checks, entries and roots are hashed to; nothing here reads a tensor, and nothing imports NumPy.

A check whose nodes all have the roots that it expects needs no more of the vector than this, and is over before NumPy would be imported.
docs/wcv.md states the format.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import DTYPE_BITS, tensor_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]  # one or two dimensions of 64-bit words

WORDS = 8192  # of one block
BLOCK_BYTES = WORDS * 8
_TENSOR_TAG = b"raftmeta-wcv-1 tensor\0"
_ROOT_TAG = b"raftmeta-wcv-1 root\0"


def entry_of(dtype: str, shape: tuple[int, ...], size_bytes: int, blocks: Words) -> str:
    """The entry of a tensor whose block checks are known. Raises RaftmetaError bad_field when the figures contradict each other."""
    if dtype not in DTYPE_BITS:
        raise RaftmetaError("bad_field", f"dtype {dtype[:20]!r} is unknown, expected one of {', '.join(DTYPE_BITS)}")
    if any(dim < 0 for dim in shape) or tensor_bytes(dtype, shape) != size_bytes:
        raise RaftmetaError("bad_field", f"{dtype} {list(shape)} does not take the {size_bytes} bytes that were given")
    expected = (-(-size_bytes // BLOCK_BYTES), 2)
    if blocks.shape != expected:
        raise RaftmetaError("bad_field", f"{size_bytes} bytes have block checks of shape {expected}, found {blocks.shape}")
    name = dtype.encode()
    sha = hashlib.sha256(_TENSOR_TAG)
    sha.update(struct.pack("<I", len(name)) + name)
    sha.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
    sha.update(struct.pack("<QQ", size_bytes, BLOCK_BYTES))
    sha.update(pack_blocks(blocks))
    return sha.hexdigest()


def root(entries: Mapping[str, str]) -> str:
    """The root of a version: tensor name -> entry, in any order."""
    sha = hashlib.sha256(_ROOT_TAG + struct.pack("<Q", len(entries)))
    for name, entry in sorted((name.encode(), entry) for name, entry in entries.items()):
        sha.update(struct.pack("<I", len(name)) + name + bytes.fromhex(entry))
    return sha.hexdigest()


def pack_blocks(blocks: Words) -> bytes:
    """a and b of every block as little-endian u64, the form that is hashed and sent."""
    return blocks.astype("<u8", copy=False).tobytes()
