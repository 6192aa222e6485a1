"""What an encoder directory answers, computed from its files by the library alone, without the product."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray


def answer_of(directory: Path, texts: Sequence[str]) -> NDArray[Any]:
    """[texts, width]: the mean over attended tokens, of length one. All directories have the first one's tokenizer and layout."""
    import torch
    from safetensors.torch import load_file

    tokenizer, module = _model(directory.parent, directory)
    batch = tokenizer(list(texts), padding=True, return_tensors="pt")
    module.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    with torch.inference_mode():
        states = module(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    answer: NDArray[Any] = pooled.numpy()
    return answer


_models: dict[Path, Any] = {}


def _model(family: Path, directory: Path) -> Any:
    """Made once for all versions that lie in one directory: a new one takes half a second."""
    from transformers import AutoModel, AutoTokenizer

    if family not in _models:
        _models[family] = (
            AutoTokenizer.from_pretrained(directory, local_files_only=True),
            AutoModel.from_pretrained(directory, local_files_only=True),
        )
    return _models[family]
