"""What two answers say about two sides: compared, about to switch, or a difference that somebody has to act on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consistency.applied import Applied
from consistency.inference import Output, read_answer, request_body
from consistency.live import MAX_KEPT, Heard, Judgement, Kind, Ledger, Question, judge
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.probes import ProbeTensor

CLOSE = Question("q", b"{}", 3, "close")
SAME: Applied = {"c": (1, 7)}


def heard(
    node: str, values: Any = None, version: str = "1.0.0", applied: Applied = SAME, settled: bool = True, datatype: str = "FP32"
) -> Heard:
    if values is None:
        return Heard(node, version, applied, None, "timed_out")
    if datatype == "BYTES":
        return Heard(node, version, applied, (Output("y", "BYTES", (len(values),), tuple(values)),), "", settled)
    array = np.asarray(values)
    return Heard(node, version, applied, (Output("y", datatype, array.shape, array),), "", settled)


def judged(question: Question, mine: Any, other: Any, datatype: str = "FP32", dtypes: tuple[str, ...] = ("F32",)) -> Judgement:
    return judge(question, heard("p", mine, datatype=datatype), heard("s", other, datatype=datatype), dtypes)


ROWS = np.array([[3.0, -1.0], [0.1, 2.0], [4.0, 1.0]], "<f4")


@pytest.mark.parametrize("measure", ["close", "cosine", "logits"])
@pytest.mark.parametrize("row", range(3))
def test_the_row_that_differs_is_named_and_the_others_count_as_the_same(measure: str, row: int) -> None:
    other = ROWS.copy()
    other[row] = other[row][::-1]
    found = judged(CLOSE._replace(measure=measure), ROWS, other)
    assert (found.kind, found.beyond) == (Kind.COMPARED, (row,))
    same = judged(CLOSE._replace(measure=measure), ROWS, ROWS.copy())
    assert same.beyond == () and same.worst == pytest.approx(1.0 if measure == "cosine" else 0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_within_tolerance_not_even_on_both_sides(value: float) -> None:
    other = ROWS.copy()
    other[1, 0] = value
    assert judged(CLOSE, ROWS, other).beyond == judged(CLOSE, other, other).beyond == (1,)


@pytest.mark.parametrize(("dtypes", "limit"), [(("F32",), 1e-4), (("BF16", "F32"), 5e-2)])
def test_the_tolerance_is_that_of_the_narrowest_dtype_of_the_version(dtypes: tuple[str, ...], limit: float) -> None:
    assert not judged(CLOSE, ROWS, ROWS + np.float32(limit * 4 * 0.9), dtypes=dtypes).beyond
    assert judged(CLOSE, ROWS, ROWS + np.float32(limit * 4 * 1.1), dtypes=dtypes).beyond


def test_whole_numbers_texts_and_other_shapes() -> None:
    numbers = np.array([1, 2**60, 3], "<i8")
    assert not judged(CLOSE, numbers, numbers, "INT64").beyond
    assert judged(CLOSE, numbers, numbers + np.array([0, 1, 0]), "INT64").beyond == (1,), "not even in the last bit"
    assert judged(CLOSE, ["a", "b", "c"], ["a", "b", "d"], "BYTES").beyond == (2,)
    assert judged(CLOSE, ROWS, ROWS[:, :1]).beyond == (0, 1, 2)


def test_flags_that_belong_to_no_single_sample_count_against_all() -> None:
    assert judged(CLOSE, np.zeros(4), np.array([0.0, 0.0, 0.0, 1.0])).beyond == (0, 1, 2)


@pytest.mark.parametrize(
    ("primary", "standby", "kind"),
    [
        ({"c": (1, 7)}, {"c": (1, 7)}, Kind.CONTRADICTION),
        ({"c": (1, 7)}, {"c": (1, 8)}, Kind.SWITCHING),
        ({"c": (2, 1)}, {"c": (1, 8)}, Kind.SWITCHING),
        ({"c": (1, 7), "d": (1, 1)}, {"c": (1, 8)}, Kind.CONCURRENT),
    ],
)
def test_other_versions_are_judged_by_what_each_had_applied(primary: Applied, standby: Applied, kind: Kind) -> None:
    found = judge(CLOSE, heard("p", ROWS, "1.0.0", primary), heard("s", ROWS * 2, "2.0.0", standby), ())
    assert found.kind is kind and not found.beyond


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False), (False, False)])
def test_a_switch_in_progress_is_no_contradiction(first: bool, second: bool) -> None:
    found = judge(CLOSE, heard("p", ROWS, "1.0.0", settled=first), heard("s", ROWS, "2.0.0", settled=second), ())
    assert found.kind is Kind.SWITCHING


def test_same_version_is_compared_even_while_a_node_switches() -> None:
    assert judge(CLOSE, heard("p", ROWS, settled=False), heard("s", ROWS + 1), ("F32",)).beyond == (0, 1, 2)


def add(ledger: Ledger, primary: Heard, standby: Heard, now_s: float = 0.0) -> bool:
    return ledger.add(CLOSE, primary, standby, judge(CLOSE, primary, standby, ("F32",)), now_s, 0) is not None


def test_shares_and_coverage_count_samples() -> None:
    ledger = Ledger({"primary": ["p", "p2"], "standby": ["s"]})
    assert ledger.within is None and ledger.coverage == 0.0
    assert not add(ledger, heard("p", ROWS), heard("s", ROWS))
    other = ROWS.copy()
    other[0] += 1
    assert add(ledger, heard("p", ROWS), heard("s", other))
    assert not add(ledger, heard("p"), heard("s", ROWS))
    assert (ledger.asked, ledger.coverage, ledger.within) == (9, 6 / 9, 5 / 6)
    assert ledger.pairs_covered == (1, 2) and ledger.faults == {"p": 3}
    (kept,) = ledger.kept
    assert kept.primary.outputs is None and json.loads(json.dumps(kept.as_json()))["rows"] == [0]


def test_a_side_that_stays_behind_becomes_a_difference_and_one_that_follows_does_not() -> None:
    ledger = Ledger({"primary": ["p"], "standby": ["s"]}, lag_s=10.0)
    behind = heard("p", ROWS, "1.0.0", {"c": (1, 6)}), heard("s", ROWS, "2.0.0")
    assert not add(ledger, *behind, now_s=100.0) and not add(ledger, *behind, now_s=110.0)
    assert add(ledger, *behind, now_s=110.1) and "for 10 s" in ledger.kept[0].judgement.detail
    assert not add(ledger, heard("p", ROWS, "2.0.0"), heard("s", ROWS, "2.0.0"), now_s=111.0)
    assert not add(ledger, *behind, now_s=112.0), "the time begins anew"


def test_the_queue_is_bounded_and_says_what_it_forgot() -> None:
    ledger = Ledger({"primary": ["p"], "standby": ["s"]})
    for _ in range(MAX_KEPT + 5):
        add(ledger, heard("p", ROWS), heard("s", ROWS + 1))
    assert len(ledger.kept) == MAX_KEPT and ledger.dropped == 5


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(NUMBERS, min_size=1, max_size=12))
def test_numbers_survive_the_protocol_to_the_last_bit(values: list[float]) -> None:
    sent = json.loads(request_body((ProbeTensor("x", "FP32", (len(values),), np.array(values, "<f4").tobytes()),)))
    body = {"model_version": "1", "outputs": [{**sent["inputs"][0], "name": "y"}]}
    _, (output,) = read_answer(json.dumps(body).encode())
    assert isinstance(output.values, np.ndarray) and output.values.tobytes() == np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ({"datatype": "FP32", "shape": [2], "data": [1.0]}, "do not make the shape"),
        ({"datatype": "FP32", "shape": [-1], "data": []}, "do not make the shape"),
        ({"datatype": "FP32", "shape": [1], "data": ["1"]}, "no number"),
        ({"datatype": "UINT8", "shape": [1], "data": [256]}, "no UINT8"),
        ({"datatype": "COMPLEX", "shape": [1], "data": [1]}, "unknown"),
        ({"datatype": "BYTES", "shape": [1], "data": [1]}, "no text"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(output: dict[str, Any], says: str) -> None:
    with pytest.raises(RaftmetaError, match=says):
        read_answer(json.dumps({"model_version": "1", "outputs": [{"name": "y", **output}]}).encode())


def test_what_json_has_no_word_for_is_not_finite() -> None:
    _, (output,) = read_answer(b'{"model_version": "1", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [null]}]}')
    assert isinstance(output.values, np.ndarray) and np.isnan(output.values).all()
