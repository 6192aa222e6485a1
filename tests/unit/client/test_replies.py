"""Replies are strict, bounded JSON with their place in history; errors keep the server's code."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.client import Client, Page, RaftmetaError, all_items
from raftmeta.client.problem import to_error
from raftmeta.client.transport import MAX_PROBLEM_BYTES
from raftmeta.core.errors import CODES
from raftmeta.core.manifest import FORMAT, FileEntry, Manifest
from raftmeta.strict_json import MAX_BYTES
from tests.unit.client.members import Members, in_turn, ok, run

A = "http://a:1"


def call(members: Members, method: str, *args: Any) -> Any:
    async def work() -> Any:
        async with Client([A], options=members.options()) as client:
            return await getattr(client, method)(*args)

    return run(work())


def test_a_reply_carries_revision_and_generation() -> None:
    reply = call(Members({"a": ok({"name": "search"}, revision=41, generation=3)}), "get_deployment", "search")
    assert reply == {"name": "search"} and (reply.revision, reply.generation, reply.status) == (41, 3, 200)


@pytest.mark.parametrize(
    "body", [b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1} x', b"[1]", b"\xff", b"[" * 100_000, b'{"a":{"b":1,"b":1}}']
)
def test_a_reply_that_is_no_strict_json_object_is_an_error(body: bytes) -> None:
    members = Members({"a": lambda request: httpx.Response(200, content=body)})
    with pytest.raises(RaftmetaError) as raised:
        call(members, "cluster")
    assert raised.value.code == "bad_json"


def test_an_error_body_past_its_limit_is_not_read_to_its_end() -> None:
    members = Members({"a": lambda request: httpx.Response(409, content=b"x" * (MAX_PROBLEM_BYTES + 1))})
    with pytest.raises(RaftmetaError) as raised:
        call(members, "cluster")
    assert raised.value.code == "body_too_large"


def test_a_reply_that_announces_more_than_the_limit_is_not_read_at_all() -> None:
    class Untouched(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"x"
            raise AssertionError("the body was read")

    headers = {"content-length": str(MAX_BYTES + 1)}
    with pytest.raises(RaftmetaError, match="announces") as raised:
        call(Members({"a": lambda request: httpx.Response(200, headers=headers, stream=Untouched())}), "cluster")
    assert raised.value.code == "body_too_large"


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_survives_the_way_from_server_to_caller(code: str) -> None:
    body = {"code": code, "detail": "d", "status": CODES[code].status, "rollout_id": "r1", "limit": 5, "self": "x", "odd-name": 1}
    error = to_error(CODES[code].status, json.dumps(body).encode())
    assert (error.code, error.detail, error.params) == (code, "d", {"rollout_id": "r1", "limit": 5})


@pytest.mark.parametrize(
    ("error_class", "status"), [("invalid", 422), ("rejected", 409), ("unavailable", 503), ("capacity", 507), ("integrity", 500)]
)
def test_a_code_of_a_later_server_keeps_its_class(error_class: str, status: int) -> None:
    error = to_error(status, json.dumps({"code": "from_the_future", "class": error_class, "detail": "d"}).encode())
    assert error.info.error_class == error_class and "from_the_future" in error.detail


@pytest.mark.parametrize(
    ("status", "code"), [(502, "unknown_outcome"), (404, "not_found"), (500, "internal"), (418, "bad_request"), (413, "body_too_large")]
)
def test_an_error_page_that_is_no_problem_document_is_judged_by_its_status(status: int, code: str) -> None:
    error = to_error(status, b"<html>" + b"x" * 10_000)
    assert error.code == code and len(error.detail) < 400


@given(st.integers(300, 599), st.binary(max_size=200))
def test_no_body_of_an_error_breaks_the_client(status: int, body: bytes) -> None:
    assert to_error(status, body).code in CODES


def test_names_are_quoted_and_cannot_leave_their_place_in_the_path() -> None:
    members = Members({"a": ok({})})
    call(members, "get_version", "a/../../b", "1.0?x#y")
    assert members.requests[0].url.raw_path == b"/v1/models/a%2F..%2F..%2Fb/versions/1.0%3Fx%23y"
    for name in ("", ".", ".."):
        with pytest.raises(RaftmetaError) as raised:
            call(members, "get_model", name)
        assert raised.value.code == "bad_name"


def test_a_manifest_value_and_its_json_publish_the_same_body() -> None:
    manifest = Manifest(FORMAT, "hf", (FileEntry("a", 1, "0" * 64, "config"),), (), (), "0" * 64, ())
    members = Members({"a": ok({}, status=201)})
    call(members, "publish", "m", "v1", manifest)
    body = json.loads(members.requests[0].content)
    call(members, "publish", "m", "v1", body["manifest"])
    assert members.requests[0].content == members.requests[1].content
    assert body["manifest"]["files"] == [{"name": "a", "size_bytes": 1, "sha256": "0" * 64, "role": "config"}]


def test_a_list_is_read_page_by_page_to_its_end() -> None:
    members = Members({"a": in_turn(ok({"items": [{"n": 1}, {"n": 2}], "next": "2"}), ok({"items": [{"n": 3}], "next": None}))})

    async def work() -> list[dict[str, Any]]:
        async with Client([A], options=members.options()) as client:
            return [item async for item in all_items(client.list_models)]

    assert run(work()) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert [dict(request.url.params) for request in members.requests] == [{}, {"after": "2"}]


def test_a_list_that_goes_in_circles_ends_with_an_error() -> None:
    members = Members({"a": ok({"items": [], "next": "same"})})

    async def work() -> None:
        async with Client([A], options=members.options()) as client:
            async for _ in all_items(lambda page: client.list_versions("m", Page(10, page.after))):
                pass

    with pytest.raises(RaftmetaError, match="circles"):
        run(work())
