"""How far an answer is from what the publisher saw, and whether that is near enough. Pure.

close: every element within a relative tolerance that follows from the narrowest dtype that took part, since half precision on another
machine differs in its last bits; whole numbers exactly. cosine: the least over the rows. logits: every row's first choice is the same,
unless the expected row itself has a tie within the tolerance, and the divergence KL(expected ‖ found) of each row in nats. What is not
finite is drift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from node_agent.messages import Measured, Tensor
from node_agent.serve import DATATYPES
from raftmeta.core.probes import Probe, ProbeTensor

LEAST_COSINE = 0.999
GREATEST_KL = 0.35
# relative to the largest expected magnitude of the tensor; some hundred roundings of the dtype's last bit
TOLERANCES: dict[str, float] = {"F64": 1e-9, "F32": 1e-4, "F16": 2e-2, "BF16": 5e-2, "F8_E4M3": 0.25, "F8_E5M2": 0.5}
_NARROWEST_FIRST = ("F8_E5M2", "F8_E4M3", "BF16", "F16", "F32", "F64")
_WIDTHS = {"FP16": "F16", "FP32": "F32", "FP64": "F64"}

Rows = NDArray[np.float64]


def measure(probe: Probe, found: Sequence[Tensor], dtypes: Sequence[str]) -> list[Measured]:
    """Every expected output of a probe against what came; `dtypes` are those of the version's tensors (safetensors names)."""
    given = {tensor.name: tensor for tensor in found}
    return [_measure(probe, expected, given, dtypes) for expected in probe.outputs]


def _measure(probe: Probe, expected: ProbeTensor, given: Mapping[str, Tensor], dtypes: Sequence[str]) -> Measured:
    limit = probe.limit or default_limit(probe.measure, expected.datatype, dtypes)
    worst = 0.0 if probe.measure == "cosine" else float("inf")
    found = given.get(expected.name)
    if found is None:
        return Measured(probe.name, expected.name, probe.measure, worst, limit, False, "no such output")
    if (found.datatype, tuple(found.shape)) != (expected.datatype, tuple(expected.shape)):
        note = f"{found.datatype} {list(found.shape)} instead of {expected.datatype} {list(expected.shape)}"
        return Measured(probe.name, expected.name, probe.measure, worst, limit, False, note)
    if expected.datatype == "BYTES":
        same = tuple(found.data) == tuple(expected.data)
        return Measured(probe.name, expected.name, "close", 0.0 if same else worst, 0.0, same, "" if same else "other texts")
    want, got = _floats(expected), _floats(found)
    if not np.isfinite(got).all():
        return Measured(probe.name, expected.name, probe.measure, worst, limit, False, "a value that is not finite")
    match probe.measure:
        case "cosine":
            value = _least_cosine(want, got)
            return Measured(probe.name, expected.name, "cosine", value, limit, value >= limit)
        case "logits":
            value, note = _divergence(want, got)
            return Measured(probe.name, expected.name, "logits", value, limit, value <= limit and not note, note)
        case _:
            value = _relative_error(want, got)
            return Measured(probe.name, expected.name, "close", value, limit, value <= limit)


def default_limit(measure_name: str, datatype: str, dtypes: Sequence[str]) -> float:
    if measure_name == "cosine":
        return LEAST_COSINE
    if measure_name == "logits":
        return GREATEST_KL
    if not datatype.startswith("FP"):
        return 0.0
    present = {*dtypes, _WIDTHS[datatype]}
    return TOLERANCES[next(dtype for dtype in _NARROWEST_FIRST if dtype in present)]


def _floats(tensor: ProbeTensor | Tensor) -> Rows:
    assert isinstance(tensor.data, bytes), tensor.name
    return np.frombuffer(tensor.data, DATATYPES[tensor.datatype]).astype(np.float64).reshape(tensor.shape)


def _relative_error(want: Rows, got: Rows) -> float:
    if not want.size:
        return 0.0
    scale = float(np.abs(want).max()) or 1.0
    return float(np.abs(want - got).max()) / scale


def _least_cosine(want: Rows, got: Rows) -> float:
    """Over the last dimension; a row of zeros is like nothing but another one."""
    want, got = want.reshape(-1, want.shape[-1]), got.reshape(-1, got.shape[-1])
    if not want.size:
        return 1.0
    norms = np.linalg.norm(want, axis=1) * np.linalg.norm(got, axis=1)
    dots = np.einsum("ij,ij->i", want, got)
    both_zero = ~want.any(axis=1) & ~got.any(axis=1)
    cosines = np.where(both_zero, 1.0, np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0))
    return float(cosines.min())


def _divergence(want: Rows, got: Rows) -> tuple[float, str]:
    """The greatest KL(softmax(want) ‖ softmax(got)) of a row in nats, and why the first choices differ, "" if they do not."""
    want, got = want.reshape(-1, want.shape[-1]), got.reshape(-1, got.shape[-1])
    if not want.size:
        return 0.0, ""
    log_want, log_got = _log_softmax(want), _log_softmax(got)
    divergence = float((np.exp(log_want) * (log_want - log_got)).sum(axis=1).max())
    chosen = got.argmax(axis=1)
    rows = np.arange(len(want))
    behind = want.max(axis=1) - want[rows, chosen]  # by how much the choice falls short of the expected one, 0 for the same or a tie
    tie = TOLERANCES["F32"] * np.maximum(np.abs(want).max(axis=1), 1.0)
    wrong = np.flatnonzero(behind > tie)
    if not len(wrong):
        return divergence, ""
    row = int(wrong[0])
    return divergence, f"row {row} chooses {int(chosen[row])} instead of {int(want[row].argmax())}"


def _log_softmax(rows: Rows) -> Rows:
    shifted = rows - rows.max(axis=1, keepdims=True)
    result: Rows = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
