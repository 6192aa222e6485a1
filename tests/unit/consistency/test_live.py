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
from consistency.live import MAX_KEPT, Heard, Judgement, Kind, Ledger, Moment, Question, judge
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
    # 3 is the largest value of the middle row, which the smallest is measured by
    assert not judged(CLOSE, ROWS, ROWS + np.float32(limit * 3 * 0.9), dtypes=dtypes).beyond
    assert judged(CLOSE, ROWS, ROWS + np.float32(limit * 3 * 1.1), dtypes=dtypes).beyond


def test_one_great_row_hides_nothing_of_the_others_and_a_row_near_zero_is_not_held_to_its_own_rounding() -> None:
    two = CLOSE._replace(rows=2)
    assert judged(two, np.array([[1e6], [1.0]], "<f4"), np.array([[1e6], [-1.0]], "<f4")).beyond == (1,)
    assert not judged(CLOSE, np.array([[1.0], [2.0], [1e-6]], "<f4"), np.array([[1.0], [2.0], [1.1e-6]], "<f4")).beyond


@pytest.mark.parametrize(("measure", "limit"), [("cosine", 0.99), ("logits", 2.0)])
def test_the_limit_of_a_measure_that_needs_rows_is_no_relative_error(measure: str, limit: float) -> None:
    question = Question("q", b"{}", 2, measure, limit)
    found = judged(question, np.array([1.0, 2.0], "<f4"), np.array([0.05, 3.9], "<f4"))
    assert (found.beyond, found.limit) == ((0, 1), 1e-4)
    rows = judged(question, np.array([[1.0, 2.0]] * 2, "<f4"), np.array([[1.0, 2.0]] * 2, "<f4"))
    assert (rows.beyond, rows.limit) == ((), limit)


HUGE, TINY = 1.7e308, 1e-200


@pytest.mark.parametrize("measure", ["close", "cosine", "logits"])
@pytest.mark.parametrize("row", [[HUGE, -HUGE], [TINY, -TINY], [5e-324, 0.0]])
def test_numbers_near_the_ends_of_the_range_are_compared_like_others(measure: str, row: list[float]) -> None:
    want = np.array([row, row])
    question = Question("q", b"{}", 2, measure)
    with np.errstate(all="raise", under="ignore"):
        assert not judged(question, want, want.copy(), "FP64", ("F64",)).beyond
    with np.errstate(all="raise", under="ignore"):
        other = judged(question, want, want * np.array([[1.0], [-1.0]]), "FP64", ("F64",))
    if measure != "logits" or row[0] == HUGE:  # tiny logits make the same distribution
        assert other.beyond == (1,), other


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
    return ledger.add(CLOSE, primary, standby, judge(CLOSE, primary, standby, ("F32",)), Moment(now_s)) is not None


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


def moved(node: str, version: str, order: int, settled: bool = True) -> Heard:
    return heard(node, ROWS, version, {"c": (1, order)}, settled)


def test_two_switches_far_apart_are_no_lag_though_nothing_was_compared_between() -> None:
    ledger = Ledger({"primary": ["p"], "standby": ["s"]}, lag_s=10.0)
    assert not add(ledger, moved("p", "2.0.0", 6), moved("s", "1.0.0", 5), 0.0)
    assert not add(ledger, heard("p"), moved("s", "1.0.0", 5), 1800.0)
    assert not add(ledger, moved("p", "3.0.0", 9), moved("s", "2.0.0", 6), 3600.0)


def test_the_middle_of_two_switches_far_apart_is_no_lag_once_the_node_was_seen_to_be_through() -> None:
    ledger = Ledger({"primary": ["p"], "standby": ["s"]}, lag_s=10.0)
    switching = heard("s", ROWS, "1.0.0", {}, False)
    assert not add(ledger, moved("p", "2.0.0", 6), switching, 0.0)
    ledger.looked("s", {"c": (1, 6)})
    assert not add(ledger, moved("p", "3.0.0", 9), switching, 3600.0)
    assert add(ledger, moved("p", "3.0.0", 9), switching, 3611.0)


def test_a_node_that_never_follows_is_a_difference_however_seldom_each_pair_has_its_turn() -> None:
    primaries, standbys = [f"p{at}" for at in range(10)], ["s0", "s1", "s2"]
    ledger = Ledger({"primary": primaries, "standby": standbys}, lag_s=10.0)
    pairs = [(primary, standby) for primary in primaries for standby in standbys]
    alarms = []
    for at, (primary, standby) in enumerate(pairs):
        late = moved(standby, "1.0.0", 5) if standby == "s1" else moved(standby, "2.0.0", 6)
        if add(ledger, moved(primary, "2.0.0", 6), late, 3.0 * at):
            alarms.append((standby, 3 * at))
    assert alarms[0] == ("s1", 21), "asked at 3, 12 and 21: at the first question to it after the time it has"
    assert {node for node, _ in alarms} == {"s1"}


def test_an_answer_like_that_of_another_late_node_gives_no_more_time() -> None:
    ledger = Ledger({"primary": ["p", "q"], "standby": ["s"]}, lag_s=10.0)
    late = heard("s", ROWS, "1.0.0", {}, False)
    assert not add(ledger, moved("p", "2.0.0", 6), late, 0.0)
    ledger.add(CLOSE, moved("q", "1.0.0", 5), moved("s", "2.0.0", 6), Judgement(Kind.SWITCHING, late=("q",)), Moment(1.0))
    assert not add(ledger, moved("q", "1.0.0", 5), heard("s", ROWS, "1.0.0", {}), 2.0), "both serve the old one"
    assert add(ledger, moved("p", "2.0.0", 6), late, 11.0)


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
        ({"datatype": "INT64", "shape": [1], "data": [1.9]}, "no number of that kind"),
        ({"datatype": "INT64", "shape": [1], "data": [None]}, "no number of that kind"),
        ({"datatype": "UINT8", "shape": [1], "data": [True]}, "no number of that kind"),
        ({"datatype": "BOOL", "shape": [1], "data": [None]}, "no number of that kind"),
        ({"datatype": "BOOL", "shape": [1], "data": [1]}, "no number of that kind"),
        ({"datatype": "FP32", "shape": [1], "data": [True]}, "no number of that kind"),
        ({"datatype": "x" * 300, "shape": [1], "data": [1]}, "none of the inference protocol"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(output: dict[str, Any], says: str) -> None:
    with pytest.raises(RaftmetaError, match=says):
        read_answer(json.dumps({"model_version": "1", "outputs": [{"name": "y", **output}]}).encode())


def test_an_answer_that_is_nested_deeply_is_refused_like_any_other() -> None:
    with pytest.raises(RaftmetaError, match="none of the inference protocol"):
        read_answer(b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}")


def test_what_json_has_no_word_for_is_not_finite() -> None:
    _, (output,) = read_answer(b'{"model_version": "1", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [null]}]}')
    assert isinstance(output.values, np.ndarray) and np.isnan(output.values).all()
