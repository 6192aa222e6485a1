"""A small chain of layers as a version for the engine `torch_module`: description and weights in a directory. Needs torch to fill it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raftmeta.core.module_description import FILE, FORMAT

CHAIN: dict[str, Any] = {
    "format": FORMAT,
    "input": {"name": "x", "datatype": "FP32", "row": [4]},
    "output": "y",
    "layers": [
        {"name": "first", "type": "Linear", "in_features": 4, "out_features": 6},
        {"name": "norm", "type": "BatchNorm1d", "num_features": 6},
        {"name": "act", "type": "GELU"},
        {"name": "last", "type": "Linear", "in_features": 6, "out_features": 3, "bias": False},
        {"name": "choose", "type": "Softmax"},
    ],
}


def chain(**changes: Any) -> dict[str, Any]:
    return CHAIN | changes


def write_version(directory: Path, seed: int = 1, description: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """`tensors` replace what a chain of the description would hold; None leaves one out. Dots in names are written as `__`."""
    import torch
    from safetensors.torch import save_file

    from raftmeta.core import module_description

    wanted = module_description.read(CHAIN if description is None else description)
    torch.manual_seed(seed)
    state: dict[str, Any] = {
        name: torch.zeros(shape, dtype=torch.int64) if dtype == "I64" else torch.rand(shape) + 0.1
        for name, (dtype, shape) in wanted.tensors.items()
    }
    state |= {name.replace("__", "."): value for name, value in tensors.items()}
    directory.mkdir(parents=True)
    (directory / FILE).write_text(json.dumps(CHAIN if description is None else description))
    save_file({name: value for name, value in state.items() if value is not None}, directory / "model.safetensors")
    return directory
