"""Makes a version's file of block checks from its weights, where no source has it: a copy or an upload that is older than the file.

The file follows from the weights alone, so the one that is made here is the published one or none. Reads every tensor of the version once
from the store.
"""

from __future__ import annotations

from collections.abc import Callable

from consistency import block_sidecar
from consistency.vector import BlockVector, Words
from node_agent.store import BlobMismatch, Store, check_blob
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest, TensorEntry

PIECE_BYTES = 4 << 20  # whole blocks


def remake(store: Store, manifest: Manifest, cancelled: Callable[[], bool]) -> bytes | None:
    """The file's bytes; None if a tensor is not in the store, or when it is `cancelled`.

    Raises BlobMismatch when a tensor has to be fetched again, which is gone then, RaftmetaError integrity for an entry of other weights.
    """
    if store.missing((tensor.sha256, tensor.size_bytes) for tensor in manifest.tensors):
        return None
    checks: dict[str, Words] = {}
    into = memoryview(bytearray(PIECE_BYTES))
    for tensor in manifest.tensors:
        found = _checks(store, tensor, into, cancelled)
        if found is None:
            return None
        checks[tensor.name] = found
    return block_sidecar.pack(checks)


def _checks(store: Store, tensor: TensorEntry, into: memoryview, cancelled: Callable[[], bool]) -> Words | None:
    blob = store.open(tensor.sha256, tensor.size_bytes)
    made = BlockVector()
    try:
        while made.size_bytes < tensor.size_bytes:
            if cancelled():
                return None
            piece = into[: min(PIECE_BYTES, tensor.size_bytes - made.size_bytes)]
            blob.read_into(made.size_bytes, piece)
            made.update(piece)
    finally:
        blob.close()
    found = made.finish(tensor.dtype, tensor.shape)
    if found.entry != tensor.entry:
        detail = f"blob {tensor.sha256} of tensor {tensor.name!r}: expected entry {tensor.entry}, found {found.entry}"
        if check_blob(store.path(tensor.sha256), tensor.sha256):
            raise RaftmetaError("integrity", detail, tensor=tensor.name)
        store.discard(tensor.sha256)
        raise BlobMismatch("integrity", detail)
    return found.blocks
