"""The engine for versions that describe their module: a chain of torch's own layers, built from a table, over the slot's memory.

No code of a version runs: the description names layers of the allowlist (`core.module_description`), and nothing else is looked up by a
name it gives. The chain is built on `meta`, so nothing is allocated or initialised, and every tensor it has is then one of the slot. That
is safe because the description has to ask for exactly the tensors that the version holds, in dtype and shape, buffers included, and
because binding refuses whatever would be left on `meta`: only layers without buffers of their own making stand in the table.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor as TorchTensor
from torch import nn

from consistency import described
from node_agent.binding import TORCH_DTYPES, BindingError, BoundModule, SlotViews, bind
from node_agent.engine.port import BadInput, EngineFault, Instance
from node_agent.messages import DerivedDamage, Tensor, TensorSpec
from raftmeta.core import module_description as descriptions
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.module_description import Layer, ModuleDescription

MAX_ROWS = 256  # of one request
MAX_VALUES = 1 << 26  # between two layers, for all rows of a request: 256 MiB of F32
BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": nn.Linear, "Embedding": nn.Embedding, "LayerNorm": nn.LayerNorm, "BatchNorm1d": nn.BatchNorm1d, "Flatten": nn.Flatten,
    "ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU, "Tanh": nn.Tanh, "Sigmoid": nn.Sigmoid,
    "Softmax": lambda: nn.Softmax(dim=-1),
}  # fmt: skip
assert BUILDERS.keys() == descriptions.KINDS.keys()
_LIBRARY_ERRORS = (ValueError, TypeError, RuntimeError, IndexError)
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class TorchModuleEngine:
    def load(self, version_dir: Path, views: SlotViews, unbound: Sequence[str]) -> Instance:
        description = read(version_dir)
        if unbound:
            raise BindingError("uncovered_tensor", "tensors declared unbound", "none: a description asks for every tensor", unbound[0])
        given = {name: (_NAMES[view.dtype], tuple(view.shape)) for name, view in views.items()}
        fault = descriptions.tensor_fault(description.tensors, given)
        if fault:
            raise BindingError("not_bindable", descriptions.FILE, "exactly the tensors of the version", fault)
        return TorchModuleInstance(bind(description, build, views), description)


def read(directory: Path) -> ModuleDescription:
    """Raises EngineFault not_bindable for a file that is missing, too large, or describes nothing that can be built."""
    try:
        return described.read(directory)
    except OSError as cause:
        raise EngineFault("not_bindable", f"{descriptions.FILE}: {cause.strerror}") from cause
    except RaftmetaError as cause:
        raise EngineFault("not_bindable", cause.detail) from cause


def build(description: ModuleDescription, tensors: dict[str, TorchTensor]) -> nn.Module:
    """The chain over these tensors. Raises RuntimeError when they are not exactly those of its layers."""
    with torch.device("meta"):
        layers = [(layer.name, _layer(layer)) for layer in description.layers]
        chain = nn.Sequential(OrderedDict(layers))
    chain.load_state_dict(tensors, strict=True, assign=True)
    return chain


def _layer(layer: Layer) -> nn.Module:
    return BUILDERS[layer.type](**layer.arguments)


class TorchModuleInstance:
    def __init__(self, bound: BoundModule, description: ModuleDescription) -> None:
        self._bound = bound
        self._description = description
        self._lock = threading.Lock()  # answers one after the other: warming meets a request here
        given = description.input
        self.inputs = (TensorSpec(given.name, given.datatype, (-1, *given.row)),)
        self.outputs = (TensorSpec(description.output, "FP32", (-1, *description.output_row)),)
        self._rows = max(1, min(MAX_ROWS, MAX_VALUES // description.widest))
        first = description.layers[0]
        self._ids = int(first.arguments["num_embeddings"]) if first.type == "Embedding" else 0

    @property
    def derived(self) -> Mapping[str, str]:
        return {item.name: item.sha256 for item in self._bound.derived}

    def check_derived(self, name: str) -> DerivedDamage | None:
        return self._bound.check_derived(name)

    def infer(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> tuple[Tensor, ...]:
        unknown = [name for name in outputs if name != self._description.output]
        if unknown:
            raise BadInput(f"output {unknown[0][:200]!r} is unknown, the model gives {self._description.output}")
        values = self._taken(inputs)
        with self._lock:
            answer = self._run(values)
        data = answer.contiguous().numpy().astype("<f4", copy=False).tobytes()
        return (Tensor(self._description.output, "FP32", tuple(answer.shape), data),)

    def warm(self) -> None:
        """One row of zeros, or of the first id."""
        given = self._description.input
        width = 8 if given.datatype == "INT64" else 4
        try:
            self.infer((Tensor(given.name, given.datatype, (1, *given.row), bytes(width * math.prod(given.row))),), ())
        except (BadInput, EngineFault) as cause:
            raise EngineFault("warmup_failed", str(cause)) from cause

    def check(self) -> None:
        self._bound.check()

    def _taken(self, inputs: Sequence[Tensor]) -> TorchTensor:
        given = self._description.input
        names = [item.name for item in inputs]
        if names != [given.name]:
            raise BadInput(f"the model takes {given.name} alone, found {', '.join(name[:80] for name in names) or 'nothing'}")
        item = inputs[0]
        if item.datatype != given.datatype or not isinstance(item.data, bytes) or tuple(item.shape[1:]) != given.row or not item.shape:
            expected = f"{given.datatype} of shape {[-1, *given.row]}"
            raise BadInput(f"{item.name}: expected {expected}, found {item.datatype} {list(item.shape)}")
        if not 1 <= item.shape[0] <= self._rows:
            raise BadInput(f"{item.name}: {item.shape[0]} rows, this model takes 1..{self._rows}")
        if given.datatype == "INT64":
            return self._integers(item.name, np.frombuffer(item.data, "<i8").reshape(item.shape))
        values = torch.from_numpy(np.frombuffer(item.data, "<f4").astype(np.float32).reshape(item.shape))
        return values.to(TORCH_DTYPES[self._description.dtype])

    def _integers(self, name: str, values: Any) -> TorchTensor:
        if values.min() < 0 or values.max() >= self._ids:
            raise BadInput(f"{name}: values lie in [0, {self._ids}), found {values.min()}..{values.max()}")
        return torch.from_numpy(values.astype(np.int64))

    def _run(self, values: TorchTensor) -> TorchTensor:
        try:
            with torch.inference_mode():
                answer: TorchTensor = self._bound.module(values).float()
        except _LIBRARY_ERRORS as cause:
            raise EngineFault("engine_failed", f"the module raised {type(cause).__name__}: {cause}") from cause
        if not bool(torch.isfinite(answer).all()):
            raise EngineFault("engine_failed", "the module answered with a value that is not finite")
        return answer
