"""Bodies of the Open Inference Protocol v2 as the checker writes and reads them. Pure.

Numbers become arrays of their own width, so that whole numbers are compared exactly; texts stay texts. An answer that contradicts itself is
refused: it is the node's fault, and no difference of weights.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from raftmeta.core.errors import RaftmetaError
from raftmeta.core.probes import ProbeTensor

MAX_OUTPUTS = 64
MAX_NAME = 256  # characters of a name or label: they are reported and recorded
NUMBERS: dict[str, str] = {
    "BOOL": "?", "UINT8": "u1", "INT8": "i1", "UINT16": "<u2", "INT16": "<i2", "UINT32": "<u4", "INT32": "<i4",
    "UINT64": "<u8", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


class Output(NamedTuple):
    """One tensor of an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | tuple[str, ...]  # of the shape and the datatype; texts of BYTES flat


_Text = Annotated[str, Meta(max_length=MAX_NAME)]


class _Output(msgspec.Struct, frozen=True):
    name: _Text
    datatype: _Text
    shape: tuple[int, ...]
    data: list[Any]


class _Answer(msgspec.Struct, frozen=True):
    model_version: _Text
    outputs: tuple[_Output, ...]


_decode = msgspec.json.Decoder(_Answer).decode
_REALS: frozenset[type] = frozenset({int, float, type(None)})  # JSON has no word for what is not finite: null
_WHOLE: frozenset[type] = frozenset({int})  # anything else would be rounded to one in silence
_FLAGS: frozenset[type] = frozenset({bool})


def request_body(inputs: tuple[ProbeTensor, ...]) -> bytes:
    """JSON of a request for all outputs."""
    return msgspec.json.encode({"inputs": [_written(tensor) for tensor in inputs]})


def read_answer(body: bytes) -> tuple[str, tuple[Output, ...]]:
    """The label that computed it and its outputs by name. Raises RaftmetaError bad_json."""
    try:
        answer = _decode(body)
    except (msgspec.MsgspecError, RecursionError) as cause:  # the latter for an answer that is nested deeply
        raise RaftmetaError("bad_json", f"the answer is none of the inference protocol: {cause}") from cause
    if not 1 <= len(answer.outputs) <= MAX_OUTPUTS or len({output.name for output in answer.outputs}) != len(answer.outputs):
        raise RaftmetaError("bad_json", f"the answer has {len(answer.outputs)} outputs, expected 1..{MAX_OUTPUTS} with names of their own")
    return answer.model_version, tuple(sorted(map(_read, answer.outputs)))


def _read(output: _Output) -> Output:
    what = f"output {output.name[:80]!r}"
    if any(dim < 0 for dim in output.shape) or math.prod(output.shape) != len(output.data):
        raise RaftmetaError("bad_json", f"{what}: {len(output.data)} elements do not make the shape {list(output.shape)[:8]}")
    if output.datatype == "BYTES":
        if not all(isinstance(item, str) for item in output.data):
            raise RaftmetaError("bad_json", f"{what}: BYTES holds something that is no text")
        return Output(output.name, "BYTES", output.shape, tuple(output.data))
    dtype = NUMBERS.get(output.datatype)
    if dtype is None:
        raise RaftmetaError("bad_json", f"{what}: datatype {output.datatype[:20]!r} is unknown")
    if not set(map(type, output.data)) <= _allowed(output.datatype):
        raise RaftmetaError("bad_json", f"{what}: {output.datatype} holds something that is no number of that kind")
    try:
        with np.errstate(over="ignore"):
            values = np.array(output.data, np.dtype(dtype)).reshape(output.shape)
    except (OverflowError, ValueError, TypeError) as cause:
        raise RaftmetaError("bad_json", f"{what}: a value is no {output.datatype}") from cause
    return Output(output.name, output.datatype, output.shape, values)


def _allowed(datatype: str) -> frozenset[type]:
    """What an element may be in JSON."""
    if datatype == "BOOL":
        return _FLAGS
    return _REALS if datatype.startswith("FP") else _WHOLE


def _written(tensor: ProbeTensor) -> dict[str, Any]:
    if isinstance(tensor.data, tuple):
        data: list[Any] = list(tensor.data)
    else:
        data = np.frombuffer(tensor.data, NUMBERS[tensor.datatype]).tolist()
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": data}
