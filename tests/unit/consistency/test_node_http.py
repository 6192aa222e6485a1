"""How much the answers of many nodes may take of this machine's memory at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from consistency import node_http
from consistency.agent_answers import AgentFault
from consistency.node_http import LARGE_BYTES, MAX_LARGE, HttpOptions, NodeHttp, Request

PART = bytes(LARGE_BYTES // 4)


class Answers(httpx.AsyncBaseTransport):
    """Nodes that say as many parts each as their name says, and how many answers were beyond LARGE_BYTES at the same time."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.open: set[str] = set()
        self.most = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=_Parts(self, request.url.host))


class _Parts(httpx.AsyncByteStream):
    def __init__(self, answers: Answers, node: str) -> None:
        self.answers = answers
        self.node = node

    async def __aiter__(self) -> AsyncIterator[bytes]:
        answers = self.answers
        answers.open.add(self.node)
        for number in range(int(self.node.partition("-")[2])):
            answers.sent[self.node] = (number + 1) * len(PART)
            # one part beyond the bound is read to see that it is large
            answers.most = max(answers.most, sum(answers.sent[each] > LARGE_BYTES + len(PART) for each in answers.open))
            yield PART
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.answers.open.discard(self.node)


def test_few_large_answers_are_read_at_once_and_all_in_the_end() -> None:
    answers = Answers()

    async def work() -> list[bytes | BaseException]:
        async with NodeHttp(HttpOptions(http=answers)) as nodes:
            asked = [Request("GET", f"http://n{number}-{5 + number % 20}", "/", 10 * LARGE_BYTES) for number in range(24)]
            asked += [Request("GET", f"http://m{number}-1", "/", 10 * LARGE_BYTES) for number in range(24)]
            return await asyncio.gather(*(nodes.ask(request) for request in asked), return_exceptions=True)

    found = asyncio.run(work())
    assert [len(body) for body in found if isinstance(body, bytes)] == [(5 + number % 20) * len(PART) for number in range(24)] + [
        len(PART)
    ] * 24
    assert answers.most == MAX_LARGE


class _Drip(_Parts):
    """A large answer whose last bytes come one by one, without end, after as much at once as the node's name says."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield bytes(LARGE_BYTES + 1)
        yield bytes(int(self.node.partition("-")[2]))
        while True:
            await asyncio.sleep(0.005)
            yield b" "


class Dripping(Answers):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host.startswith("drip"):
            return httpx.Response(200, stream=_Drip(self, request.url.host))
        return await super().handle_async_request(request)


@pytest.mark.parametrize("at_once", [0, 8 * LARGE_BYTES])
def test_nodes_that_hold_every_place_make_no_other_late(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many as there are places: the others wait for longer than a question may take, and are answered."""
    monkeypatch.setattr(node_http, "LARGE_STALL_S", 0.3)

    async def work() -> list[object]:
        async with NodeHttp(HttpOptions(http=Dripping(), timeout_s=0.5)) as nodes:
            asked = [Request("GET", f"http://drip{number}-{at_once}", "/", 16 * LARGE_BYTES) for number in range(2 * MAX_LARGE)]
            asked += [Request("GET", f"http://n{number}-6", "/", 16 * LARGE_BYTES) for number in range(2 * MAX_LARGE)]
            return await asyncio.gather(*(nodes.ask_timed(request) for request in asked), return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(work(), 60))
    assert {each.code for each in found[: 2 * MAX_LARGE] if isinstance(each, AgentFault)} == {"timed_out"}
    for told in found[2 * MAX_LARGE :]:
        assert isinstance(told, node_http.Told) and len(told.body) == 6 * len(PART)
        assert told.taken_s < 0.5 < told.passed_s


def test_a_node_that_drips_gives_its_place_back_long_before_its_question_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_http, "LARGE_STALL_S", 0.1)

    async def work() -> AgentFault:
        async with NodeHttp(HttpOptions(http=Dripping(), timeout_s=600)) as nodes:
            with pytest.raises(AgentFault) as caught:
                await nodes.ask(Request("GET", f"http://drip-{8 * LARGE_BYTES}", "/", 16 * LARGE_BYTES))
            return caught.value

    fault = asyncio.run(asyncio.wait_for(work(), 30))
    assert fault.code == "timed_out" and "was slower than 256 KiB/s with a large answer, by 0.1 s" in fault.detail


def test_an_answer_that_is_too_large_or_ends_in_the_middle_gives_its_place_back() -> None:
    answers = Answers()

    async def work() -> list[object]:
        async with NodeHttp(HttpOptions(http=answers, timeout_s=20)) as nodes:
            asked = [nodes.ask(Request("GET", f"http://n{number}-40", "/", 2 * LARGE_BYTES)) for number in range(3 * MAX_LARGE)]
            refused = await asyncio.gather(*asked, return_exceptions=True)
            return [*refused, len(await nodes.ask(Request("GET", "http://last-8", "/", 2 * LARGE_BYTES)))]

    *refused, last = asyncio.run(work())
    assert {each.code for each in refused if isinstance(each, AgentFault)} == {"bad_answer"} and len(refused) == 3 * MAX_LARGE
    assert last == 2 * LARGE_BYTES
