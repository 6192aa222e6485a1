"""How far two answers to the same question are apart, row by row. Pure.

close: the greatest difference of a row's elements, relative to the largest magnitude of the expected row, or of the middle one of all rows
where that is larger: one great row hides nothing of the others, and a row that cancels to almost nothing is not held to its own rounding.
What is allowed follows from the narrowest dtype that took part, since half precision on another machine differs in its last bits; whole
numbers exactly. cosine: of the last dimension. logits: the divergence KL(expected ‖ found) of the softmax over the last dimension in nats,
and whether the first choice is the same, unless the expected row itself has a tie within the tolerance. Nothing here knows what is not
finite: callers look first. Numbers near the ends of the range of floats give no NaN, and one that cannot be told counts as infinite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_COSINE = 0.999
GREATEST_KL = 0.35
# relative to the largest expected magnitude; some hundred roundings of the dtype's last bit
TOLERANCES: dict[str, float] = {"F64": 1e-9, "F32": 1e-4, "F16": 2e-2, "BF16": 5e-2, "F8_E4M3": 0.25, "F8_E5M2": 0.5}
_NARROWEST_FIRST = ("F8_E5M2", "F8_E4M3", "BF16", "F16", "F32", "F64")
_WIDTHS = {"FP16": "F16", "FP32": "F32", "FP64": "F64"}

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def default_limit(measure: str, datatype: str, dtypes: Sequence[str]) -> float:
    """`datatype` of the answer (a name of the Open Inference Protocol), `dtypes` of the version's tensors (names of safetensors)."""
    if measure == "cosine":
        return LEAST_COSINE
    if measure == "logits":
        return GREATEST_KL
    if not datatype.startswith("FP"):
        return 0.0
    present = {*dtypes, _WIDTHS[datatype]}
    return TOLERANCES[next(dtype for dtype in _NARROWEST_FIRST if dtype in present)]


def relative_errors(want: Floats, got: Floats) -> Floats:
    """[rows] for [rows, ...]; a scalar is one row."""
    rows = want.shape[0] if want.ndim else 1
    if not want.size:
        return np.zeros(rows)
    want, got = want.reshape(rows, -1), got.reshape(rows, -1)
    largest = np.abs(want).max(axis=1)
    scale = np.maximum(largest, np.partition(largest, (rows - 1) // 2)[(rows - 1) // 2])
    with np.errstate(over="ignore"):
        errors: Floats = np.abs(want - got).max(axis=1) / np.where(scale > 0, scale, 1.0)
    return errors


def cosines(want: Floats, got: Floats) -> Floats:
    """[rows] for [..., size], the leading dimensions taken together; a row of zeros is like nothing but another one."""
    want, got = _unit_largest(want.reshape(-1, want.shape[-1])), _unit_largest(got.reshape(-1, got.shape[-1]))
    norms = np.linalg.norm(want, axis=1) * np.linalg.norm(got, axis=1)
    dots = np.einsum("ij,ij->i", want, got)
    both_zero = ~want.any(axis=1) & ~got.any(axis=1)
    found: Floats = np.where(both_zero, 1.0, np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0))
    return found


def divergences(want: Floats, got: Floats) -> tuple[Floats, Flags]:
    """[rows] nats and [rows] whether the first choice is another one, for [..., size]."""
    want, got = want.reshape(-1, want.shape[-1]), got.reshape(-1, got.shape[-1])
    if not want.size:
        return np.zeros(len(want)), np.zeros(len(want), np.bool_)
    with np.errstate(over="ignore"):  # what is that far below the first choice has no probability
        log_want, log_got = _log_softmax(want), _log_softmax(got)
        likely = np.exp(log_want)
        # 0 log 0 is 0; where only `got` has no probability left the divergence is infinite
        terms = np.multiply(likely, np.subtract(log_want, log_got, out=np.zeros_like(want), where=likely > 0))
        nats: Floats = terms.sum(axis=1)
        # by how much the choice falls short of the expected one, 0 for the same or a tie
        short = want.max(axis=1) - want[np.arange(len(want)), got.argmax(axis=1)]
    tie = TOLERANCES["F32"] * np.maximum(np.abs(want).max(axis=1), 1.0)
    return nats, short > tie


def _unit_largest(rows: Floats) -> Floats:
    """Of the same directions, with 1 as the largest magnitude, so that no square overflows or vanishes."""
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    scaled: Floats = rows / np.where(largest > 0, largest, 1.0)
    return scaled


def _log_softmax(rows: Floats) -> Floats:
    shifted = rows - rows.max(axis=1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
