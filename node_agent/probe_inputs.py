"""What `raftmeta probe` asks a directory of weights: texts, numbers drawn for what its module takes, or the lines of a file. Pure.

Drawn numbers follow a seed. A line holds the inputs of a request of the inference protocol, as `raftmeta live --inputs` takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from consistency.live import Question
from consistency.live_questions import MAX_LINE_BYTES
from node_agent.messages import Tensor
from node_agent.serve import ServeError, parse_infer
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.module_description import ModuleDescription
from raftmeta.core.probes import MAX_PROBES

TEXTS = (
    "The committee approved the credit line on Tuesday.",
    "Ein kurzer Satz in einer anderen Sprache.",
    "42",
    "A longer passage tells whether padding, positions and attention masks are treated the same: it goes on for some time, with commas.",
)


class Asked(NamedTuple):
    """One question, and how answers to it are compared."""

    name: str
    inputs: tuple[Tensor, ...]
    measure: str
    limit: float  # 0: the default of the measure
    outputs: tuple[str, ...] = ()  # none: all that the module gives
    padding: str = ""

    @property
    def rows(self) -> int:
        return self.inputs[0].shape[0]


def of_texts(texts: Sequence[str], name: str, limit: float) -> Asked:
    return Asked(name, (Tensor("text", "BYTES", (len(texts),), tuple(texts)),), "cosine", limit, ("embedding",), "longest")


def drawn(module: ModuleDescription, rows: int, seed: int, name: str, limit: float) -> Asked:
    """Standard normal numbers, or ids that the embedding has, each as likely as any other."""
    given, generator = module.input, np.random.default_rng(seed)
    shape = (rows, *given.row)
    if given.datatype == "INT64":
        data = generator.integers(0, int(module.layers[0].arguments["num_embeddings"]), shape).astype("<i8")
    else:
        data = generator.standard_normal(shape).astype("<f4")
    return Asked(name, (Tensor(given.name, given.datatype, shape, data.tobytes()),), "close", limit)


def of_questions(questions: Sequence[Question]) -> list[Asked]:
    """Raises RaftmetaError bad_field for more than a version may have, or one that is no request."""
    if len(questions) > MAX_PROBES:
        raise RaftmetaError("bad_field", f"{len(questions)} questions, and a version has up to {MAX_PROBES} probes")
    found = []
    for question in questions:
        try:
            request = parse_infer(question.body, MAX_LINE_BYTES)
        except ServeError as cause:
            raise RaftmetaError("bad_field", f"{question.name}: {cause}") from cause
        found.append(Asked(question.name, request.inputs, question.measure, question.limit))
    return found
