"""A random two-layer encoder with a real tokenizer in the layout of sentence-transformers, small enough to build in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "b",
    "c",
    "hello",
    "world",
    "one",
    "two",
    "three",
    "model",
    "zone",
    "switch",
    "the",
    "of",
    "to",
    "and",
]


def write_encoder(root: Path, seed: int, *, changed_from: int | None = None, hidden: int = 32) -> Path:
    """A directory with config, tokenizer, pooling settings and weights. With `changed_from` only the last layer is of `seed`."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    config.architectures = ["BertModel"]
    tensors = _weights(torch, BertModel, config, seed if changed_from is None else changed_from)
    if changed_from is not None:
        other = _weights(torch, BertModel, config, seed)
        tensors.update({name: value for name, value in other.items() if name.startswith("encoder.layer.1.")})
    root.mkdir(parents=True)
    (root / "config.json").write_text(config.to_json_string())
    save_file(tensors, root / "model.safetensors")
    (root / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (root / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64})
    )
    modules = ["Transformer", "Pooling", "Normalize"]
    listed = [{"idx": i, "name": str(i), "path": f"{i}_{m}", "type": f"sentence_transformers.models.{m}"} for i, m in enumerate(modules)]
    (root / "modules.json").write_text(json.dumps(listed))
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True, "word_embedding_dimension": hidden}))
    return root


def _weights(torch: Any, kind: Any, config: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    with torch.no_grad():
        module = kind(config)
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return {name: value.detach().clone().contiguous() for name, value in module.state_dict().items() if value.is_floating_point()}
