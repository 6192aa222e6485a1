"""The Open Inference Protocol: what is taken, what is refused and how, what comes back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent import serve
from node_agent.messages import Inferred, Tensor
from node_agent.serve import DATATYPES, ServeError, infer_body, parse_infer

LIMIT = 1 << 20


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs)} | more).encode()


def one(datatype: str, shape: list[int], data: Any, **more: Any) -> dict[str, Any]:
    return {"name": "x", "shape": shape, "datatype": datatype, "data": data} | more


def parsed(*inputs: dict[str, Any]) -> Tensor:
    return parse_infer(body(*inputs), LIMIT).inputs[0]


def refusal(data: bytes) -> ServeError:
    with pytest.raises(ServeError) as refused:
        parse_infer(data, LIMIT)
    return refused.value


def test_texts_come_through_as_texts() -> None:
    assert parsed(one("BYTES", [2], ["a", "ü"])) == Tensor("x", "BYTES", (2,), ("a", "ü"))


def test_nested_and_flat_data_mean_the_same() -> None:
    flat = parsed(one("INT64", [2, 3], [1, 2, 3, 4, 5, 6]))
    nested = parsed(one("INT64", [2, 3], [[1, 2, 3], [4, 5, 6]]))
    assert flat == nested
    assert isinstance(flat.data, bytes) and np.frombuffer(flat.data, "<i8").tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_every_datatype_survives_the_way_in_and_out(datatype: str) -> None:
    values = [True, False] if datatype == "BOOL" else [1, 0]
    item = parsed(one(datatype, [2], values))
    out = json.loads(infer_body("m", "", Inferred(1, "1.0.0", "c", (item,))))
    assert out["outputs"][0]["data"] == values


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_fp32_values_come_back_exactly(values: list[float]) -> None:
    item = parsed(one("FP32", [len(values)], values))
    assert json.loads(infer_body("m", "i", Inferred(1, "1", "c", (item,))))["outputs"][0]["data"] == values


def test_the_answer_names_model_version_and_request() -> None:
    answer = json.loads(infer_body("search", "r-7", Inferred(1, "2.0.0", "c", (Tensor("e", "FP32", (1,), b"\0\0\0\0"),))))
    assert answer == {
        "model_name": "search",
        "model_version": "2.0.0",
        "id": "r-7",
        "outputs": [{"name": "e", "datatype": "FP32", "shape": [1], "data": [0.0]}],
    }


BAD: list[tuple[bytes, int, str]] = [
    (b"", 400, "not strict JSON"),
    (b"[]", 400, "expected a JSON object"),
    (b"{}", 400, "inputs"),
    (b'{"inputs": [], "inputs": []}', 400, "stands twice"),
    (b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [NaN]}]}', 400, "NaN"),
    (b"[" * 100_000, 400, "not strict JSON"),
    (body(), 400, "0 inputs"),
    (body(one("INT64", [1], [1]), extra=1), 400, "extra"),
    (body(one("INT64", [1], [1]), one("INT64", [1], [1])), 400, "same name"),
    (body(one("INT64", [1], [1]), id="i" * 300), 400, "id has 300"),
    (body(one("INT65", [1], [1])), 400, "datatype"),
    (body(one("INT64", [2], [1])), 400, "1 elements, the shape has 2"),
    (body(one("INT64", [0], [])), 400, "dimensions of at least 1"),
    (body(one("INT64", [-1], [1])), 400, "dimensions of at least 1"),
    (body(one("INT64", [], [1])), 400, "dimensions"),
    (body(one("INT64", [1] * 9, [1])), 400, "dimensions"),
    (body(one("INT64", [2, 2], [[1, 2], [3]])), 400, "nested data"),
    (body(one("INT64", [2, 2], [[1, 2], 3, 4])), 400, "nested data"),
    (body(one("INT64", [2], [[1, 2]])), 400, "nested data"),
    (body(one("INT64", [1], [1.0])), 400, "does not take float"),
    (body(one("INT64", [1], [True])), 400, "does not take bool"),
    (body(one("INT64", [1], ["1"])), 400, "does not take str"),
    (body(one("INT64", [1], [None])), 400, "does not take NoneType"),
    (body(one("BOOL", [1], [1])), 400, "does not take int"),
    (body(one("INT64", [1], [1 << 63])), 400, "outside INT64"),
    (body(one("UINT8", [1], [-1])), 400, "outside UINT8"),
    (body(one("FP16", [1], [1e6])), 400, "outside FP16"),
    (body(one("FP32", [1], [1e300])), 400, "outside FP32"),
    (body(one("FP64", [1], [10**400])), 400, "outside FP64"),
    (body(one("BYTES", [1], [1])), 400, "takes strings"),
    (body(one("BYTES", [1], ["\ud800"])), 400, "surrogate"),
    (body(one("BYTES", [1], ["x"], parameters={"binary_data_size": 4})), 400, "'binary_data_size' with value 4 is not supported"),
    (body(one("BYTES", [1], ["x"]), parameters={"priority": 1}), 400, "the request: parameter 'priority'"),
    (body(one("BYTES", [1], ["x"]), parameters={"binary_data_output": True}), 400, "'binary_data_output' with value true"),
    (body(one("BYTES", [1], ["x"]), parameters={"binary_data": False}), 400, "the request: parameter 'binary_data'"),
    (body(one("BYTES", [1], ["x"], parameters={"content_type": "str"})), 400, "input 'x': parameter 'content_type'"),
    (
        body(one("BYTES", [1], ["x"]), outputs=[{"name": "y", "parameters": {"classification": 3}}]),
        400,
        "output 'y': parameter 'classification'",
    ),
    (body(one("BYTES", [1], ["x"]), outputs=[{"name": "y", "parameters": {"binary_data": True}}]), 400, "output 'y'"),
    (body(one("BYTES", [1], ["x"]), outputs=[{"name": "y"}, {"name": "y"}]), 400, "two outputs have the same name"),
    (body(one("BYTES", [1], ["x"], name="")), 400, "name is empty"),
    (b" " * (LIMIT + 1), 413, "limit"),
]


@pytest.mark.parametrize(("data", "status", "says"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_with_one_clear_sentence(data: bytes, status: int, says: str) -> None:
    error = refusal(data)
    assert error.status == status
    assert says in error.message
    assert json.loads(serve.error_body(error.message)) == {"error": error.message}


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_no_json_value_raises_anything_but_a_refusal(value: Any) -> None:
    for data in (
        value,
        {"inputs": value},
        {"inputs": [value]},
        {"inputs": [one("FP32", [1], value)]},
        {"inputs": [one("BYTES", [2], value)]},
    ):
        try:
            parse_infer(json.dumps(data).encode("utf-8", "surrogatepass"), LIMIT)
        except ServeError as error:
            assert error.status in (400, 413)


def test_parameters_that_ask_for_json_are_done_and_none_are_fine_too() -> None:
    outputs = [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z", "parameters": {}}]
    found = parse_infer(body(one("BYTES", [1], ["x"], parameters={}), outputs=outputs, parameters={"binary_data_output": False}), LIMIT)
    assert found.outputs == ("y", "z")


@pytest.mark.parametrize("given", ["r-7", "", "\u00fc" * 256])
def test_an_id_that_was_given_comes_back_and_without_one_there_is_none(given: str) -> None:
    result = Inferred(1, "1.0.0", "c", (Tensor("y", "BYTES", (1,), ("z",)),))
    assert json.loads(infer_body("m", parse_infer(body(one("BYTES", [1], ["x"]), id=given), LIMIT).id, result))["id"] == given
    assert "id" not in json.loads(infer_body("m", parse_infer(body(one("BYTES", [1], ["x"])), LIMIT).id, result))


@pytest.mark.parametrize("dim", ["9" * 4000, "-" + "9" * 4000, str(2**31 + 1)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_dimension_beyond_every_body_is_refused_whatever_its_digits(dim: str, count: int) -> None:
    shape = ",".join([dim] * count)
    with pytest.raises(ServeError, match="dimension") as refused:
        serve.parse_infer(b'{"inputs":[{"name":"x","shape":[%s],"datatype":"FP32","data":[1]}]}' % shape.encode(), 1 << 20)
    assert refused.value.status == 400
