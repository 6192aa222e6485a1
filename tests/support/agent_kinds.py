"""What the agents of tests serve: versions for each engine, and the request that they are asked with all the time.

The encoder is what most users serve; each of its processes loads libraries for seconds. Tests that are about processes and not about what
they compute take the chain of layers, on a node that loads nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from consistency.artifact import build_manifest
from raftmeta.core.manifest import Manifest
from tests.support.described_module import write_version
from tests.support.tiny_encoder import write_encoder

TEXTS = ["hello world", "one two three model zone switch"]
NUMBERS = [1.0, 2.0, 3.0, 4.0, 0.5, -1.0, 0.0, 2.0]


class Kind(NamedTuple):
    engine: str
    body: Mapping[str, Any]  # of a request
    write: Callable[..., Path]  # (directory, seed, *, changed_from=None): with changed_from only the last layer is of the seed

    def manifest_of(self, directory: Path) -> Manifest:
        return build_manifest(directory, sources=[directory.as_uri() + "/"], engine=self.engine, unbound=[])


def _write_chain(directory: Path, seed: int, *, changed_from: int | None = None) -> Path:
    if changed_from is None:
        return write_version(directory, seed)
    return write_version(directory, changed_from, last__weight=_last_of(seed))


def _last_of(seed: int) -> Any:
    import torch

    return torch.rand((3, 6), generator=torch.Generator().manual_seed(seed)) + 0.1


ENCODER = Kind("hf", {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": TEXTS}]}, write_encoder)
CHAIN = Kind("torch_module", {"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": NUMBERS}]}, _write_chain)
