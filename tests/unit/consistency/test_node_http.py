"""How much the answers of many nodes may take of this machine's memory at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

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
