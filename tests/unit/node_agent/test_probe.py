from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consistency.nearness import GREATEST_KL, LEAST_COSINE, default_limit
from node_agent.messages import Measured, Tensor
from node_agent.probe import measure
from raftmeta.core.probes import Probe, ProbeTensor

TEXT = ProbeTensor("text", "BYTES", (1,), ("x",))


def fp32(values: object) -> np.ndarray:
    return np.asarray(values, "<f4")


def judged(kind: str, want: np.ndarray, got: np.ndarray, dtypes: tuple[str, ...] = ("F32",), limit: float = 0.0) -> Measured:
    probe = Probe("p", kind, (TEXT,), (ProbeTensor("y", "FP32", want.shape, want.tobytes()),), limit=limit)
    (found,) = measure(probe, [Tensor("y", "FP32", got.shape, got.tobytes())], dtypes)
    return found


ROWS = fp32([[3.0, -1.0, 0.5], [0.1, 2.0, 0.0]])


@pytest.mark.parametrize("kind", ["close", "cosine", "logits"])
def test_the_same_answer_holds_by_every_measure(kind: str) -> None:
    found = judged(kind, ROWS, ROWS)
    assert found.holds and found.value == pytest.approx(1.0 if kind == "cosine" else 0.0, abs=1e-7)


@pytest.mark.parametrize("kind", ["close", "cosine", "logits"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_holds(kind: str, value: float) -> None:
    got = ROWS.copy()
    got[0, 0] = value
    found = judged(kind, ROWS, got)
    assert not found.holds and "not finite" in found.note


def test_another_shape_datatype_or_name_never_holds() -> None:
    assert "instead of" in judged("close", ROWS, ROWS[:1]).note
    probe = Probe("p", "close", (TEXT,), (ProbeTensor("y", "FP32", (1,), b"\0" * 4),))
    assert not measure(probe, [Tensor("y", "FP64", (1,), b"\0" * 8)], ())[0].holds
    assert "no such output" in measure(probe, [Tensor("z", "FP32", (1,), b"\0" * 4)], ())[0].note


@pytest.mark.parametrize(
    ("dtypes", "limit"), [(("F32",), 1e-4), (("F32", "F16"), 2e-2), (("BF16", "F32"), 5e-2), (("I64",), 1e-4), (("F8_E4M3", "BF16"), 0.25)]
)
def test_the_tolerance_is_that_of_the_narrowest_dtype_that_took_part(dtypes: tuple[str, ...], limit: float) -> None:
    assert default_limit("close", "FP32", dtypes) == limit
    scale = float(np.abs(ROWS[1]).max())  # of the smaller row
    assert judged("close", ROWS, ROWS + fp32(limit * scale * 0.9), dtypes).holds
    assert not judged("close", ROWS, ROWS + fp32(limit * scale * 1.1), dtypes).holds


def test_whole_numbers_and_texts_are_compared_exactly() -> None:
    probe = Probe(
        "p", "close", (TEXT,), (ProbeTensor("n", "INT64", (1,), (5).to_bytes(8, "little")), ProbeTensor("t", "BYTES", (1,), ("a",)))
    )
    for number, text, holds in ((5, "a", [True, True]), (6, "b", [False, False])):
        found = measure(probe, [Tensor("n", "INT64", (1,), number.to_bytes(8, "little")), Tensor("t", "BYTES", (1,), (text,))], ("F16",))
        assert [item.holds for item in found] == holds


def test_the_least_cosine_of_the_rows_counts() -> None:
    got = ROWS.copy()
    got[1] = got[1][::-1]
    assert not judged("cosine", ROWS, got).holds
    assert judged("cosine", ROWS, ROWS * 7).holds, "length does not matter"
    zero = np.zeros_like(ROWS)
    assert judged("cosine", zero, zero).holds and not judged("cosine", ROWS, zero).holds and not judged("cosine", zero, ROWS).holds


@given(st.floats(0.0, 0.2))
def test_the_limit_of_the_cosine_is_a_limit(angle: float) -> None:
    want = fp32([[1.0, 0.0]])
    found = judged("cosine", want, fp32([[np.cos(angle), np.sin(angle)]]))
    assert found.value == pytest.approx(np.cos(angle), abs=1e-6)
    if abs(found.value - LEAST_COSINE) > 1e-6:
        assert found.holds == (np.cos(angle) > LEAST_COSINE)


def test_another_first_choice_never_holds_unless_the_expected_one_is_a_tie() -> None:
    found = judged("logits", fp32([[2.0, 1.99, 0.0]]), fp32([[1.99, 2.0, 0.0]]))
    assert not found.holds and found.note == "row 0 chooses 1 instead of 0" and found.value < 0.01
    assert judged("logits", fp32([[2.0, 2.0, 0.0]]), fp32([[2.0, 2.0001, 0.0]])).holds


def test_the_divergence_is_that_of_the_distributions() -> None:
    want, got = fp32([[2.0, 0.0, 0.0]]), fp32([[0.5, 0.0, 0.0]])
    p, q = (np.exp(row) / np.exp(row).sum() for row in (want[0].astype(float), got[0].astype(float)))
    expected = float((p * np.log(p / q)).sum())
    found = judged("logits", want, got)
    assert found.value == pytest.approx(expected, rel=1e-6)
    assert found.holds == (expected <= GREATEST_KL)
    assert judged("logits", want, got, limit=expected * 1.01).holds and not judged("logits", want, got, limit=expected * 0.99).holds
    assert judged("logits", want, want + fp32(100.0)).holds, "a common shift changes no probability"


def test_large_logits_do_not_overflow() -> None:
    assert judged("logits", fp32([[3e4, -3e4]]), fp32([[3e4, -3e4]])).holds


def test_empty_outputs_hold() -> None:
    empty = np.zeros((0, 4), "<f4")
    assert all(judged(kind, empty, empty).holds for kind in ("close", "cosine", "logits"))
