"""Probes of a version: inputs with the outputs that its publisher saw, and how near a node has to come to them. Pure.

They are part of the manifest and of the config digest, so nobody can weaken them on the way. What they were made with (padding, kernel,
threads) is recorded to explain a difference, not to forbid one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

MAX_PROBES = 16
MAX_DATA_BYTES = 256 << 10  # of all probes of a version: they travel inside the manifest
MAX_TENSORS = 16
MAX_RANK = 8
MAX_TEXT = 256  # characters of padding and kernel

# bytes an element, the names of the Open Inference Protocol; BYTES is text
DATATYPE_BYTES: dict[str, int] = {
    "BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "UINT32": 4, "INT32": 4, "UINT64": 8, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
MEASURES = ("close", "cosine", "logits")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


class ProbeTensor(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | tuple[str, ...]  # little-endian elements, row-major, or the texts of a BYTES tensor


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    measure: str  # close: element by element; cosine: row by row; logits: the first choice and the divergence of the last dimension
    inputs: tuple[ProbeTensor, ...]
    outputs: tuple[ProbeTensor, ...]  # as the publisher saw them
    limit: float = 0.0  # of the measure: relative tolerance, least cosine, greatest divergence in nats; 0 takes the default
    padding: str = ""  # how rows of different length were made equal
    kernel: str = ""  # what computed it: library, version, device, attention
    threads: int = 0


def whole(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """Their fields by name in their order, also those that were left out."""
    return [msgspec.structs.asdict(probe) for probe in probes]


def digest(probes: Sequence[Probe]) -> str:
    return hashlib.sha256(b"raftmeta probes 1\0" + _encoder.encode(whole(probes))).hexdigest()


def faults(probes: Sequence[Probe]) -> Iterator[str]:
    """Every way in which they contradict themselves."""
    if len(probes) > MAX_PROBES:
        yield f"{len(probes)} probes, the limit is {MAX_PROBES}"
        return
    names = [probe.name for probe in probes]
    if len(set(names)) != len(names):
        yield "two probes have the same name"
    size = sum(_size(tensor) for probe in probes for tensor in (*probe.inputs, *probe.outputs))
    if size > MAX_DATA_BYTES:
        yield f"the probes hold {size} bytes, the limit is {MAX_DATA_BYTES}"
    for probe in probes:
        yield from (f"probe {probe.name[:80]!r}: {fault}" for fault in _probe_faults(probe))


def _probe_faults(probe: Probe) -> Iterator[str]:
    if not _NAME.match(probe.name):
        yield "the name is outside [A-Za-z0-9][A-Za-z0-9._-]{0,127}"
    if probe.measure not in MEASURES:
        yield f"measure {probe.measure[:20]!r} is not one of {', '.join(MEASURES)}"
    if not 0.0 <= probe.limit <= 1e6:  # also for what is no number
        yield f"limit {probe.limit} is outside 0..1e6"
    if len(probe.padding) > MAX_TEXT or len(probe.kernel) > MAX_TEXT or not 0 <= probe.threads <= 4096:
        yield "padding, kernel or threads are out of bounds"
    for what, tensors in (("input", probe.inputs), ("output", probe.outputs)):
        if not 1 <= len(tensors) <= MAX_TENSORS or len({tensor.name for tensor in tensors}) != len(tensors):
            yield f"{len(tensors)} {what}s, expected 1..{MAX_TENSORS} with names of their own"
        yield from (f"{what} {tensor.name[:80]!r} {fault}" for tensor in tensors if (fault := _tensor_fault(tensor)))
    for tensor in probe.outputs:
        if not tensor.datatype.startswith("FP") and probe.measure != "close":
            yield f"output {tensor.name[:80]!r}: {probe.measure} needs floating point, found {tensor.datatype[:20]}"
        if probe.measure != "close" and len(tensor.shape) < 2:
            yield f"output {tensor.name[:80]!r}: {probe.measure} needs rows, found the shape {list(tensor.shape)}"


def _tensor_fault(tensor: ProbeTensor) -> str:
    if not 1 <= len(tensor.name) <= 256 or len(tensor.shape) > MAX_RANK or any(dim < 0 for dim in tensor.shape):
        return "has no name of 1 to 256 characters or an impossible shape"
    count = 1
    for dim in tensor.shape:
        count *= dim
    if tensor.datatype == "BYTES":
        return "" if isinstance(tensor.data, tuple) and len(tensor.data) == count else f"needs {count} texts"
    if tensor.datatype not in DATATYPE_BYTES:
        return f"has the unknown datatype {tensor.datatype[:20]!r}"
    need = count * DATATYPE_BYTES[tensor.datatype]
    if not isinstance(tensor.data, bytes) or len(tensor.data) != need:
        return f"{tensor.datatype} {list(tensor.shape)} needs {need} bytes"
    return ""


def _size(tensor: ProbeTensor) -> int:
    if isinstance(tensor.data, bytes):
        return len(tensor.data)
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in tensor.data)


_encoder = msgspec.msgpack.Encoder()  # fields stay in their order
