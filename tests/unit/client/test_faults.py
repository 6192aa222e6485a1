"""What a call that nobody answers ends with: what is wrong, at which member, and that it is said at once where waiting is of no use."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from raftmeta.cli.exits import Exit, exit_code, hint
from raftmeta.client import Client, RaftmetaError
from raftmeta.client.transport import _speaks_tls
from tests.support.certificates import TestAuthority
from tests.unit.client.members import Members, dead, problem, run

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def no_answer(request: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)


def fault(members: Members, *urls: str, is_tls: bool = False, looks: list[str] | None = None) -> RaftmetaError:
    async def look(host: str, port: int) -> bool:
        if looks is not None:
            looks.append(f"{host}:{port}")
        return is_tls

    async def call() -> None:
        async with Client(urls, options=members.options(speaks_tls=look)) as client:
            await client.activate("search", "v2")

    with pytest.raises(RaftmetaError) as raised:
        run(call())
    return raised.value


def test_a_plain_request_to_a_tls_port_ends_at_once_and_says_what_to_use() -> None:
    members, looks = Members({"a": no_answer}), list[str]()
    error = fault(members, A, is_tls=True, looks=looks)
    assert (error.code, exit_code(error), members.hosts(), looks) == ("bad_field", Exit.USAGE, ["a"], ["a:1"])
    assert "looks like a TLS port: use https://" in error.detail and "client.toml" in error.detail


def test_a_plain_member_that_was_killed_meanwhile_is_asked_again_and_its_port_looked_at_once() -> None:
    members, looks = Members({"a": no_answer}), list[str]()
    assert fault(members, A, looks=looks).code == "unknown_outcome" and len(members.requests) > 3 and looks == ["a:1"]


def test_a_quorum_that_is_lost_names_who_is_away_and_who_answers_without_a_leader() -> None:
    error = fault(Members({"a": dead, "b": problem("no_leader"), "c": dead}), A, B, C)
    assert error.code == "no_leader" and f"{B} answers and knows no leader" in error.detail
    assert f"{A} did not answer: connection refused" in error.detail and f"{C} did not answer: connection refused" in error.detail
    assert "raftmeta cluster status" in hint(error)


def test_of_members_that_are_all_away_the_last_error_stands() -> None:
    assert fault(Members({"a": dead, "b": dead}), A, B).code == "not_applied"


def test_a_certificate_that_is_not_trusted_leads_to_the_ca_file_and_not_to_the_token() -> None:
    def untrusted(request: httpx.Request) -> httpx.Response:
        cause = ssl.SSLCertVerificationError("self-signed certificate")
        cause.verify_message = "self-signed certificate"
        raise httpx.ConnectError("tls", request=request) from cause

    assert hint(fault(Members({"a": untrusted}), A)).startswith("set ca_file")
    assert hint(fault(Members({"a": problem("unauthenticated")}), A)).startswith("set token_file")


def of_a_server(directory: Path) -> ssl.SSLContext:
    files = TestAuthority(directory).agent("a")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


@pytest.mark.parametrize("is_tls", [True, False])
def test_a_port_is_known_by_its_handshake(is_tls: bool, tmp_path: Path) -> None:
    async def look() -> bool:
        tls = of_a_server(tmp_path) if is_tls else None
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
        async with server:
            return await _speaks_tls("127.0.0.1", server.sockets[0].getsockname()[1])

    assert run(look()) == is_tls
