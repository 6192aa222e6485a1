"""What may follow the path of a vector, and what control is asked for then."""

from __future__ import annotations

import pytest

from node_agent import vector_query
from node_agent.digests import MAX_PAGE_BYTES
from node_agent.messages import GetDigests, GetVector, GetVectors, Numbered
from node_agent.serve import ServeError


@pytest.mark.parametrize(
    ("query", "call"),
    [
        (b"", GetVector(1, "d", False, "")),
        (b"entries=0", GetVector(1, "d", False, "")),
        (b"entries=1&wait_s=5", GetVector(1, "d", True, "", wait_s=5)),
        (b"blocks=a.weight%26", GetVector(1, "d", False, "a.weight&")),
        (b"blocks=a&published=0", GetVector(1, "d", False, "a")),
        (b"blocks=a&published=1", GetVector(1, "d", False, "a", published=True)),
        (b"sha256=1", GetDigests(1, "d", "", MAX_PAGE_BYTES, 30)),
        (b"sha256=1&after=a%2Cb&limit_bytes=7", GetDigests(1, "d", "a,b", 7, 30)),
    ],
)
def test_a_question_for_one_deployment_becomes_one_call(query: bytes, call: Numbered) -> None:
    assert vector_query.of_one("d", query).make(1) == call


@pytest.mark.parametrize(
    ("query", "call"),
    [
        (b"", GetVectors(1, (), None, 30)),
        (b"deployments=a,b-1", GetVectors(1, ("a", "b-1"), None, 30)),
        (b"max_age_ms=0", GetVectors(1, (), 0, 30)),
        (b"deployments=a&max_age_ms=60000&wait_s=60", GetVectors(1, ("a",), 60_000, 60)),
    ],
)
def test_a_question_for_all_deployments_becomes_one_call(query: bytes, call: Numbered) -> None:
    assert vector_query.of_all(query).make(1) == call


def test_who_asks_says_how_long_an_answer_may_take() -> None:
    assert vector_query.of_one("d", b"").wait_s == vector_query.WAIT_S
    assert vector_query.of_one("d", b"wait_s=300").wait_s == 300
    assert vector_query.of_all(b"wait_s=300").wait_s == 300


WRONG_OF_ONE = [
    b"published=1",
    b"blocks=&published=1",
    b"blocks=a&published=yes",
    b"entries=2",
    b"entries",
    b"depth=1",
    b"entries=1&entries=1",
    b"entries=1&sha256=1",
    b"sha256=1&blocks=",
    b"after=x",
    b"entries=1&limit_bytes=1",
    b"sha256=1&limit_bytes=0",
    b"sha256=1&limit_bytes=99999999999",
    b"wait_s=0",
    b"wait_s=3601",
    b"wait_s=-1",
    b"wait_s=1.5",
    b"\xff=1",
    b"&".join(b"a=%d" % number for number in range(9)),
]
WRONG_OF_ALL = [
    b"entries=1",
    b"deployments=",
    b"deployments=a,,b",
    b"deployments=a,b,a",
    b"deployments=A",
    b"deployments=a%20b",
    b"max_age_ms=-1",
    b"max_age_ms=",
]


@pytest.mark.parametrize("query", WRONG_OF_ONE)
def test_a_wrong_question_for_one_is_refused(query: bytes) -> None:
    with pytest.raises(ServeError) as refused:
        vector_query.of_one("d", query)
    assert refused.value.status == 400


@pytest.mark.parametrize("query", [*WRONG_OF_ALL, b"deployments=" + b",".join([b"a"] * (vector_query.MAX_DEPLOYMENTS + 1))])
def test_a_wrong_question_for_all_is_refused(query: bytes) -> None:
    with pytest.raises(ServeError) as refused:
        vector_query.of_all(query)
    assert refused.value.status == 400
