"""Small safetensors files and model directories for tests, written byte by byte so that they can also be wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]  # name -> dtype, shape, bytes


def header_of(tensors: Tensors) -> dict[str, Any]:
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    return header


def file_bytes(header: Mapping[str, Any] | str, data: bytes) -> bytes:
    """A file with this header, right or wrong; a str is taken as the JSON text itself."""
    text = header if isinstance(header, str) else json.dumps(header)
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + data


def safetensors_bytes(tensors: Tensors) -> bytes:
    return file_bytes(header_of(tensors), b"".join(data for _, _, data in tensors.values()))


def tiny_tensors(seed: int = 0) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Several dtypes, an empty tensor, a scalar, one that crosses blocks and begins at an odd byte."""
    make = lambda size: bytes((seed + 7 * i + i // 251) % 256 for i in range(size))  # noqa: E731
    return {
        "flag": ("BOOL", (3,), b"\1\0\1"),
        "big": ("F16", (100, 400), make(80_000)),
        "empty": ("F32", (0, 4), b""),
        "scalar": ("F64", (), make(8)),
        "last.weight": ("F32", (2, 3), make(24)),
    }


def write_model(root: Path, tensors: Tensors | None = None, config: Mapping[str, Any] | None = None) -> Path:
    """A directory as Hugging Face lays it out: config, tokenizer, one weights file."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config or {"model_type": "tiny"}))
    (root / "tokenizer.json").write_text("{}")
    (root / "README.md").write_text("A model.\n")
    (root / "model.safetensors").write_bytes(safetensors_bytes(tensors if tensors is not None else tiny_tensors()))
    return root
