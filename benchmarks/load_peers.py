"""Other ways to bring a safetensors file into memory, each with the settings that it offers; the best of them counts.

None of them but tensorizer checks what it reads. What they return is owned: a tensor that is only a view of the page cache is not loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Peer(NamedTuple):
    name: str
    settings: dict[str, Callable[[], object]]


def all_peers(path: Path, threads: int) -> list[Peer]:
    """`path` is the safetensors file; `threads` computing threads for everybody, and readers as many as each setting says."""
    readers = (1, 2, 4, 16)
    return [
        Peer("safetensors load_file + clone", {"": partial(_safetensors, path)}),
        Peer(
            "fastsafetensors",
            {
                f"threads={n} buffer={kb} kB": partial(_fastsafetensors, path, n, kb)
                for n in readers
                for kb in (1 << 10, 16 << 10, 160 << 10)
            },
        ),
        Peer("runai-model-streamer", {f"concurrency={n}": partial(_runai, path, n) for n in readers}),
        Peer("tensorizer verify_hash", {f"readers={n}": partial(_tensorizer, _tensorized(path), n) for n in (1, threads, 4)}),
    ]


def _safetensors(path: Path) -> None:
    from safetensors.torch import load_file

    loaded = {name: tensor.clone() for name, tensor in load_file(path).items()}
    assert loaded


def _fastsafetensors(path: Path, threads: int, buffer_kb: int) -> None:
    import fastsafetensors

    with redirect_stdout(None):
        loader = fastsafetensors.SafeTensorsFileLoader(None, "cpu", buffer_kb, threads, nogds=True, disable_cache=False)
        loader.add_filenames({0: [str(path)]})
        held = loader.copy_files_to_device()
        tensors = [held.get_tensor(name) for name in loader.get_keys()]
        assert tensors
        held.close()
        loader.close()


def _runai(path: Path, concurrency: int) -> None:
    os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(concurrency)
    import runai_model_streamer

    with runai_model_streamer.SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        held = [tensor for _, tensor in streamer.get_tensors()]
        assert held


def _tensorized(path: Path) -> Path:
    """The same tensors in tensorizer's own format, beside the file."""
    from safetensors.torch import load_file
    from tensorizer import TensorSerializer

    target = path.with_suffix(".tensors")
    if not target.exists():
        serializer: Any = TensorSerializer(str(target))
        serializer.write_state_dict(load_file(path))
        serializer.close()
    return target


def _tensorizer(path: Path, readers: int) -> None:
    from tensorizer import TensorDeserializer

    with TensorDeserializer(str(path), device=torch.device("cpu"), num_readers=readers, verify_hash=True, plaid_mode=False) as loaded:
        assert {name: loaded[name] for name in loaded}
