"""An answer of a node against what the publisher saw, by the measure of the probe (`consistency.nearness`). Pure.

What is not finite is drift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from consistency.nearness import Floats, cosines, default_limit, divergences, relative_errors
from node_agent.messages import Measured, Tensor
from node_agent.serve import DATATYPES
from raftmeta.core.probes import Probe, ProbeTensor


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
            value = float(cosines(want, got).min(initial=1.0))
            return Measured(probe.name, expected.name, "cosine", value, limit, value >= limit)
        case "logits":
            value, note = _divergence(want, got)
            return Measured(probe.name, expected.name, "logits", value, limit, value <= limit and not note, note)
        case _:
            value = float(relative_errors(want, got).max(initial=0.0))
            return Measured(probe.name, expected.name, "close", value, limit, value <= limit)


def _floats(tensor: ProbeTensor | Tensor) -> Floats:
    assert isinstance(tensor.data, bytes), tensor.name
    return np.frombuffer(tensor.data, DATATYPES[tensor.datatype]).astype(np.float64).reshape(tensor.shape)


def _divergence(want: Floats, got: Floats) -> tuple[float, str]:
    """The greatest of a row, and why the first choices differ, "" if they do not."""
    nats, is_other = divergences(want, got)
    wrong = np.flatnonzero(is_other)
    note = ""
    if len(wrong):
        size, row = want.shape[-1], int(wrong[0])
        note = f"row {row} chooses {int(got.reshape(-1, size)[row].argmax())} instead of {int(want.reshape(-1, size)[row].argmax())}"
    return float(nats.max(initial=0.0)), note
