"""One question to a node for all its deployments, digests page by page, and how old an answer is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec
import pytest

from consistency import agents as agents_module
from consistency.agent_answers import AgentFault
from consistency.agents import HttpAgents
from consistency.findings import NodeVector
from consistency.node_http import HttpOptions
from tests.support.fake_fleet import DEPLOYMENT, FakeFleet
from tests.support.node_answers import URL, answering, ask_all, bulk_answer, codes, fault, good_answer


def test_a_node_is_asked_once_for_all_its_deployments() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=bulk_answer("d1", "d2"))

    given = ask_all(handler, ["d1", "d2"], 60_000, timeout_s=12.5, token="secret")
    assert [str(request.url) for request in seen] == [f"{URL}/raftmeta/v1/vector?deployments=d1%2Cd2&wait_s=13&max_age_ms=60000"]
    assert seen[0].headers["authorization"] == "Bearer secret"
    first = given["d1"]
    assert isinstance(first, NodeVector)
    assert (first.node, first.deployment, first.active_models, first.age_ms, first.entries) == ("a1", "d1", 2, 7, None)
    ask_all(handler, ["d1"])
    assert "max_age_ms" not in str(seen[1].url)


def test_names_that_fill_an_address_come_in_several_questions() -> None:
    asked: list[list[str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["deployments"].split(","))
        return httpx.Response(200, json=bulk_answer(*asked[-1]))

    names = [f"deployment-{number:04d}-{'x' * 100}" for number in range(400)]
    given = ask_all(handler, names)
    assert [name for batch in asked for name in batch] == names == list(given)
    assert all(len(",".join(batch)) <= agents_module.MAX_NAMES_CHARS for batch in asked) and len(asked) == 3


def test_of_several_questions_one_that_fails_leaves_the_others_answered() -> None:
    asked: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(1)
        if len(asked) == 2:
            return httpx.Response(503, json={"code": "starting"})
        return httpx.Response(200, json=bulk_answer(*request.url.params["deployments"].split(",")))

    names = [f"deployment-{number:04d}-{'x' * 100}" for number in range(400)]
    given = codes(ask_all(handler, names))
    assert list(given) == names and {*given.values()} == {"", "starting"}
    with pytest.raises(AgentFault, match="starting"):
        ask_all(lambda request: httpx.Response(503, json={"code": "starting"}), ["d1"])


def test_an_answer_for_few_deployments_may_be_small_only() -> None:
    limit = agents_module.MAX_ROOTS_BYTES + 2 * agents_module.MAX_ROOT_BYTES
    with pytest.raises(AgentFault, match=f"exceeds {limit} bytes"):
        ask_all(answering(b" " * (limit + 1)), ["d1", "d2"])


def test_what_a_node_cannot_tell_of_one_deployment_is_a_fault_of_that_one() -> None:
    body = bulk_answer("d1", "d2", "d3")
    del body["vectors"]["d2"], body["vectors"]["d3"]
    body["faults"] = {"d2": {"code": "starting", "detail": "because"}}
    body["vectors"]["d4"] = body["vectors"]["d1"] | {"vector_from": "server"}
    given = ask_all(answering(body), ["d1", "d2", "d3", "d4"])
    assert codes(given) == {"d1": "", "d2": "starting", "d3": "bad_answer", "d4": "attested"}


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        {},
        bulk_answer("d1") | {"vectors": []},
        bulk_answer("d1") | {"faults": {"d1": {}}},
        bulk_answer("d1", vector_root="xyz"),
        bulk_answer("d1", age_ms=-1),
        bulk_answer("d1", age_ms=None),
        bulk_answer("d1", slot=None),
    ],
)
def test_an_answer_for_all_outside_its_form_is_refused(body: Any) -> None:
    with pytest.raises(AgentFault) as caught:
        ask_all(answering(body), ["d1"])
    assert caught.value.code == "bad_answer"


def test_an_answer_without_an_age_or_older_than_was_asked_for_is_not_believed() -> None:
    body = bulk_answer("d1")
    del body["vectors"]["d1"]["age_ms"]
    with pytest.raises(AgentFault, match="age_ms"):
        ask_all(answering(body), ["d1"], 60_000)
    assert codes(ask_all(answering(bulk_answer("d1", age_ms=60_000)), ["d1"], 60_000)) == {"d1": ""}
    assert codes(ask_all(answering(bulk_answer("d1", age_ms=60_001)), ["d1"], 60_000)) == {"d1": "too_old"}
    assert codes(ask_all(answering(bulk_answer("d1", age_ms=50_000)), ["d1"])) == {"d1": "too_old"}, "it was to be read now"
    assert fault(answering(good_answer(age_ms=50_000))).code == "too_old"


def test_a_reading_made_for_this_answer_may_take_longer_than_an_earlier_one_may_be_old() -> None:
    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.05)
        return httpx.Response(200, json=bulk_answer("d1", age_ms=1_040))

    assert codes(ask_all(slow, ["d1"], 0)) == {"d1": ""}  # type: ignore[arg-type]


def test_a_node_of_an_earlier_build_is_asked_for_one_deployment_after_the_other() -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url.raw_path.decode()))
        name = request.url.path.removeprefix("/raftmeta/v1/vector").removeprefix("/")
        if not name:
            return httpx.Response(404, json={"code": "not_found", "detail": "no such resource"})
        if name == "d2":
            return httpx.Response(503, json={"code": "starting"})
        body = good_answer(deployment=name)
        del body["age_ms"]
        return httpx.Response(200, json=body)

    given = ask_all(handler, ["d1", "d2", "d3"], 60_000)
    assert codes(given) == {"d1": "", "d2": "starting", "d3": ""}
    assert asked[1:] == [f"/raftmeta/v1/vector/d{number}?entries=0" for number in (1, 2, 3)], "and told nothing that it does not know"
    first = given["d1"]
    assert isinstance(first, NodeVector) and 0 < first.age_ms < 60_000, "it read its memory for the answer"


def test_a_node_of_an_earlier_build_that_falls_silent_is_asked_no_further() -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) == 1:
            return httpx.Response(404, json={"code": "not_found"})
        if len(asked) == 2:
            return httpx.Response(200, json=good_answer(deployment="d1"))
        raise httpx.ConnectError("connection refused", request=request)

    assert codes(ask_all(handler, ["d1", "d2", "d3"])) == {"d1": "", "d2": "unreachable", "d3": "unreachable"}
    assert len(asked) == 3


def test_digests_come_page_by_page() -> None:
    node = FakeFleet().nodes_by_name["a1"]
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=msgspec.json.encode(node.digests(request.url.params.get("after", ""))))

    async def work(after: str) -> Any:
        async with HttpAgents(HttpOptions(http=httpx.MockTransport(handler))) as agents:
            page = await agents.digests(URL, DEPLOYMENT, after)
            assert page.taken_s > 0
            return msgspec.structs.replace(page, taken_s=0.0)

    assert asyncio.run(work("")) == node.digests("")
    assert asyncio.run(work("layer.0.bias")) == node.digests("layer.0.bias")
    assert [str(request.url).partition("?")[2] for request in seen] == ["sha256=1&wait_s=60", "sha256=1&wait_s=60&after=layer.0.bias"]


def test_the_time_in_which_an_answer_was_under_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(request: httpx.Request) -> httpx.Response:
        now[0] += 10
        if "deployments" in request.url.params:
            return httpx.Response(200, json=bulk_answer(*request.url.params["deployments"].split(","), age_ms=4_000))
        return httpx.Response(200, json=good_answer(age_ms=4_000))

    def under_way(given: dict[str, NodeVector | AgentFault]) -> list[int]:
        return [item.under_way_ms for item in given.values() if isinstance(item, NodeVector)]

    assert under_way(ask_all(slow, ["d1"])) == [6_000], "four of the ten seconds went into the reading"
    assert under_way(ask_all(slow, ["d1"], 60_000)) == [10_000], "the reading may be from before the question"
    names = [f"deployment-{number:04d}-{'x' * 100}" for number in range(160)]
    assert sorted(set(under_way(ask_all(slow, names, 60_000)))) == [10_000, 20_000], "the first waited for the second"

    def older(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"code": "not_found"}) if "deployments" in request.url.params else slow(request)

    assert under_way(ask_all(older, ["d1", "d2"])) == [16_000, 6_000]
