"""A version whose answer shows its memory: a table of numbers, of which a request looks two up. Needs torch to be served.

A request names the first and the last number of a block, so an answer tells whether it saw the block as published, as a test damaged it, or
half of each.
"""

from __future__ import annotations

import struct
from pathlib import Path

from consistency.artifact import build_manifest
from raftmeta.core.manifest import Manifest
from tests.support.described_module import write_version
from tests.support.weights import Tensors, safetensors_bytes

PER_BLOCK = 16384  # numbers of 4 bytes
BLOCKS = 24  # more than are written in place
GOOD = 1.0
BAD = 2.0
NAME = "table.weight"
DESCRIPTION = {
    "format": "raftmeta-module-1",
    "input": {"name": "x", "datatype": "INT64", "row": [2]},
    "output": "y",
    "layers": [
        {"name": "table", "type": "Embedding", "num_embeddings": PER_BLOCK * BLOCKS, "embedding_dim": 1},
        {"name": "flat", "type": "Flatten"},
    ],
}


def write_table(directory: Path, value: float = GOOD) -> Path:
    tensors: Tensors = {NAME: ("F32", (PER_BLOCK * BLOCKS, 1), block_of(value) * BLOCKS)}
    write_version(directory, description=DESCRIPTION)
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory


def manifest_of(directory: Path) -> Manifest:
    return build_manifest(directory, sources=[directory.as_uri() + "/"], engine="torch_module", unbound=[])


def block_of(value: float) -> bytes:
    return struct.pack("<f", value) * PER_BLOCK


def body(block: int) -> dict[str, object]:
    """A request for the first and the last number of a block."""
    ids = [block * PER_BLOCK, (block + 1) * PER_BLOCK - 1]
    return {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "INT64", "data": ids}]}
