"""Where the questions of live probes come from: the version's own probes, a file, or numbers drawn for what the model takes. Pure.

Questions without end, in turn. Drawn numbers follow a seed, so that a run can be repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from consistency.inference import NUMBERS, request_body
from consistency.live import Question
from consistency.live_agents import Spec
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.probes import MEASURES, Probe, ProbeTensor

MAX_LINES = 100_000
MAX_LINE_BYTES = 1 << 20
MAX_NAME = 128  # characters: it is reported and recorded with every sample
DRAWN = "drawn"


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file: the inputs of a request of the inference protocol, and how its answers are compared."""

    inputs: list[dict[str, Any]]
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    measure: str = "close"
    limit: float = 0.0


def of_probes(probes: Sequence[Probe]) -> list[Question]:
    return [Question(probe.name, request_body(probe.inputs), _rows(probe.inputs), probe.measure, probe.limit) for probe in probes]


def of_lines(text: str) -> list[Question]:
    """Raises RaftmetaError bad_field with the number of the line."""
    found: list[Question] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if len(found) >= MAX_LINES or len(line) > MAX_LINE_BYTES:
            raise RaftmetaError(
                "bad_field", f"line {number}: more than {MAX_LINES} questions, or one longer than {MAX_LINE_BYTES} characters"
            )
        found.append(_of_line(line, number))
    if not found:
        raise RaftmetaError("bad_field", "no line holds a question")
    return found


def drawn(specs: Sequence[Spec], rows: int, seed: int) -> Iterator[Question]:
    """Normal numbers of the shapes that the model says. Raises RaftmetaError bad_field where it says something else than that."""
    for spec in specs:
        if not spec.datatype.startswith("FP") or any(dim < 0 for dim in spec.shape[1:]) or not spec.shape:
            what = f"input {spec.name[:80]!r} is {spec.datatype[:20]} {list(spec.shape)[:8]}"
            raise RaftmetaError("bad_field", f"{what}: numbers can be drawn for floating point of known size only; give --inputs")
    return _drawn(specs, rows, seed)


def in_turn(questions: Sequence[Question]) -> Iterator[Question]:
    return itertools.cycle(questions)


def _drawn(specs: Sequence[Spec], rows: int, seed: int) -> Iterator[Question]:
    generator = np.random.default_rng(seed)
    while True:
        tensors = []
        for spec in specs:
            shape = (rows if spec.shape[0] < 0 else spec.shape[0], *spec.shape[1:])
            data = generator.standard_normal(shape).astype(NUMBERS[spec.datatype]).tobytes()
            tensors.append(ProbeTensor(spec.name, spec.datatype, shape, data))
        yield Question(DRAWN, request_body(tuple(tensors)), _rows(tensors), "close")


def _of_line(line: str, number: int) -> Question:
    try:
        given = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, RecursionError) as cause:
        raise RaftmetaError("bad_field", f"line {number}: {cause}") from cause
    if given.measure not in MEASURES or not 0.0 <= given.limit <= 1e6 or not given.inputs:
        raise RaftmetaError("bad_field", f"line {number}: expected inputs, a measure of {', '.join(MEASURES)} and a limit of 0..1e6")
    shapes = [item.get("shape") for item in given.inputs]
    firsts = {shape[0] if isinstance(shape, list) and shape and isinstance(shape[0], int) else 1 for shape in shapes}
    body = msgspec.json.encode({"inputs": given.inputs})
    rows = max(1, firsts.pop()) if len(firsts) == 1 else 1
    if rows > MAX_LINE_BYTES:
        raise RaftmetaError("bad_field", f"line {number}: a shape of {rows} samples, which no line of {MAX_LINE_BYTES} characters holds")
    return Question(given.name or f"line-{number}", body, rows, given.measure, given.limit)


def _rows(tensors: Sequence[ProbeTensor]) -> int:
    """Samples of a request: the first dimension, where all inputs have the same."""
    firsts = {tensor.shape[0] if tensor.shape else 1 for tensor in tensors}
    return max(1, firsts.pop()) if len(firsts) == 1 else 1
