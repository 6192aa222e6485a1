"""The Open Inference Protocol v2 in JSON: bodies in, typed tensors out, and back. Pure.

Refuses what has two readings: repeated keys, numbers that JSON does not have, data whose length is not the product of its shape, values
outside their datatype, text where numbers belong. The binary extension is not spoken. Errors carry the HTTP status and one sentence; the
protocol's error body has a single member, `error`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from node_agent.messages import Inferred, Tensor
from raftmeta import strict_json
from raftmeta.core.errors import RaftmetaError

MAX_INPUTS = 16
MAX_RANK = 8
MAX_DIM = 2**31  # more elements than any body holds
MAX_ID = 256  # characters of a request id
MAX_NAME = 256
PIECE = 1 << 16  # elements that are looked at in one call

# OIP name -> numpy's little-endian type; BYTES is text and has none
DATATYPES: dict[str, str] = {
    "BOOL": "|b1", "UINT8": "|u1", "INT8": "|i1", "UINT16": "<u2", "INT16": "<i2", "UINT32": "<u4", "INT32": "<i4",
    "UINT64": "<u8", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


Header = tuple[bytes, bytes]


class ServeError(Exception):
    """An answer that is no result. `code` is of a problem body, where the status does not say it."""

    def __init__(self, status: int, message: str, retry_after_s: int = 0, *, code: str = "", headers: tuple[Header, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.code = code
        self.headers = headers


class InferRequest(NamedTuple):
    id: str | None
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]


class _Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[int, ...]
    datatype: str
    data: list[Any]
    parameters: dict[str, Any] = {}


class _Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    parameters: dict[str, Any] = {}


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    inputs: tuple[_Input, ...]
    id: str | None = None
    outputs: tuple[_Output, ...] = ()
    parameters: dict[str, Any] = {}


def parse_infer(body: bytes, limit: int) -> InferRequest:
    """The request of an infer body. Raises ServeError 400 or 413."""
    try:
        request = msgspec.convert(strict_json.load_object(body, limit), _Body)
    except RaftmetaError as cause:
        raise ServeError(413 if cause.code == "body_too_large" else 400, cause.detail) from cause
    except msgspec.ValidationError as cause:
        raise ServeError(400, f"the request does not fit the protocol: {cause}") from cause
    if request.id is not None and len(request.id) > MAX_ID:
        raise ServeError(400, f"id has {len(request.id)} characters, the limit is {MAX_ID}")
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        raise ServeError(400, f"{len(request.inputs)} inputs, expected 1..{MAX_INPUTS}")
    if len(request.outputs) > MAX_INPUTS:
        raise ServeError(400, f"{len(request.outputs)} outputs, the limit is {MAX_INPUTS}")
    for what, items in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len({item.name for item in items}) != len(items):
            raise ServeError(400, f"two {what} have the same name")
    _refuse_parameters(request)
    return InferRequest(request.id, tuple(_tensor(item) for item in request.inputs), tuple(item.name for item in request.outputs))


def infer_body(model: str, request_id: str | None, result: Inferred) -> bytes:
    """The JSON of an answer; an id that was given comes back, the empty one too."""
    body: dict[str, Any] = {"model_name": model, "model_version": result.version}
    if request_id is not None:
        body["id"] = request_id
    body["outputs"] = [
        {"name": item.name, "datatype": item.datatype, "shape": item.shape, "data": _values(item)} for item in result.outputs
    ]
    return msgspec.json.encode(body)


def error_body(message: str) -> bytes:
    return msgspec.json.encode({"error": message})


def _refuse_parameters(request: _Body) -> None:
    """What a parameter asks for is done or refused: tensors as JSON are what is sent anyway, everything else is not spoken here."""
    places = [("the request", request.parameters, "binary_data_output")]
    places += [(f"input {item.name[:MAX_NAME]!r}", item.parameters, "") for item in request.inputs]
    places += [(f"output {item.name[:MAX_NAME]!r}", item.parameters, "binary_data") for item in request.outputs]
    for where, parameters, known in places:
        for name, value in parameters.items():
            if name != known or value is not False:
                asked = f"parameter {name[:MAX_NAME]!r} with value {msgspec.json.encode(value).decode()[:40]}"
                raise ServeError(400, f"{where}: {asked} is not supported; leave it out")


def _tensor(item: _Input) -> Tensor:
    what = f"input {item.name[:MAX_NAME]!r}"
    if not item.name or len(item.name) > MAX_NAME:
        raise ServeError(400, f"{what}: the name is empty or longer than {MAX_NAME} characters")
    if any(abs(dim) > MAX_DIM for dim in item.shape):  # may have more digits than can be printed
        raise ServeError(400, f"{what}: a dimension of its shape exceeds {MAX_DIM}")
    if not 1 <= len(item.shape) <= MAX_RANK or min(item.shape) < 1:
        raise ServeError(400, f"{what}: shape {list(item.shape)[:MAX_RANK]} needs 1..{MAX_RANK} dimensions of at least 1")
    if item.datatype != "BYTES" and item.datatype not in DATATYPES:
        raise ServeError(400, f"{what}: datatype {item.datatype[:20]!r} is unknown")
    values = _flat(item, what)
    if item.datatype == "BYTES":
        return Tensor(item.name, "BYTES", item.shape, _texts(values, what))
    return Tensor(item.name, item.datatype, item.shape, _packed(values, item.datatype, what))


def _flat(item: _Input, what: str) -> list[Any]:
    """The elements in row-major order; `data` is flat, or nested exactly as the shape says."""
    count = math.prod(item.shape)
    values: list[Any] = item.data
    if values and isinstance(values[0], list):
        rows: list[Any] = [values]
        for dim in item.shape:
            if any(not isinstance(row, list) or len(row) != dim for row in rows):
                raise ServeError(400, f"{what}: nested data does not have the shape {list(item.shape)}")
            rows = [value for row in rows for value in row]
        values = rows
    if len(values) != count:
        raise ServeError(400, f"{what}: data has {len(values)} elements, the shape has {count}")
    return values


def _texts(values: list[Any], what: str) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise ServeError(400, f"{what}: BYTES takes strings, found {type(value).__name__}")
        if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
            raise ServeError(400, f"{what}: a string holds a lone surrogate")
    return tuple(values)


def _packed(values: list[Any], datatype: str, what: str) -> bytes:
    """Piece by piece: one call over millions of values keeps every other thread of the process waiting."""
    dtype = np.dtype(DATATYPES[datatype])
    pieces = (values[begin : begin + PIECE] for begin in range(0, len(values), PIECE))
    return b"".join(_packed_piece(piece, dtype, datatype, what) for piece in pieces)


def _packed_piece(values: list[Any], dtype: np.dtype[Any], datatype: str, what: str) -> bytes:
    kinds: set[type] = {bool} if dtype.kind == "b" else {int} if dtype.kind in "iu" else {int, float}
    strangers = set(map(type, values)) - kinds
    if strangers:
        raise ServeError(400, f"{what}: {datatype} does not take {sorted(kind.__name__ for kind in strangers)[0]}")
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if min(values) < bounds.min or max(values) > bounds.max:
            raise ServeError(400, f"{what}: a value is outside {datatype}")
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=dtype)
    except OverflowError as cause:
        raise ServeError(400, f"{what}: a value is outside {datatype}") from cause
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ServeError(400, f"{what}: a value is outside {datatype}")
    return array.tobytes()


def _values(item: Tensor) -> Any:
    if isinstance(item.data, tuple):
        return item.data
    return np.frombuffer(item.data, dtype=DATATYPES[item.datatype]).tolist()
