"""Versions of a small sentence encoder that answer differently, and what each should answer, computed without the product.

All share the layout of the first; each has every weight matrix of its own, so an answer that mixes the weights of two versions is the
answer of neither. A heavy version has many bytes in few tensors: staging it takes long, binding it does not.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.encoder_answers import answer_of
from tests.support.tiny_encoder import write_encoder

TEXTS = ("hello world", "one two three model zone switch")
HIDDEN = 128
MIN_DISTANCE = 1e-2  # between the answers of two versions in a row; ten times what a client tolerates


def label_of(number: int) -> str:
    return f"{number}.0.0"


def write_versions(root: Path, count: int, hidden: int = HIDDEN) -> list[Path]:
    """`count` directories below `root`, of versions 1.0.0 and up."""
    first = write_encoder(root / "v1", 1, hidden=hidden)
    weights = load_file(first / "model.safetensors")
    made = [first]
    for number in range(2, count + 1):
        torch.manual_seed(number)
        changed = {name: value + 0.2 * torch.randn_like(value) if value.ndim == 2 else value for name, value in weights.items()}
        directory = root / f"v{number}"
        shutil.copytree(first, directory)
        save_file(changed, directory / "model.safetensors")
        made.append(directory)
    return made


def write_heavy(root: Path, count: int, size_bytes: int) -> list[Path]:
    """Versions of about that many bytes, nearly all of them in one matrix that differs in every word."""
    made: list[Path] = []
    for directory in write_versions(root, count, 32):
        weights = load_file(directory / "model.safetensors")
        name = "embeddings.position_embeddings.weight"
        width = weights[name].shape[1]
        rows = size_bytes // (4 * width)
        weights[name] = torch.from_numpy(np.random.default_rng(len(made)).standard_normal((rows, width), np.float32))
        save_file(weights, directory / "model.safetensors")
        config = directory / "config.json"
        config.write_text(config.read_text().replace('"max_position_embeddings": 64', f'"max_position_embeddings": {rows}'))
        made.append(directory)
    return made


def write_answers(directories: Sequence[Path], out: Path) -> None:
    """What each version answers to TEXTS, as an .npz of label -> [texts, width]. Raises RuntimeError for versions that answer alike."""
    answers = {label_of(number): answer_of(directory, TEXTS) for number, directory in enumerate(directories, 1)}
    values = list(answers.values())
    for before, after in pairwise(values):
        if float(np.abs(before - after).max()) < MIN_DISTANCE:
            raise RuntimeError("two versions in a row answer alike; a wrong label would not show")
    np.savez(out, allow_pickle=False, **answers)
