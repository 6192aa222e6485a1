"""Questions to agents over HTTP: what is sent, what is refused, and that every trouble becomes a fault with a code in bounded time."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from consistency import vector
from consistency.agent_answers import AgentFault
from consistency.agents import HttpAgents
from consistency.findings import NodeVector
from consistency.node_http import MAX_PROBLEM_BYTES, HttpOptions
from raftmeta.core.errors import RaftmetaError
from tests.support.certificates import TestAuthority
from tests.support.fake_fleet import DEPLOYMENT
from tests.support.node_answers import URL, answering, ask, ask_all, ask_blocks, bulk_answer, fault, good_answer


def test_the_question_names_deployment_and_detail_and_carries_the_token() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=good_answer())

    given = ask(handler, f"{URL}/", entries=True, options={"token": "secret"})
    assert str(seen[0].url) == f"{URL}/raftmeta/v1/vector/search?entries=1"
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert (given.node, given.version, given.slot) == ("a1", "v1", 1)
    assert given.entries is not None and vector.root(given.entries) == given.vector_root
    ask(handler)
    assert seen[1].url.query == b"entries=0"
    assert "authorization" not in seen[1].headers


def test_names_cannot_leave_their_place_in_the_address() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"tensor": "a&entries=1/../x", "blocks": ""})

    ask_blocks(handler, "a&entries=1/../x")
    assert seen[0].url.raw_path == b"/raftmeta/v1/vector/search?blocks=a%26entries%3D1%2F..%2Fx"


def test_blocks_arrive_as_they_were_computed() -> None:
    checks = vector.block_checks(bytes(range(256)) * 600)
    packed = base64.b64encode(vector.pack_blocks(checks)).decode()
    assert np.array_equal(ask_blocks(answering({"tensor": "norm", "blocks": packed})), checks)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"tensor": "other", "blocks": ""}, "asked for the blocks of 'norm', got those of 'other'"),
        ({"tensor": "norm", "blocks": "AAAA"}, "cannot be read"),
        ({"tensor": "norm", "blocks": "?"}, "cannot be read"),
        ({"tensor": "norm"}, "missing required field `blocks`"),
    ],
)
def test_blocks_that_are_not_what_was_asked_for_are_refused(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(AgentFault, match=reason) as caught:
        ask_blocks(answering(body))
    assert caught.value.code == "bad_answer"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        {},
        good_answer(vector_root="xyz"),
        good_answer(checksum="A" * 64),
        good_answer(slot=None),
        good_answer(active_models="1"),
        good_answer(switching=0),
        good_answer(node="n" * 300),
        good_answer(entries={"w": "short"}),
        good_answer(entries=[]),
        msgspec.json.encode(good_answer()).replace(b'"norm"', b'"\\ud800"'),
        msgspec.json.encode(good_answer()).replace(b"40.0", b"NaN"),
    ],
)
def test_an_answer_outside_its_form_is_refused(body: Any) -> None:
    assert fault(answering(body)).code == "bad_answer"


def test_entries_that_were_asked_for_and_left_out_are_refused() -> None:
    body = good_answer(entries=None)
    assert fault(answering(body), entries=True).code == "bad_answer"
    assert ask(answering(body)).entries is None


def test_a_vector_that_was_not_computed_from_memory_is_not_judged() -> None:
    assert ask(answering(good_answer(vector_from="memory"))).version == "v1"
    found = fault(answering(good_answer(vector_from="server")))
    assert found.code == "attested" and "word of the server" in found.detail


def test_unknown_fields_are_left_alone() -> None:
    assert ask(answering(good_answer(new_in_a_later_release=5))).node == "a1"


def test_an_answer_without_end_is_cut() -> None:
    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            while True:
                yield b" " * (1 << 20)

    assert "exceeds 67108864 bytes" in fault(lambda request: httpx.Response(200, stream=Endless())).detail
    assert f"exceeds {MAX_PROBLEM_BYTES} bytes" in fault(lambda request: httpx.Response(500, stream=Endless())).detail


def test_a_refusal_keeps_the_agents_code() -> None:
    problem = {"code": "starting", "detail": "the slot is being restored", "status": 503}
    refused = fault(answering(problem, 503))
    assert (refused.code, refused.detail) == ("starting", "the node answered with status 503: the slot is being restored")


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"code": "Not A Code"}'])
def test_a_refusal_without_a_code_is_called_refused(body: bytes) -> None:
    assert (fault(answering(body, 502)).code, fault(answering(body, 502)).detail) == ("refused", "the node answered with status 502")


def test_a_redirect_is_not_followed() -> None:
    moved = fault(lambda request: httpx.Response(307, headers={"location": "http://elsewhere/"}))
    assert (moved.code, moved.detail) == ("refused", "the node answered with status 307")


ODD_URLS = [
    "",
    "node-a:8500",
    "ftp://node-a/",
    "http://user:pass@node-a/",
    "http://node-a/?x=1",
    "http://node-a/#x",
    "http://",
    "http://node-a:99999",
    "http://node-a\n.example",
]


@pytest.mark.parametrize("url", ODD_URLS)
def test_an_address_that_is_no_plain_url_is_not_asked(url: str) -> None:
    assert fault(answering(good_answer()), url).code == "insecure_url"


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://node-a:8500", True),
        ("http://127.0.0.1:8500", True),
        ("http://[::1]:8500", True),
        ("http://localhost:8500", True),
        ("http://node-a:8500", False),
        ("http://10.0.0.5:8500", False),
        ("http://localhost.example:8500", False),
    ],
)
def test_a_token_goes_out_only_over_tls_or_to_this_machine(url: str, sent: bool) -> None:
    if sent:
        assert ask(answering(good_answer()), url, options={"token": "secret"}).node == "a1"
    else:
        refused = fault(answering(good_answer()), url, options={"token": "secret"})
        assert (refused.code, "is not https, so the token is not sent there" in refused.detail) == ("insecure_url", True)
        assert ask(answering(good_answer()), url).node == "a1"


def test_a_node_that_is_not_there_is_unreachable() -> None:
    def dead(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    assert fault(dead).code == "unreachable"


def test_a_silent_node_ends_at_its_own_deadline_and_holds_up_nobody_else() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host == "silent":
            await asyncio.Event().wait()
        return httpx.Response(200, json=good_answer())

    async def work() -> tuple[NodeVector, AgentFault]:
        options = HttpOptions(timeout_s=0.1, http=httpx.MockTransport(handler))
        async with HttpAgents(options) as agents:
            silent = asyncio.create_task(agents.vector("http://silent", DEPLOYMENT, entries=False))
            given = await agents.vector("http://other", DEPLOYMENT, entries=False)
            with pytest.raises(AgentFault) as caught:
                await silent
            return given, caught.value

    given, late = asyncio.run(work())
    assert given.node == "a1"
    assert (late.code, late.detail) == ("timed_out", "http://silent did not answer within 0.1 s")


def test_no_more_than_the_limit_are_asked_at_once() -> None:
    running = most = 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return httpx.Response(200, json=good_answer())

    async def work() -> None:
        async with HttpAgents(HttpOptions(max_at_once=3, http=httpx.MockTransport(handler))) as agents:
            await asyncio.gather(*(agents.vector(f"http://n{number}", DEPLOYMENT, entries=False) for number in range(20)))

    asyncio.run(work())
    assert most == 3


# Real TLS on loopback.


@contextmanager
def tls_node(authority: TestAuthority) -> Iterator[str]:
    class Node(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = msgspec.json.encode(good_answer())
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    files = authority.agent("node-a")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Node)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def ask_tls(url: str, ca_file: Path | None) -> NodeVector:
    async def work() -> NodeVector:
        async with HttpAgents(HttpOptions(token="secret", ca_file=ca_file, timeout_s=10)) as agents:
            return await agents.vector(url, DEPLOYMENT, entries=False)

    return asyncio.run(work())


def test_only_a_node_with_a_certificate_of_the_own_authority_is_believed(tmp_path: Path) -> None:
    ours, theirs = TestAuthority(tmp_path / "ours"), TestAuthority(tmp_path / "theirs", "c2")
    with tls_node(ours) as url:
        assert ask_tls(url, tmp_path / "ours" / "ca.pem").node == "a1"
        for ca_file in (tmp_path / "theirs" / "ca.pem", None):
            with pytest.raises(AgentFault, match="certificate is not trusted here") as caught:
                ask_tls(url, ca_file)
            assert caught.value.code == "untrusted"
    assert theirs.pem != ours.pem


def test_a_broken_authority_file_is_a_configuration_fault(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for path in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
        with pytest.raises(RaftmetaError, match="cannot be used") as caught:
            HttpAgents(HttpOptions(ca_file=path))
        assert caught.value.code == "bad_field"


# Nodes that mean harm.

DEEP = b'{"x":' + b"[" * 3_000 + b"]" * 3_000 + b"}"


def test_an_answer_that_nests_too_deeply_is_a_bad_answer_also_where_nobody_looks() -> None:
    assert fault(answering(DEEP)).code == "bad_answer"
    assert (fault(answering(DEEP, 500)).code, fault(answering(DEEP, 500)).detail) == ("refused", "the node answered with status 500")
    with pytest.raises(AgentFault) as caught:
        ask_all(answering(DEEP), ["d1"])
    assert caught.value.code == "bad_answer"


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("coding", ["gzip", "gzip, gzip", "br", "identity, deflate"])
def test_an_answer_that_is_packed_is_refused_before_it_is_unpacked(status: int, coding: str) -> None:
    class Untouched(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            raise AssertionError("it was read")
            yield b""

    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, stream=Untouched(), headers={"content-encoding": coding})

    refused = fault(handler)
    assert refused.code == "bad_answer" and "content-encoding" in refused.detail
    assert seen[0].headers["accept-encoding"] == "identity"


def test_what_one_node_sets_is_not_sent_to_another() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=good_answer(), headers={"set-cookie": "a=b; Path=/"})

    async def work() -> None:
        async with HttpAgents(HttpOptions(http=httpx.MockTransport(handler))) as agents:
            for _ in range(2):
                await agents.vector(URL, DEPLOYMENT, entries=False)

    asyncio.run(work())
    assert len(seen) == 2 and all("cookie" not in request.headers for request in seen)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lag_ms", 1e308), ("lag_ms", -2), ("epoch", 10**30), ("computed_at_ms", 10**30), ("active_models", 1 << 60), ("slot", 1 << 60)],
)
def test_numbers_that_nobody_can_add_up_or_write_down_are_refused(name: str, value: float) -> None:
    assert fault(answering(good_answer(**{name: value}))).code == "bad_answer"
    if name != "active_models":
        with pytest.raises(AgentFault, match="cannot be read"):
            ask_all(answering(bulk_answer("d1", **{name: value})), ["d1"])


@pytest.mark.parametrize("name", ["x" * 1_025, "\u00e4" * 513])
def test_tensors_with_longer_names_than_manifests_have_are_refused(name: str) -> None:
    assert fault(answering(good_answer(entries={name: "0" * 64})), entries=True).code == "bad_answer"
    assert ask(answering(good_answer(entries={name[:512]: "0" * 64})), entries=True).node == "a1"


def test_block_checks_are_read_as_far_as_the_tensor_can_have_them() -> None:
    huge = base64.b64encode(bytes(16 * 10_000)).decode()
    with pytest.raises(AgentFault, match="exceeds 16448 bytes"):  # three blocks
        ask_blocks(answering({"tensor": "norm", "blocks": huge}))
