"""The event stream: any cut of the bytes reads the same, a lost connection resumes without gap or repeat, `compacted` is told."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.client import Bookmark, Change, Client, RaftmetaError, WatchOptions
from raftmeta.client.sse import SseEvent, SseParser
from tests.unit.client.members import Members, bookmark, change, dead, events, in_turn, ok, problem, run

A, B = "http://a:1", "http://b:1"

STREAM = (
    b'\xef\xbb\xbfid: 1\r\n: hello\nevent: change\rdata: {"a":\ndata:  1}\n\nretry: 5\n'
    b"id: 2\n\nunknown: x\ndata\n\nevent: compacted\n\ndata: cut"
)
PARSED = [SseEvent("change", "1", '{"a":\n 1}'), SseEvent("message", "2", ""), SseEvent("compacted", "2", "")]


def watch(members: Members, until: int, urls: tuple[str, ...] = (A, B), from_revision: int = 0, **options: Any) -> list[Any]:
    async def work() -> list[Any]:
        got: list[Any] = []
        client = Client(urls, options=members.options())
        async with client, aclosing(client.watch(from_revision, options=WatchOptions(**options))) as changes:
            async for item in changes:
                got.append(item)
                if item.revision >= until:
                    break
        return got

    result: list[Any] = run(work())
    return result


def asked(members: Members) -> list[str]:
    return [request.url.params["from_revision"] for request in members.requests]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_are_cut(cuts: list[int]) -> None:
    parser, got, at = SseParser(), [], 0
    for cut in [*sorted(cuts), len(STREAM)]:
        got += parser.feed(STREAM[at:cut])
        at = cut
    assert got == PARSED


@given(st.binary(max_size=300))
def test_garbage_is_parsed_or_refused_never_a_crash(data: bytes) -> None:
    try:
        SseParser(max_line_bytes=100, max_event_bytes=100).feed(data)
    except RaftmetaError as error:
        assert error.code in ("body_too_large", "bad_request")


def test_lines_and_events_are_bounded() -> None:
    with pytest.raises(RaftmetaError, match="a line"):
        SseParser(max_line_bytes=10).feed(b"data: 1234567")
    parser = SseParser(max_event_bytes=10)
    with pytest.raises(RaftmetaError, match="one event"):
        for _ in range(10):
            parser.feed(b"data: 123\n")


def test_each_revision_comes_once_and_a_lost_connection_resumes_after_the_last() -> None:
    first = events(change(1), change(2)[:20], error=httpx.ReadError("reset"))
    second = events(change(1), change(2), bookmark(3), change(4))
    members = Members({"a": first, "b": second})
    got = watch(members, until=4)
    assert [item.revision for item in got] == [1, 2, 3, 4]
    assert [type(item) for item in got] == [Change, Change, Bookmark, Change]
    assert asked(members) == ["0", "1"]
    assert got[0].events[0]._asdict() == {"kind": "model", "key": "m", "op": "put", "value": {"name": "m"}}


def test_a_stream_that_ends_is_taken_up_elsewhere_from_its_bookmark() -> None:
    members = Members({"a": events(bookmark(9)), "b": events(change(10))})
    assert [item.revision for item in watch(members, until=10)] == [9, 10]
    assert asked(members) == ["0", "9"]


def test_members_that_cannot_serve_are_passed_over_and_waited_for() -> None:
    members = Members({"a": dead, "b": in_turn(problem("starting"), events(change(1)))})
    assert [item.revision for item in watch(members, until=1)] == [1]
    assert members.hosts() == ["a", "b", "a", "b"] and len(members.time.sleeps) == 1


@pytest.mark.parametrize("handler", [problem("compacted"), events(b"event: compacted\n\n"), events(b"event: compacted\ndata: {}\n\n")])
def test_a_position_that_is_no_longer_retained_ends_the_watch(handler: Any) -> None:
    with pytest.raises(RaftmetaError) as raised:
        watch(Members({"a": handler, "b": ok()}), until=1)
    assert raised.value.code == "compacted"


def test_a_new_generation_ends_the_watch() -> None:
    members = Members({"a": events(change(5), generation=1), "b": events(change(6), generation=2)})
    with pytest.raises(RaftmetaError, match="generation moved from 1 to 2") as raised:
        watch(members, until=6)
    assert raised.value.code == "compacted"


def test_a_refused_watch_is_not_repeated() -> None:
    members = Members({"a": problem("forbidden"), "b": events(change(1))})
    with pytest.raises(RaftmetaError) as raised:
        watch(members, until=1)
    assert raised.value.code == "forbidden" and members.hosts() == ["a"]


@pytest.mark.parametrize("code", ["too_many_watchers", "internal", "integrity", "unauthenticated"])
def test_a_member_that_cannot_serve_this_watch_does_not_speak_for_the_others(code: str) -> None:
    members = Members({"a": problem(code), "b": events(change(1))})
    assert [item.revision for item in watch(members, until=1)] == [1]
    everywhere = Members({"a": problem(code), "b": dead})
    with pytest.raises(RaftmetaError, match=f"because {code}") as raised:
        watch(everywhere, until=1)
    assert raised.value.code == code and everywhere.hosts() == ["a", "b"]


def test_an_event_that_one_member_garbles_is_taken_from_another_and_ends_the_watch_when_all_do() -> None:
    bad = events(bookmark(3), b"event: change\ndata: nope\n\n")
    assert [item.revision for item in watch(Members({"a": bad, "b": events(change(4))}), until=4)] == [3, 4]
    with pytest.raises(RaftmetaError) as raised:
        watch(Members({"a": bad, "b": bad}), until=4)
    assert raised.value.code == "bad_json"


def test_a_stream_that_is_encoded_is_not_decoded() -> None:
    def encoded(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"this is not gzip"))

    members = Members({"a": encoded, "b": events(change(1))})
    assert [item.revision for item in watch(members, until=1)] == [1]


def test_watches_begin_at_drawn_members_and_leave_the_calls_where_they_are() -> None:
    async def begun(draw: float) -> tuple[list[str], str]:
        members = Members({"a": events(change(1)), "b": events(change(1))})
        options = replace(members.options(), timing=replace(members.time.timing(), draw=lambda: draw))
        async with Client((A, B), options=options) as client, aclosing(client.watch(0)) as changes:
            await anext(changes)
            return members.hosts(), client.current_url

    assert [run(begun(draw)) for draw in (0.0, 0.49, 0.5, 0.999)] == [(["a"], A), (["a"], A), (["b"], A), (["b"], A)]


def test_streams_that_end_after_a_bookmark_each_are_waited_for_longer_and_longer() -> None:
    short = [events(bookmark(revision)) for revision in range(1, 30)]
    members = Members({"a": in_turn(*short, events(change(40))), "b": in_turn(*short, events(change(40)))})
    watch(members, until=40)
    sleeps = members.time.sleeps
    assert len(sleeps) == len(members.requests) // 2 and sleeps[:5] == sorted(sleeps[:5]) and sleeps[4] > sleeps[0]


def test_a_bounded_watch_gives_up_when_nobody_answers() -> None:
    members = Members({"a": dead, "b": dead})
    with pytest.raises(RaftmetaError, match="no member served the watch for 3 s"):
        watch(members, until=1, give_up_after_s=3.0)


@pytest.mark.parametrize(
    "data",
    [b"{}", b'{"revision":true}', b'{"revision":1}', b'{"revision":1,"events":[1]}', b'{"revision":1,"events":[{"op":"x"}]}', b"nope"],
)
def test_an_event_that_is_malformed_is_an_error_and_no_gap(data: bytes) -> None:
    members = Members({"a": events(b"event: change\ndata: " + data + b"\n\n")})
    with pytest.raises(RaftmetaError) as raised:
        watch(members, until=1, urls=(A,))
    assert raised.value.code == "bad_json"


def test_kinds_of_events_of_a_later_server_are_passed_over() -> None:
    members = Members({"a": events(b"event: news\ndata: x\n\n", change(1))})
    assert [item.revision for item in watch(members, until=1, urls=(A,), resources=("models", "rollouts"))] == [1]
    assert members.requests[0].url.params["resource"] == "models,rollouts"
