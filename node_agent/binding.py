"""Bind a torch module to the tensors of a slot, without a copy, and prove that nothing else computes the answers.

After binding every parameter is one of the slot's tensors, whole, in its own dtype and shape; every tensor of the version is bound or was
declared unbound; whatever else the module holds (buffers, plain tensor attributes) is listed as derived with its SHA-256, which `check`
compares again at each activation. A parameter that a loader cast, copied or made up lies outside the arena and is refused, and so is
anything left on the meta device: both would answer wrongly without an error. The slot is mapped read-only; a module that writes to a
weight is stopped by the processor. The loader must not be given a module from `meta` with assign=True: buffers stay uninitialised.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from consistency.vector import backend, block_checks
from node_agent import scrub
from node_agent.layout import Layout, Placement
from node_agent.messages import DerivedDamage
from node_agent.refusal import Refusal

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32,
    "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip

NAMES_SHOWN = 10  # in a refusal
DETAIL_CHARACTERS = 500  # of a loader's own message

Loader = Callable[[Any, dict[str, Tensor]], nn.Module]


class BindingError(Refusal):
    """The module was not bound; nothing that serves was touched."""

    def __init__(self, kind: str, subject: str, expected: str, found: str) -> None:
        super().__init__(kind, subject, expected, found, "bind")


class Derived(msgspec.Struct, frozen=True):
    """A tensor of the module that is no tensor of the version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class SlotViews(Mapping[str, Tensor]):
    """The tensors of a slot as torch sees them, by name. They keep the mapping alive."""

    def __init__(self, memory: memoryview, layout: Layout) -> None:
        """`memory` is the slot as `Arena.serving_view` gives it."""
        if layout.total_bytes > memory.nbytes:
            raise BindingError("bad_layout", "slot", f"at least {layout.total_bytes} bytes", f"{memory.nbytes} bytes")
        self.address: int = np.frombuffer(memory, np.uint8).ctypes.data
        self.size_bytes = memory.nbytes
        window = _window(memory, self.address)
        self._tensors = {place.name: _tensor(window, place) for place in layout.placements}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class BoundModule:
    """A module whose parameters are a slot's memory. Use `bind`."""

    def __init__(self, module: nn.Module, views: SlotViews, unbound: Sequence[str]) -> None:
        self.module = module
        self.views = views
        self.bound, self.derived = _inspect(module, views)
        self._blocks = {name: block_checks(_flat(tensor), backend("numpy")) for name, tensor in self._derived_tensors()}
        left = sorted(name for name, view in views.items() if view.numel() and name not in self.bound and name not in unbound)
        if left:
            raise BindingError("uncovered_tensor", "tensors of the version", "each bound or declared unbound", _names(left))

    def check(self) -> None:
        """Nothing moved since binding: same parameters at the same places, same derived bytes. Raises BindingError derived_changed."""
        bound, derived = _inspect(self.module, self.views)
        if bound != self.bound:
            raise BindingError("derived_changed", "bound tensors", f"the {len(self.bound)} at binding", _names(bound ^ self.bound))
        before = {item.name: item for item in self.derived}
        after = {item.name: item for item in derived}
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            raise BindingError("derived_changed", "derived tensors", "the bytes at binding", _names(changed))

    def check_derived(self, name: str) -> DerivedDamage | None:
        """How this derived tensor differs from what it was at binding; None when it does not."""
        expected = self._blocks[name]
        tensor = next((tensor for other, tensor in self._derived_tensors() if other == name), None)
        if tensor is None:
            return DerivedDamage(name, 0, f"{len(expected)} blocks", "no such tensor")
        found = block_checks(_flat(tensor), backend("numpy"))
        if found.shape != expected.shape:
            return DerivedDamage(name, 0, f"{len(expected)} blocks", f"{len(found)} blocks")
        wrong = scrub.wrong_blocks(expected, found)
        if not wrong:
            return None
        return DerivedDamage(name, wrong[0], scrub.sums_text(expected[wrong[0]]), scrub.sums_text(found[wrong[0]]))

    def _derived_tensors(self) -> Iterator[tuple[str, Tensor]]:
        names = {item.name for item in self.derived}
        return ((name, tensor) for name, tensor, _ in _held(self.module) if name in names)


def bind(config: Any, factory: type[nn.Module] | Loader, views: SlotViews, unbound: Sequence[str] = ()) -> BoundModule:
    """A module in evaluation mode over the slot's memory. `factory` is a class with `from_pretrained`, or a loader of its own.

    Raises BindingError: not_bindable, left_on_meta, outside_arena or uncovered_tensor, with the names.
    """
    loader = pretrained(factory) if isinstance(factory, type) else factory
    try:
        module = loader(config, dict(views))
    except (RuntimeError, ValueError, TypeError, KeyError, OSError, ImportError) as cause:  # what loaders raise, wrapped once
        found = " ".join(f"{type(cause).__name__}: {cause}".split())[:DETAIL_CHARACTERS]
        raise BindingError("not_bindable", "module", "one that takes the version's tensors", found) from cause
    module.eval()
    module.requires_grad_(False)
    return BoundModule(module, views, unbound)


def pretrained(model_class: type[nn.Module]) -> Loader:
    """The loader of transformers' model classes: it runs their own initialisation of buffers and assigns the weights."""

    def load(config: Any, tensors: dict[str, Tensor]) -> nn.Module:
        module: nn.Module = model_class.from_pretrained(None, config=config, state_dict=tensors)  # type: ignore[attr-defined]
        return module

    return load


def _window(memory: memoryview, address: int) -> ctypes.Array[ctypes.c_char]:
    """The same bytes as a buffer that torch takes without a warning about read-only memory; it keeps the view alive."""
    window = (ctypes.c_char * memory.nbytes).from_address(address)
    window.memory = memory  # type: ignore[attr-defined]
    return window


def _tensor(window: ctypes.Array[ctypes.c_char], place: Placement) -> Tensor:
    dtype = TORCH_DTYPES.get(place.dtype)
    if dtype is None:
        raise BindingError("bad_layout", f"tensor {place.name!r}", f"one of {', '.join(TORCH_DTYPES)}", place.dtype)
    if place.size_bytes == 0:
        return torch.empty(place.shape, dtype=dtype)
    count = place.size_bytes // dtype.itemsize
    return torch.frombuffer(window, dtype=dtype, count=count, offset=place.offset).reshape(place.shape)


def _inspect(module: nn.Module, views: SlotViews) -> tuple[frozenset[str], tuple[Derived, ...]]:
    """Names of the version's tensors that the module uses, and everything else that it holds."""
    held = list(_held(module))
    left = sorted(name for name, tensor, _ in held if tensor.is_meta)
    if left:
        raise BindingError("left_on_meta", "tensors of the module", "none on the meta device", _names(left))
    places = {view.data_ptr(): (name, view) for name, view in views.items() if view.numel()}
    bound: set[str] = set()
    derived: list[Derived] = []
    outside: list[str] = []
    for name, tensor, is_parameter in held:
        place = places.get(tensor.data_ptr())
        if place is not None and _same(tensor, place[1]):
            bound.add(place[0])
        elif is_parameter and tensor.numel():
            outside.append(name)
        else:
            derived.append(Derived(name, str(tensor.dtype), tuple(tensor.shape), _sha256(tensor)))
    if outside:
        raise BindingError("outside_arena", "parameters", "each one whole tensor of the slot, uncast", _names(sorted(outside)))
    return frozenset(bound), tuple(sorted(derived, key=lambda item: item.name))


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, is it a parameter) of every tensor a module holds, registered or not, repeats included."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name, buffer, False
    for prefix, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for name, tensor in _plain(f"{prefix}.{attribute}".lstrip("."), value):
                    yield name, tensor, False


def _plain(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Tensors held as an attribute, or one level down in a list, tuple or dictionary."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{at}]", item) for at, item in enumerate(value) if isinstance(item, Tensor))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items() if isinstance(item, Tensor))


def _same(tensor: Tensor, view: Tensor) -> bool:
    return tensor.dtype == view.dtype and tensor.shape == view.shape and tensor.is_contiguous()


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(_flat(tensor)).hexdigest()


def _flat(tensor: Tensor) -> memoryview:
    """Its bytes, row-major; a copy only where they do not lie so."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _names(names: Sequence[str] | frozenset[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    return ", ".join(ordered[:NAMES_SHOWN]) + more
