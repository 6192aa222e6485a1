from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from node_agent.binding import TORCH_DTYPES, BindingError, BoundModule, SlotViews, bind  # noqa: E402
from node_agent.device.arena import Arena  # noqa: E402
from node_agent.device.port import SlotRecord  # noqa: E402
from node_agent.layout import Layout, plan  # noqa: E402
from raftmeta.core.manifest import DTYPE_BITS, TensorEntry, tensor_bytes  # noqa: E402

DIGEST = "0" * 64


class Tiny(nn.Module):
    """A layer, a persistent and a non-persistent buffer, and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("ids", torch.arange(5), persistent=False)
        self.table = {"offset": torch.tensor([10.0])}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.table["offset"]


def load(_: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """What a good loader does: build the module for real, then put the version's tensors in place."""
    module = Tiny()
    module.load_state_dict(tensors, strict=False, assign=True)
    return module


def state(dtype: str = "F32", **more: tuple[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {"layer.weight": (dtype, (3, 4)), "layer.bias": ("F32", (3,)), "scale": ("F32", (3,)), **more}


def layout_of(shapes: dict[str, tuple[str, tuple[int, ...]]]) -> Layout:
    return plan([TensorEntry(n, d, s, "f", 0, tensor_bytes(d, s), DIGEST, DIGEST) for n, (d, s) in shapes.items()])


class Slots:
    """An arena whose slots hold float tensors of one value each; mapped read-only like a worker does it."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.layout = layout
        self.writer = Arena.create(path, 1 << 16)
        for slot in (0, 1):
            self.write(slot, float(slot + 1))
        self.reader = Arena.open(path)

    def write(self, slot: int, value: float) -> None:
        self.writer.mark_dirty(slot, SlotRecord(version=str(value)))
        view = self.writer.staging_view(slot)
        for place in self.layout.placements:
            count = place.size_bytes * 8 // DTYPE_BITS[place.dtype]
            view[place.offset : place.end] = torch.full((count,), value).to(TORCH_DTYPES[place.dtype]).view(torch.uint8).numpy().tobytes()
        self.writer.mark_verified(slot, DIGEST, DIGEST)

    def views(self, slot: int) -> SlotViews:
        return SlotViews(self.reader.serving_view(slot), self.layout)


@pytest.fixture
def make(shm: Path) -> Callable[..., Slots]:
    return lambda shapes=None: Slots(shm / "arena", layout_of(state() if shapes is None else shapes))


def answer(bound: BoundModule) -> float:
    with torch.inference_mode():
        return float(bound.module(torch.ones(1, 4))[0, 0])


def test_a_module_computes_with_the_slots_memory_and_follows_it_without_a_copy(make: Callable[..., Slots]) -> None:
    slots = make()
    first, second = bind(None, load, slots.views(0)), bind(None, load, slots.views(1))
    assert (answer(first), answer(second)) == ((4 + 1) * 1 + 10, (8 + 2) * 2 + 10)
    slots.write(0, 3.0)
    assert (answer(first), answer(second)) == ((12 + 3) * 3 + 10, (8 + 2) * 2 + 10)
    first.check()


def test_views_over_read_only_memory_are_made_without_a_warning_and_keep_the_mapping_alive(make: Callable[..., Slots]) -> None:
    slots = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = slots.views(0)["layer.weight"]
    gc.collect()
    with pytest.raises(BufferError):
        slots.reader.close()
    assert weight.sum() == 12
    del weight


def test_every_dtype_of_the_format_has_a_view_with_its_shape_and_bytes(make: Callable[..., Slots]) -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BITS)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {f"t.{dtype}": (dtype, (2, 3)) for dtype in TORCH_DTYPES}
    shapes |= {"scalar": ("BF16", ()), "none": ("F32", (0, 4))}
    views = make(shapes).views(0)
    for name, (dtype, shape) in shapes.items():
        assert (views[name].dtype, tuple(views[name].shape)) == (TORCH_DTYPES[dtype], shape)
        assert views[name].numel() == 0 or views.address <= views[name].data_ptr() < views.address + views.size_bytes
        assert views[name].dtype.itemsize * 8 == DTYPE_BITS[dtype]
    assert len(views) == len(shapes)
    assert bool((views["t.BF16"] == 1).all())


def test_what_the_module_holds_beside_the_version_is_listed_as_derived(make: Callable[..., Slots]) -> None:
    bound = bind(None, load, make().views(0))
    assert bound.bound == {"layer.weight", "layer.bias", "scale"}
    assert [(d.name, d.dtype, d.shape) for d in bound.derived] == [
        ("ids", "torch.int64", (5,)),
        ("table['offset']", "torch.float32", (1,)),
    ]
    assert not bound.module.training
    assert not any(p.requires_grad for p in bound.module.parameters())


def test_a_derived_tensor_that_changed_is_found_by_name(make: Callable[..., Slots]) -> None:
    bound = bind(None, load, make().views(0))
    bound.module.table["offset"] += 1
    with pytest.raises(BindingError, match=r"derived_changed.*table\['offset'\]"):
        bound.check()
    bound.module.table["offset"] -= 1
    bound.check()
    bound.module.extra = torch.zeros(1)
    with pytest.raises(BindingError, match=r"derived_changed.*extra"):
        bound.check()


def test_a_parameter_that_left_the_slot_after_binding_is_found(make: Callable[..., Slots]) -> None:
    bound = bind(None, load, make().views(0))
    bound.module.layer.bias = nn.Parameter(bound.module.layer.bias.clone())
    with pytest.raises(BindingError, match=r"outside_arena.*layer\.bias"):
        bound.check()


def loader(change: Callable[[nn.Module], object]) -> Callable[[Any, dict[str, Tensor]], nn.Module]:
    def changed(config: Any, tensors: dict[str, Tensor]) -> nn.Module:
        module = load(config, tensors)
        change(module)
        return module

    return changed


def from_meta(_: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """The tempting loader that answers garbage."""
    with torch.device("meta"):
        module = Tiny()
    module.load_state_dict(tensors, strict=False, assign=True)
    return module


def test_a_module_made_on_meta_is_refused_with_the_names_that_stayed_there(make: Callable[..., Slots]) -> None:
    with pytest.raises(BindingError, match=r"left_on_meta.*found ids, table\['offset'\]$"):
        bind(None, from_meta, make().views(0))


def test_a_parameter_that_the_loader_copied_cast_or_made_up_is_refused(make: Callable[..., Slots]) -> None:
    slots = make()
    for change in (
        lambda m: setattr(m.layer, "weight", nn.Parameter(m.layer.weight.clone())),
        lambda m: setattr(m.layer, "weight", nn.Parameter(m.layer.weight.double())),
        lambda m: setattr(m.layer, "weight", nn.Parameter(m.layer.weight[:2])),
        lambda m: setattr(m.layer, "weight", nn.Parameter(m.layer.weight.view(4, 3))),
    ):
        with pytest.raises(BindingError, match=r"outside_arena.*layer\.weight"):
            bind(None, loader(change), slots.views(0))


def test_a_tensor_the_version_lacks_is_refused(make: Callable[..., Slots]) -> None:
    shapes = state()
    del shapes["layer.bias"]
    with pytest.raises(BindingError, match=r"outside_arena.*layer\.bias"):
        bind(None, load, make(shapes).views(0))


def test_a_tensor_of_the_version_that_nothing_takes_is_refused_unless_declared_unbound(make: Callable[..., Slots]) -> None:
    views = make(state(**{f"extra{i:02}": ("F32", (2,)) for i in range(12)})).views(0)
    names = [f"extra{i:02}" for i in range(12)]
    with pytest.raises(BindingError, match=r"uncovered_tensor.*extra00, extra01.* and 2 more$"):
        bind(None, load, views)
    with pytest.raises(BindingError, match=r"uncovered_tensor.*found extra11$"):
        bind(None, load, views, names[:-1])
    assert bind(None, load, views, names).bound == {"layer.weight", "layer.bias", "scale"}


def test_a_swapped_dtype_or_shape_is_refused(make: Callable[..., Slots]) -> None:
    slots = make(state() | {"layer.weight": ("F32", (4, 3))})
    with pytest.raises(BindingError, match=r"not_bindable.*RuntimeError.*layer\.weight") as caught:
        bind(None, load, slots.views(0))
    assert caught.value.phase == "bind"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_tied_parameter_is_bound_once_and_a_tied_copy_is_refused(make: Callable[..., Slots]) -> None:
    slots = make()
    tied = bind(None, loader(lambda m: m.add_module("twin", m.layer)), slots.views(0))
    assert tied.bound == {"layer.weight", "layer.bias", "scale"}
    with pytest.raises(BindingError, match=r"outside_arena.*twin\.weight"):
        bind(None, loader(lambda m: m.add_module("twin", nn.Linear(4, 3))), slots.views(0))


def test_a_layout_larger_than_the_slot_is_refused(make: Callable[..., Slots]) -> None:
    slots = make()
    large = layout_of(state(big=("F32", (1 << 15,))))
    with pytest.raises(BindingError, match="bad_layout"):
        SlotViews(slots.reader.serving_view(0), large)
