"""The one reader of JSON: what two readers could understand differently is refused, and what is written reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta import strict_json
from raftmeta.core.errors import RaftmetaError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def refusal(data: bytes, max_bytes: int = strict_json.MAX_BYTES, max_depth: int = strict_json.MAX_DEPTH) -> RaftmetaError:
    with pytest.raises(RaftmetaError) as raised:
        strict_json.loads(data, max_bytes, max_depth)
    return raised.value


@given(VALUES)
def test_what_is_written_reads_back(value: object) -> None:
    assert strict_json.loads(strict_json.dumps(value)) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {"a": b"x"}, "\ud800", {"\ud800": 1}])
def test_what_json_cannot_say_is_refused_before_it_is_sent(value: object) -> None:
    with pytest.raises(RaftmetaError) as raised:
        strict_json.dumps(value)
    assert raised.value.code == "bad_json"


def test_json_past_its_limit_is_refused() -> None:
    assert refusal(b'"' + b"a" * 100 + b'"', max_bytes=101).code == "body_too_large"


@pytest.mark.parametrize("data", [b'{"a":1,"\\u0061":2}', b'[{"b":{"a":1,"a":1}}]', b'{"a":NaN}', b"[-Infinity]", b"1 2", b"\xff", b""])
def test_what_has_two_meanings_or_none_is_refused(data: bytes) -> None:
    assert refusal(data).code == "bad_json"


@pytest.mark.parametrize("data", [b'"\\ud800"', b'{"a":["x",{"\\uDC00":1}]}', b'["\\ud83d","\\ude00"]'])
def test_half_a_surrogate_pair_is_refused_in_keys_and_values(data: bytes) -> None:
    error = refusal(data)
    assert (error.code, "half a surrogate pair" in error.detail) == ("bad_json", True)


def test_a_whole_surrogate_pair_is_text() -> None:
    assert strict_json.loads(b'{"\\ud83d\\ude00":"\\uD83D\\uDE00"}') == {"😀": "😀"}


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_bounded_to_the_level(opening: bytes, closing: bytes) -> None:
    strict_json.loads(opening * 5 + b"1" + closing * 5, max_depth=5)
    assert "deeper than 5 levels" in refusal(opening * 6 + b"1" + closing * 6, max_depth=5).detail


def test_an_object_is_asked_for_and_nothing_else_is_taken() -> None:
    assert strict_json.load_object(b'{"a":[1]}') == {"a": [1]}
    with pytest.raises(RaftmetaError, match="expected a JSON object, found list"):
        strict_json.load_object(b"[]")
