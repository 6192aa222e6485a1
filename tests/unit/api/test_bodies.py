"""Sizes, media types and the order of checks: what is refused before it is read, and before anything is proposed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from api.service import ApiLimits
from tests.unit.api.harness import JSON, MODEL, PUBLISH, Api, Exchange, api, manifest, run

SMALL = ApiLimits(max_body_bytes=2_000, large_bytes=500, max_large_bytes=2_500)


class Stream(httpx.AsyncByteStream):
    """A body of unknown length that counts what was taken of it."""

    def __init__(self, parts: int, size: int = 1_000) -> None:
        self.left, self.size = parts, size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.left:
            self.left -= 1
            yield b" " * self.size


async def refused(made: Api, code: str, headers: dict[str, str], body: bytes | Stream = b"{}") -> httpx.Response:
    reply = await made.client.send(made.client.build_request("PUT", PUBLISH, headers=headers, content=body))
    assert reply.json()["code"] == code, reply.text
    assert made.member.log.proposed == []
    return reply


def test_a_declared_gigabyte_is_refused_before_a_byte_of_it_is_read() -> None:
    async def work() -> None:
        async with api() as made:
            stream = Stream(1 << 20)
            reply = await refused(made, "body_too_large", {**JSON, "content-length": str(1 << 30)}, stream)
            assert reply.headers["connection"] == "close"
            assert reply.json()["limit_bytes"] == made.service.limits.max_body_bytes
            assert stream.left > (1 << 20) - 1_100  # the answer was sent first; then at most 1 MiB is drained

    run(work())


def test_an_undeclared_length_is_counted_while_it_arrives() -> None:
    async def work() -> None:
        async with api(limits=SMALL) as made:
            stream = Stream(5_000)
            await refused(made, "body_too_large", {**JSON, "transfer-encoding": "chunked"}, stream)
            assert stream.left > 3_900
            await refused(made, "bad_json", {**JSON, "transfer-encoding": "chunked"}, Stream(2))

    run(work())


@pytest.mark.parametrize("length", ["-1", "1e3", "+5", "9" * 30])
def test_a_length_that_is_no_sensible_number_is_refused(length: str) -> None:
    async def work() -> None:
        async with api() as made:
            reply = await made.client.put(PUBLISH, headers={**JSON, "content-length": length}, content=b"{}")
            assert reply.json()["code"] in ("bad_request", "body_too_large")

    run(work())


def test_a_batch_has_a_larger_limit() -> None:
    async def work() -> None:
        async with api() as made:
            body = b" " * (5 << 20)
            assert (await made.client.put(PUBLISH, headers=JSON, content=body)).json()["code"] == "body_too_large"
            assert (await made.client.post(f"{MODEL}/versions:batch", headers=JSON, content=body)).json()["code"] == "bad_json"
            body = b" " * (9 << 20)
            assert (await made.client.post(f"{MODEL}/versions:batch", headers=JSON, content=body)).json()["code"] == "body_too_large"

    run(work())


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "json"])
def test_a_body_of_another_media_type_is_refused(media: str) -> None:
    async def work() -> None:
        async with api() as made:
            await refused(made, "unsupported_media_type", {"content-type": media})

    run(work())


def test_a_body_without_a_media_type_and_a_compressed_one_are_refused() -> None:
    async def work() -> None:
        async with api() as made:
            await refused(made, "unsupported_media_type", {})
            await refused(made, "unsupported_media_type", {**JSON, "content-encoding": "gzip"})
            fine = {"content-type": "Application/JSON; charset=UTF-8", "content-encoding": "identity"}
            assert (await made.client.put(PUBLISH, headers=fine, json={"manifest": manifest()})).status_code == 201

    run(work())


def test_large_bodies_share_a_bound_and_small_ones_do_not_feel_it() -> None:
    async def work() -> None:
        async with api(limits=SMALL) as made:
            hold, go = asyncio.Event(), asyncio.Event()

            class Slow(Stream):
                async def __aiter__(self) -> AsyncIterator[bytes]:
                    hold.set()
                    await go.wait()
                    yield b"{}"

            async def large(content: Stream) -> httpx.Response:
                return await made.client.put(PUBLISH, headers={**JSON, "transfer-encoding": "chunked"}, content=content)  # type: ignore[arg-type]

            first = asyncio.create_task(large(Slow(1)))
            await hold.wait()
            assert (await large(Stream(1))).json()["code"] == "overloaded"
            assert (await made.client.put(PUBLISH, headers=JSON, content=b"{}")).json()["code"] == "bad_field"
            go.set()
            assert (await first).json()["code"] == "bad_field"
            assert made.service.large_bytes == 0

    run(work())


def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_nothing_behind() -> None:
    async def work() -> None:
        async with api() as made:
            headers = ((b"content-type", b"application/json"), (b"content-length", b"100"))
            exchange = Exchange(made.application, PUBLISH, headers=headers)
            exchange._scope["method"] = "PUT"
            parts = [{"type": "http.request", "body": b'{"mani', "more_body": True}, {"type": "http.disconnect"}]

            async def receive() -> object:
                return parts.pop(0)

            exchange._receive = receive  # type: ignore[method-assign, assignment]
            async with exchange:
                pass
            assert (exchange.status, made.service.in_flight, made.member.log.proposed) == (0, 0, [])

    run(work())


def test_work_on_a_large_body_runs_beside_the_loop() -> None:
    async def work() -> None:
        async with api(limits=ApiLimits(large_bytes=100)) as made:
            reply = await made.publish()
            assert reply.status_code == 201
            assert (await made.client.get(f"{PUBLISH}/manifest")).json() == manifest()
        async with api(limits=ApiLimits(large_bytes=100, max_large_queue=0)) as made:
            assert (await made.publish()).json()["code"] == "overloaded"

    run(work())
