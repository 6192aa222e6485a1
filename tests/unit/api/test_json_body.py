"""Bodies: what is no strict JSON, what is no such value, and that the quick way and the exact way agree."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.json_body import Body
from api.schemas.bodies import ActivateBody, AttestBody, BatchBody, DeploymentBody, PublishBody, VerdictBody
from raftmeta.core.errors import RaftmetaError
from raftmeta.nodes import NodeStatus
from tests.unit.api.harness import DEPLOYMENT, manifest

PUBLISH = Body(PublishBody)
VERDICT = Body(VerdictBody, free_form=True)


def code_of(body: Body[Any], data: bytes) -> str:
    with pytest.raises(RaftmetaError) as caught:
        body.decode(data)
    return caught.value.code


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"version":"1","version":"2"}',
        b'{"version":"1","vers\\u0069on":"2"}',
        b'{"version" :"1", "version"\n:"1"}',
        b'{"version":NaN}',
        b'{"version":-Infinity}',
        b'{"version":"1"} x',
        b'{"version":"1"}{"version":"1"}',
        b'{"version":"\xff"}',
        b'{"version":"\\ud800"}',
        b"\xef\xbb\xbf{}",
        b"{'version':'1'}",
        b'{"version":"1",}',
        b'{"version":' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"version":' + b"[" * 100_000,
        b'{"x":' * 70 + b"1" + b"}" * 70,
    ],
)
def test_what_is_no_strict_json_is_refused_as_such(data: bytes) -> None:
    assert code_of(Body(ActivateBody), data) == "bad_json"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"version":1}', "Expected `str`, got `int`"),
        (b"[]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b"{}", "missing required field `version`"),
        (b'{"version":"a b"}', "regex"),
        (b'{"version":"1.0\\n"}', "regex"),
        (b'{"version":"1","expected_versoin":""}', "did you mean 'expected_version'?"),
        (b'{"version":"1","zzzzz":""}', "known are version, expected_version"),
    ],
)
def test_a_value_of_another_shape_is_a_bad_field_that_says_what_was_expected(data: bytes, says: str) -> None:
    with pytest.raises(RaftmetaError) as caught:
        Body(ActivateBody).decode(data)
    assert caught.value.code == "bad_field"
    assert says in caught.value.detail


@pytest.mark.parametrize(
    ("body", "value", "nearest"),
    [
        (PUBLISH, {"manifest": {**manifest(), "sorces": []}}, "'sources'"),
        (PUBLISH, {"manifest": {**manifest(), "files": [{**manifest()["files"][0], "sha265": ""}]}}, "'sha256'"),
        (Body(BatchBody), {"items": [{"lable": "1", "label": "1", "manifest": manifest()}]}, "'label'"),
        (Body(DeploymentBody), {**DEPLOYMENT, "standby": {"zone": "z", "nodes": ["n"], "node": ""}}, "'nodes'"),
        (Body(DeploymentBody), {**DEPLOYMENT, "policy": {"sync_timeout": 5}}, "'sync_timeout_ms'"),
        (
            Body(NodeStatus),
            {
                "node": "n",
                "zone": "z",
                "boot_id": "b",
                "url": "",
                "slots": [],
                "deployments": {"d": {"version": "1", "checksum": "", "vector_root": "", "raedy": True, "ready": True, "lag_ms": 0}},
            },
            "'ready'",
        ),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_known_one_wherever_it_stands(body: Body[Any], value: object, nearest: str) -> None:
    with pytest.raises(RaftmetaError) as caught:
        body.decode(json.dumps(value).encode())
    assert caught.value.code == "bad_field"
    assert f"did you mean {nearest}?" in caught.value.detail


def test_a_free_form_part_is_bounded_in_depth_and_strict() -> None:
    deep = {"deployment": "d", "verdict": "consistent", "report": {"x": json.loads("[" * 63 + "]" * 63)}}
    assert code_of(VERDICT, json.dumps(deep).encode()) == "bad_json"
    deep["report"] = {"x": json.loads("[" * 60 + "]" * 60)}
    assert VERDICT.decode(json.dumps(deep).encode()).deployment == "d"
    assert code_of(VERDICT, b'{"deployment":"d","verdict":"consistent","report":{"a":{"b":1,"b":1}}}') == "bad_json"


def test_an_escaped_colon_hides_no_repeated_key() -> None:
    sent = b'{"rollout_id":"r","side":"primary","stage":"failed","checksum":"","boot_id":"b","code":"x"'
    assert Body(AttestBody).decode(sent + b',"detail":"a\\u003ab"}').detail == "a:b"
    assert code_of(Body(AttestBody), sent + b',"detail":"a\\u003ab","detail":"a\\u003ab"}') == "bad_json"


def test_numbers_beyond_their_range_are_a_bad_field() -> None:
    sent = {"rollout_id": "r", "side": "primary", "stage": "ready", "checksum": "", "boot_id": "b", "counters": {"bytes_total": 1 << 70}}
    assert code_of(Body(AttestBody), json.dumps(sent).encode()) == "bad_field"
    sent["counters"] = {"bytes_total": -1}
    assert code_of(Body(AttestBody), json.dumps(sent).encode()) == "bad_field"


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, bool]:
    """A publish body as text, and whether a key stands twice in one of its objects."""
    doubled = draw(st.booleans())
    value = {"manifest": manifest(draw(st.integers(0, 9)))}
    value["manifest"]["sources"] = draw(st.lists(st.sampled_from(["http://h:1/", "file:///a:b/", 'http://h/"', "http://ü/"]), max_size=3))
    space = draw(st.sampled_from(["", " ", "\n\t"]))
    escape = draw(st.booleans())
    objects = [value, value["manifest"], value["manifest"]["files"][0], value["manifest"]["tensors"][0]]
    target = draw(st.sampled_from(objects)) if doubled else None
    key = draw(st.sampled_from(sorted(target))) if target is not None else ""

    def text(node: Any) -> str:
        if isinstance(node, dict):
            pairs = [(name, text(item)) for name, item in node.items()]
            if node is target:
                pairs.insert(draw(st.integers(0, len(pairs))), (key, text(node[key])))
            return "{" + ",".join(f"{json.dumps(name)}{space}:{space}{item}" for name, item in pairs) + "}"
        if isinstance(node, list):
            return "[" + ",".join(map(text, node)) + "]"
        return json.dumps(node, ensure_ascii=escape)

    return text(value), doubled


@given(documents())
def test_a_repeated_key_is_found_wherever_it_stands_and_nothing_else_is_refused(document: tuple[str, bool]) -> None:
    text, doubled = document
    if doubled:
        assert code_of(PUBLISH, text.encode()) == "bad_json"
    else:
        assert PUBLISH.decode(text.encode()).manifest.engine == "hf"


def test_a_key_that_stands_twice_is_no_match_for_a_field_that_was_left_out() -> None:
    value = {"manifest": manifest()}
    text = json.dumps(value)
    assert PUBLISH.decode(text.encode()).manifest.probes == ()
    assert code_of(PUBLISH, text.replace('"engine": "hf"', '"engine": "hf", "engine": "hf"').encode()) == "bad_json"


class Lenient(msgspec.Struct):
    name: str


class Adding(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    items: tuple[Annotated[Adding, msgspec.Meta(description="x")] | None, ...]


@pytest.mark.parametrize("shape", [Lenient, Adding, Inner])
def test_a_type_whose_repeated_keys_would_not_all_show_is_no_body(shape: type[msgspec.Struct]) -> None:
    with pytest.raises(TypeError, match="must forbid unknown fields and omit defaults"):
        Body(shape)


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_end_in_a_value_or_in_an_error_with_a_code(data: bytes) -> None:
    for body in (Body(ActivateBody), VERDICT):
        try:
            body.decode(data)
        except RaftmetaError as error:
            assert error.code in ("bad_json", "bad_field")
