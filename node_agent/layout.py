"""Where each tensor of a version lies inside a slot. Pure: entries in, placements out.

What must stay true: every offset is a multiple of 256 (the strictest alignment any kernel of ours asks for, and four cache lines), no two
placements overlap, equal input gives equal output, and a tensor that the previous layout held with the same name and size keeps its
address, so an unchanged layout moves nothing and a bound module stays bound.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence

import msgspec

from node_agent.refusal import Refusal
from raftmeta.core.manifest import DTYPE_BITS, TensorEntry, tensor_bytes

ALIGNMENT = 256


class Placement(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    name: str
    dtype: str  # name of the safetensors format
    shape: tuple[int, ...]
    offset: int  # from the start of the slot
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    placements: tuple[Placement, ...]  # sorted by name
    total_bytes: int  # the slot must have at least this many
    digest: str  # binds name, dtype, shape and offset of every placement


def plan(tensors: Sequence[TensorEntry], previous: Layout | None = None) -> Layout:
    """Place every tensor. Those that `previous` held with equal name and size keep their offset; the rest fills the gaps, largest first."""
    held = {} if previous is None else {(old.name, old.size_bytes): old.offset for old in previous.placements}
    offsets: dict[str, int] = {}
    moved: list[TensorEntry] = []
    for tensor in tensors:
        if tensor.name in offsets:
            raise Refusal("bad_layout", f"tensor {tensor.name!r}", "one entry per name", "a second one", "plan")
        _require_size(tensor)
        kept = held.get((tensor.name, tensor.size_bytes))
        if kept is None:
            moved.append(tensor)
        offsets[tensor.name] = 0 if kept is None else kept
    if len(moved) == len(tensors):
        offsets.update(_pack(moved))
    elif moved:
        kept_spans = [(offsets[t.name], offsets[t.name] + t.size_bytes) for t in tensors if (t.name, t.size_bytes) in held]
        offsets.update(_fill(moved, kept_spans))
    return _layout(Placement(t.name, t.dtype, t.shape, offsets[t.name], t.size_bytes) for t in tensors)


def fit(tensors: Sequence[TensorEntry], previous: Layout | None, slot_bytes: int) -> Layout:
    """The layout that keeps most addresses and fits into the slot. Raises Refusal no_headroom with the numbers."""
    layout = plan(tensors, previous)
    if layout.total_bytes > slot_bytes and previous is not None:
        layout = plan(tensors)  # gaps left by earlier versions do not count against this one
    if layout.total_bytes > slot_bytes:
        raise Refusal("no_headroom", "slot", f"at least {layout.total_bytes} bytes", f"{slot_bytes} bytes", "plan")
    return layout


def align(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _require_size(tensor: TensorEntry) -> None:
    """A tensor that is larger than its place would run into its neighbour."""
    if tensor.dtype not in DTYPE_BITS or tensor_bytes(tensor.dtype, tensor.shape) != tensor.size_bytes:
        what = f"{tensor.dtype} {list(tensor.shape)} in {tensor.size_bytes} bytes"
        raise Refusal("bad_layout", f"tensor {tensor.name!r}", "a known dtype whose shape takes the bytes given", what, "plan")


def _pack(tensors: Sequence[TensorEntry]) -> dict[str, int]:
    """One after another in order of name."""
    offsets: dict[str, int] = {}
    cursor = 0
    for tensor in sorted(tensors, key=lambda t: t.name):
        offsets[tensor.name] = cursor
        cursor += align(tensor.size_bytes)
    return offsets


def _fill(tensors: Sequence[TensorEntry], kept: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Each into the largest gap between what is kept, or behind everything: n log n, where best fit would be quadratic."""
    gaps: list[tuple[int, int]] = []  # (-size, begin): heapq pops the largest, then the lowest address
    cursor = 0
    for begin, end in sorted(kept):
        if begin > cursor:
            heapq.heappush(gaps, (cursor - begin, cursor))
        cursor = max(cursor, align(end))
    offsets: dict[str, int] = {}
    for tensor in sorted(tensors, key=lambda t: (-t.size_bytes, t.name)):
        need = align(tensor.size_bytes)
        if gaps and -gaps[0][0] >= need:
            size, begin = heapq.heappop(gaps)
            if need < -size:
                heapq.heappush(gaps, (size + need, begin + need))
        else:
            begin, cursor = cursor, cursor + need
        offsets[tensor.name] = begin
    return offsets


def _layout(placements: Iterable[Placement]) -> Layout:
    ordered = tuple(sorted(placements, key=lambda p: p.name))
    sha = hashlib.sha256(b"raftmeta layout 1\0")
    sha.update(msgspec.msgpack.encode(ordered))
    total = max((align(p.end) for p in ordered), default=0)
    return Layout(ordered, total, sha.hexdigest())
