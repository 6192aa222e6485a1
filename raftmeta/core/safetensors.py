"""The gate before every safetensors file: what its header claims must be exact, or nothing is read. Pure.

Stricter than the library that loads the file: strict JSON with no repeated key, every tensor of a known dtype and exactly as many bytes as
its shape needs, ranges that tile the data section without gap, overlap or trailing byte, names that fit into a manifest. A header that
passes may be trusted to locate every byte of the file. A refusal is RaftmetaError bad_manifest and names the tensor, what was expected and
what was found.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec

from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import DTYPE_BITS, MAX_RANK, MAX_SIZE_BYTES, MAX_TENSORS, tensor_bytes

LENGTH_BYTES = 8  # the file begins with the length of its JSON header, u64 little-endian
MAX_HEADER_BYTES = 16 << 20  # a large MoE of 90,000 tensors has 11 MB
MAX_NAME_BYTES = 1024
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


class HeaderTensor(msgspec.Struct, frozen=True, gc=False):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # absolute in the file
    end: int


class Header(msgspec.Struct, frozen=True):
    tensors: tuple[HeaderTensor, ...]  # in order of their bytes
    data_begin: int  # first byte after the header


def header_length(first8: bytes, file_size: int) -> int:
    """Length of the JSON that follows the first eight bytes; the head to read is eight bytes longer."""
    if len(first8) < LENGTH_BYTES or file_size < LENGTH_BYTES:
        _refuse("the file is cut inside the length of its header", expected=LENGTH_BYTES, found=min(len(first8), file_size))
    length = int.from_bytes(first8[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        _refuse("the header is too large", expected=f"at most {MAX_HEADER_BYTES} bytes", found=f"{length} bytes")
    if length < len("{}"):
        _refuse("the header is too short for a JSON object", expected="at least 2 bytes", found=f"{length} bytes")
    if LENGTH_BYTES + length > file_size:
        _refuse("the file is cut inside its header", expected=f"{LENGTH_BYTES + length} bytes", found=f"{file_size} bytes")
    return length


def parse_header(head: bytes, file_size: int) -> Header:
    """The header of a file of `file_size` bytes that begins with `head`, which holds at least the whole header."""
    length = header_length(head[:LENGTH_BYTES], file_size)
    data_begin = LENGTH_BYTES + length
    if len(head) < data_begin:
        _refuse("the header was not read to its end", expected=f"{data_begin} bytes", found=f"{len(head)} bytes")
    fields = _load(head[LENGTH_BYTES:data_begin])
    if _METADATA in fields:
        _check_metadata(fields.pop(_METADATA))
    if len(fields) > MAX_TENSORS:
        _refuse("too many tensors", expected=f"at most {MAX_TENSORS}", found=str(len(fields)))
    tensors = [_tensor(name, value, data_begin) for name, value in fields.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end, tensor.name))
    _check_tiling(tensors, data_begin, file_size)
    return Header(tuple(tensors), data_begin)


def _load(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8").rstrip(" ")  # writers pad with spaces so that the data is aligned
        if not (text.startswith("{") and text.endswith("}")):
            _refuse("the header is no JSON object", expected="'{' to '}'", found=repr(text[:1] + text[-1:]))
        value = json.loads(text, object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError) as cause:  # bad UTF-8 and bad JSON are both ValueErrors
        raise RaftmetaError("bad_manifest", f"the header is not strict JSON: {cause}") from cause
    assert isinstance(value, dict)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            _refuse(f"{name[:80]!r} stands twice", tensor=name[:80], expected="once", found="twice")
        made[name] = value
    return made


def _no_float(text: str) -> NoReturn:
    _refuse("a number of the header is no whole number", expected="whole numbers", found=text[:40])


def _check_metadata(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        _refuse(f"{_METADATA} is no map of strings", expected="a map of strings", found=type(value).__name__)


def _tensor(name: str, value: Any, data_begin: int) -> HeaderTensor:
    _check_name(name)
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        found = ", ".join(sorted(value))[:200] if isinstance(value, dict) else type(value).__name__
        _refuse(f"tensor {name!r} has other fields", tensor=name, expected=", ".join(sorted(_FIELDS)), found=found)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(f"tensor {name!r}: the dtype is unknown", tensor=name, expected=f"one of {', '.join(DTYPE_BITS)}", found=repr(dtype)[:40])
    if not _naturals(shape) or len(shape) > MAX_RANK:
        expected = f"at most {MAX_RANK} whole numbers of 0..{MAX_SIZE_BYTES}"
        _refuse(f"tensor {name!r}: the shape is impossible", tensor=name, expected=expected, found=repr(shape)[:200])
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        expected = f"[begin, end] of 0..{MAX_SIZE_BYTES}"
        _refuse(f"tensor {name!r}: the byte range is impossible", tensor=name, expected=expected, found=repr(offsets)[:200])
    begin, end = offsets
    need = tensor_bytes(dtype, tuple(shape))
    if need != end - begin:
        what = f"tensor {name!r}: {dtype} {shape} does not match its byte range"
        _refuse(what, tensor=name, expected=f"{need} bytes", found=f"{end - begin} bytes")
    return HeaderTensor(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _check_name(name: str) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError as cause:  # half of a surrogate pair, written as an escape
        raise RaftmetaError("bad_manifest", f"tensor {name[:80]!r}: the name is no valid Unicode") from cause
    if not 1 <= size <= MAX_NAME_BYTES:
        expected = f"1..{MAX_NAME_BYTES} bytes"
        _refuse(f"tensor {name[:80]!r}: the name is empty or too long", tensor=name[:80], expected=expected, found=f"{size} bytes")
    if any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in name):
        _refuse(f"tensor {name[:80]!r}: the name holds a control character", tensor=name[:80], expected="none", found=repr(name[:80]))


def _naturals(value: Any) -> bool:
    """A list of whole numbers in range; `True` is no number here."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_SIZE_BYTES for item in value)


def _check_tiling(tensors: list[HeaderTensor], data_begin: int, file_size: int) -> None:
    position, before = data_begin, "the header"
    for tensor in tensors:
        if tensor.begin != position:
            fault = "leaves a gap after" if tensor.begin > position else "overlaps"
            what = f"tensor {tensor.name!r} {fault} {before}"
            _refuse(what, tensor=tensor.name, expected=f"begin at byte {position}", found=f"byte {tensor.begin}")
        position, before = tensor.end, f"tensor {tensor.name!r}"
    if position != file_size:
        what = "bytes follow the last tensor" if position < file_size else f"the file is cut: {before} ends behind it"
        _refuse(what, tensor=tensors[-1].name if tensors else "", expected=f"{position} bytes", found=f"{file_size} bytes")


def _refuse(what: str, *, expected: str | int, found: str | int, tensor: str = "") -> NoReturn:
    detail = f"{what}: expected {expected}, found {found}"
    raise RaftmetaError("bad_manifest", detail, tensor=tensor, expected=expected, found=found)
