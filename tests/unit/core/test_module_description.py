"""Descriptions of modules: what they ask for, and everything that is refused before a tensor is touched."""

from __future__ import annotations

from typing import Any

import pytest

from raftmeta.core import module_description as descriptions
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.module_description import KINDS, MAX_LAYERS, MAX_SIZE, read, tensor_fault
from tests.support.described_module import CHAIN, chain


def linear(**changes: Any) -> dict[str, Any]:
    return {"name": "a", "type": "Linear", "in_features": 4, "out_features": 4} | changes


def test_a_chain_asks_for_exactly_the_tensors_of_its_layers_and_follows_a_row_through() -> None:
    found = read(CHAIN)
    assert found.tensors == {
        "first.weight": ("F32", (6, 4)), "first.bias": ("F32", (6,)),
        "norm.weight": ("F32", (6,)), "norm.bias": ("F32", (6,)), "norm.running_mean": ("F32", (6,)), "norm.running_var": ("F32", (6,)),
        "norm.num_batches_tracked": ("I64", ()),
        "last.weight": ("F32", (3, 6)),
    }  # fmt: skip
    assert (found.output_row, found.widest, found.dtype) == ((3,), 6, "F32")
    assert found.layers[0].arguments == {"in_features": 4, "out_features": 6, "bias": True}


def test_ids_are_embedded_and_flattened() -> None:
    layers = [
        {"name": "words", "type": "Embedding", "num_embeddings": 10, "embedding_dim": 8},
        {"name": "norm", "type": "LayerNorm", "normalized_shape": 8},
        {"name": "flat", "type": "Flatten"},
    ]
    found = read(chain(input={"name": "ids", "datatype": "INT64", "row": [5]}, layers=layers, dtype="F16"))
    assert (found.output_row, found.tensors["words.weight"], found.tensors["norm.bias"]) == ((40,), ("F16", (10, 8)), ("F16", (8,)))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("another format", chain(format="raftmeta-module-2"), "expected 'raftmeta-module-1'"),
    ("an unknown field", chain(code="import os"), "code"),
    ("an unknown dtype", chain(dtype="I8"), "dtype"),
    ("an input of text", chain(input={"name": "x", "datatype": "BYTES", "row": [4]}), "FP32 or INT64"),
    ("an input without dimensions", chain(input={"name": "x", "datatype": "FP32", "row": []}), "dimensions"),
    ("an input that is too large", chain(input={"name": "x", "datatype": "FP32", "row": [1 << 12, 1 << 12]}), "at most"),
    ("a dimension of -1", chain(input={"name": "x", "datatype": "FP32", "row": [-1]}), "dimensions"),
    ("a name with a dot", chain(output="a.b"), "is no name"),
    ("no layers", chain(layers=[]), "0 layers"),
    ("too many layers", chain(layers=[{"name": f"a{n}", "type": "ReLU"} for n in range(MAX_LAYERS + 1)]), f"{MAX_LAYERS + 1} layers"),
    ("a layer that is not on the list", chain(layers=[{"name": "a", "type": "Lambda"}]), "'Lambda', expected one of BatchNorm1d"),
    ("a type that is a path", chain(layers=[{"name": "a", "type": "torch.nn.Linear"}]), "expected one of"),
    ("a type that is no text", chain(layers=[{"name": "a", "type": ["Linear"]}]), "expected one of"),
    ("layers inside a layer", chain(layers=[linear(layers=[linear()])]), "does not take 'layers'"),
    ("a chain as a layer", chain(layers=[{"name": "a", "type": "Sequential", "layers": [linear()]}]), "expected one of"),
    ("a layer without a name", chain(layers=[{"type": "ReLU"}]), "the name is 'None'"),
    ("a name that reaches elsewhere", chain(layers=[linear(name="a.weight")]), "the name is"),
    ("two layers of one name", chain(layers=[linear(), linear()]), "two layers are called 'a'"),
    ("an argument that is missing", chain(layers=[{"name": "a", "type": "Linear", "in_features": 4}]), "out_features is a whole number"),
    ("an argument that is not taken", chain(layers=[linear(device="cuda")]), "does not take 'device'"),
    ("a size of zero", chain(layers=[linear(out_features=0)]), "out_features is a whole number"),
    ("a size beyond the bound", chain(layers=[linear(out_features=MAX_SIZE + 1)]), "out_features is a whole number"),
    ("a size that is a switch", chain(layers=[linear(out_features=True)]), "out_features is a whole number"),
    ("a size with a fraction", chain(layers=[linear(out_features=4.0)]), "out_features is a whole number"),
    ("a switch that is a number", chain(layers=[linear(bias=1)]), "bias is true or false"),
    ("an eps of zero", chain(layers=[{"name": "a", "type": "LayerNorm", "normalized_shape": 4, "eps": 0.0}]), "eps is a number"),
    ("a row that does not fit", chain(layers=[linear(in_features=5)]), "takes rows that end in 5, a row here has the shape [4]"),
    ("a batch norm over another axis", chain(layers=[{"name": "a", "type": "BatchNorm1d", "num_features": 5}]), "begin with 5"),
    ("a row that grows too large", chain(layers=[linear(out_features=1 << 23)]), "the limit is"),
    ("an embedding of numbers", chain(layers=[{"name": "a", "type": "Embedding", "num_embeddings": 4, "embedding_dim": 2}]), "INT64 input"),
    ("ids without an embedding", chain(input={"name": "x", "datatype": "INT64", "row": [4]}), "first layer of an INT64 input"),
]


@pytest.mark.parametrize(("value", "reason"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_not_a_chain_of_known_layers_within_bounds_is_refused_by_name(value: dict[str, Any], reason: str) -> None:
    with pytest.raises(RaftmetaError, match="bad_manifest") as refused:
        read(value)
    assert reason in refused.value.detail and len(refused.value.detail) < 400


@pytest.mark.parametrize("value", [None, [], "Linear", {"layers": "x"}, chain(layers=[1]), chain(layers={"a": 1})])
def test_what_is_no_description_at_all_is_refused(value: object) -> None:
    with pytest.raises(RaftmetaError, match="bad_manifest"):
        read(value)


def test_what_would_not_fit_is_found_in_both_directions() -> None:
    wanted = read(CHAIN).tensors
    assert tensor_fault(wanted, dict(wanted)) == ""
    assert "asks for F32 [6], the version has none" in tensor_fault(wanted, {k: v for k, v in wanted.items() if k != "norm.running_mean"})
    assert "'more': the description asks for none" in tensor_fault(wanted, wanted | {"more": ("F32", (1,))})
    assert "asks for F32 [6, 4], the version has F16 [6, 4]" in tensor_fault(wanted, wanted | {"first.weight": ("F16", (6, 4))})


def test_every_layer_of_the_list_stands_in_the_documentation() -> None:
    from pathlib import Path

    text = (Path(__file__).resolve().parents[3] / "docs" / "torch-module.md").read_text()
    assert all(f"`{name}`" in text for name in KINDS) and descriptions.FILE in text
