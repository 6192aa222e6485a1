"""The description of a module that is a chain of layers: what a version for the engine `torch_module` carries beside its tensors. Pure.

One table says which layers there are, which whole numbers and switches each takes, which tensors it has, and what it makes of the shape of
one row. Nothing else can be said: a layer holds no layers, names no code and no file. Everything is bounded, and shapes are followed
through the chain, so that what does not fit together is refused before a tensor is touched. docs/torch-module.md is for people.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import msgspec

from raftmeta.core.errors import RaftmetaError

FILE = "raftmeta_module.json"
FORMAT = "raftmeta-module-1"
MAX_BYTES = 256 << 10  # of the file
MAX_DEPTH = 6  # of its JSON
MAX_LAYERS = 256
MAX_SIZE = 1 << 24  # of any dimension of a tensor
MAX_ROW_VALUES = 1 << 22  # between two layers, for one row of a request
MAX_RANK = 4  # of one row
DTYPES = ("F32", "F16", "BF16", "F64")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")

Shape = tuple[int, ...]
Tensors = dict[str, tuple[str, Shape]]  # name -> dtype, shape


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    datatype: str  # FP32, or INT64 for an Embedding
    row: Shape  # of one row; a request has as many as it likes


class Layer(msgspec.Struct, frozen=True):
    name: str
    type: str
    arguments: dict[str, int | float | bool]  # complete: those left out have their defaults


class ModuleDescription(msgspec.Struct, frozen=True):
    input: Input
    output: str
    output_row: Shape
    dtype: str  # of every tensor but counters
    layers: tuple[Layer, ...]
    tensors: Tensors  # that the version has to hold, each and no other
    widest: int  # most values of one row between two layers


class _Kind(NamedTuple):
    """One row of the table. `None` as a default: has to be given."""

    arguments: Mapping[str, int | float | bool | None]
    tensors: Callable[[Mapping[str, Any]], Mapping[str, Shape]]
    shape: Callable[[Mapping[str, Any], Shape], Shape | str]  # the row that leaves, or what is wrong with the one that comes
    counters: tuple[str, ...] = ()  # tensors that are I64 whatever the dtype


def _last(size: str, gives: str) -> Callable[[Mapping[str, Any], Shape], Shape | str]:
    def follow(a: Mapping[str, Any], row: Shape) -> Shape | str:
        return (*row[:-1], a[gives]) if row and row[-1] == a[size] else f"takes rows that end in {a[size]}"

    return follow


def _first(a: Mapping[str, Any], row: Shape) -> Shape | str:
    return row if 1 <= len(row) <= 2 and row[0] == a["num_features"] else f"takes rows that begin with {a['num_features']}, of rank 1 or 2"


_NONE: Callable[[Mapping[str, Any]], Mapping[str, Shape]] = lambda a: {}  # noqa: E731
_SAME: Callable[[Mapping[str, Any], Shape], Shape | str] = lambda a, row: row  # noqa: E731
_PLAIN = _Kind({}, _NONE, _SAME)
KINDS: dict[str, _Kind] = {
    "Linear": _Kind(
        {"in_features": None, "out_features": None, "bias": True},
        lambda a: {"weight": (a["out_features"], a["in_features"])} | ({"bias": (a["out_features"],)} if a["bias"] else {}),
        _last("in_features", "out_features"),
    ),
    "Embedding": _Kind(
        {"num_embeddings": None, "embedding_dim": None},
        lambda a: {"weight": (a["num_embeddings"], a["embedding_dim"])},
        lambda a, row: (*row, a["embedding_dim"]),
    ),
    "LayerNorm": _Kind(
        {"normalized_shape": None, "eps": 1e-5},
        lambda a: {"weight": (a["normalized_shape"],), "bias": (a["normalized_shape"],)},
        _last("normalized_shape", "normalized_shape"),
    ),
    "BatchNorm1d": _Kind(
        {"num_features": None, "eps": 1e-5},
        lambda a: dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (a["num_features"],)) | {"num_batches_tracked": ()},
        _first,
        ("num_batches_tracked",),
    ),
    "Flatten": _Kind({}, _NONE, lambda a, row: (math.prod(row),)),
    "Softmax": _Kind({}, _NONE, lambda a, row: row if row else "takes rows of rank 1 or more"),
    **dict.fromkeys(("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid"), _PLAIN),
}


class _Raw(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    input: Input
    output: str
    layers: list[dict[str, Any]]
    dtype: str = "F32"


def read(value: object) -> ModuleDescription:
    """From the JSON value of the file. Raises RaftmetaError bad_manifest with the first thing that is wrong."""
    try:
        raw = msgspec.convert(value, _Raw)
    except msgspec.ValidationError as cause:
        raise RaftmetaError("bad_manifest", f"{FILE}: {cause}") from cause
    _head(raw)
    row, widest = raw.input.row, math.prod(raw.input.row)
    layers: list[Layer] = []
    tensors: Tensors = {}
    for at, item in enumerate(raw.layers):
        layer = _layer(at, item)
        if layer.name in {known.name for known in layers}:
            _refuse(f"two layers are called {layer.name!r}")
        row = _follow(layer, row)
        widest = max(widest, math.prod(row))
        layers.append(layer)
        tensors |= _tensors(layer, raw.dtype)
    embeds = [at for at, layer in enumerate(layers) if layer.type == "Embedding"]
    if embeds != ([0] if raw.input.datatype == "INT64" else []):
        _refuse("an Embedding is the first layer of an INT64 input, and of no other")
    return ModuleDescription(raw.input, raw.output, row, raw.dtype, tuple(layers), tensors, widest)


def _head(raw: _Raw) -> None:
    if raw.format != FORMAT:
        _refuse(f"format is {raw.format[:40]!r}, expected {FORMAT!r}")
    if raw.dtype not in DTYPES:
        _refuse(f"dtype is {raw.dtype[:40]!r}, expected one of {', '.join(DTYPES)}")
    if raw.input.datatype not in ("FP32", "INT64"):
        _refuse(f"the input's datatype is {raw.input.datatype[:40]!r}, expected FP32 or INT64")
    for name in (raw.input.name, raw.output):
        if not _NAME.match(name):
            _refuse(f"{name[:80]!r} is no name: letters, digits and '_', at most 64")
    row = raw.input.row
    if not 1 <= len(row) <= MAX_RANK or not all(1 <= size <= MAX_SIZE for size in row) or math.prod(row) > MAX_ROW_VALUES:
        _refuse(f"a row has 1..{MAX_RANK} dimensions of 1..{MAX_SIZE} and at most {MAX_ROW_VALUES} values, found {list(row)[:8]}")
    if not 1 <= len(raw.layers) <= MAX_LAYERS:
        _refuse(f"{len(raw.layers)} layers, expected 1..{MAX_LAYERS}")


def _layer(at: int, item: dict[str, Any]) -> Layer:
    name, type_name = item.get("name"), item.get("type")
    if not isinstance(name, str) or not _NAME.match(name):
        _refuse(f"layer {at}: the name is {str(name)[:80]!r}, expected letters, digits and '_', at most 64")
    kind = KINDS.get(type_name) if isinstance(type_name, str) else None
    if kind is None:
        _refuse(f"layer {name!r}: the type is {str(type_name)[:80]!r}, expected one of {', '.join(sorted(KINDS))}")
    strangers = sorted(set(item) - {"name", "type", *kind.arguments})
    if strangers:
        _refuse(f"layer {name!r}: {type_name} does not take {strangers[0][:80]!r}")
    arguments: dict[str, Any] = {key: item.get(key, default) for key, default in kind.arguments.items()}
    for key, value in arguments.items():
        fault = _argument_fault(value, kind.arguments[key])
        if fault:
            _refuse(f"layer {name!r}: {key} {fault}")
    return Layer(name, str(type_name), arguments)


def _argument_fault(value: object, default: object) -> str:
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "is true or false"
    if isinstance(default, float):
        return "" if isinstance(value, float) and 0 < value <= 1 else "is a number above 0, at most 1"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE:
        return ""
    return f"is a whole number in 1..{MAX_SIZE}, and has to be given"


def _follow(layer: Layer, row: Shape) -> Shape:
    found = KINDS[layer.type].shape(layer.arguments, row)
    if isinstance(found, str):
        _refuse(f"layer {layer.name!r}: {layer.type} {found}, a row here has the shape {list(row)}")
    if math.prod(found) > MAX_ROW_VALUES or len(found) > MAX_RANK:
        limit = f"{MAX_ROW_VALUES} values in {MAX_RANK} dimensions"
        _refuse(f"layer {layer.name!r}: a row of shape {list(found)} leaves it, the limit is {limit}")
    return found


def _tensors(layer: Layer, dtype: str) -> Tensors:
    kind = KINDS[layer.type]
    shapes = kind.tensors(layer.arguments)
    return {f"{layer.name}.{name}": ("I64" if name in kind.counters else dtype, shape) for name, shape in shapes.items()}


def tensor_fault(wanted: Tensors, given: Tensors) -> str:
    """How the tensors of a version differ from those that its description asks for, "" when they do not."""
    for name in sorted(wanted.keys() | given.keys()):
        want, have = wanted.get(name), given.get(name)
        if want != have:
            text = ["none" if found is None else f"{found[0]} {list(found[1])}" for found in (want, have)]
            return f"tensor {name[:200]!r}: the description asks for {text[0]}, the version has {text[1]}"
    return ""


def _refuse(detail: str) -> NoReturn:
    raise RaftmetaError("bad_manifest", f"{FILE}: {detail}")
