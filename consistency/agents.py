"""Asking agents over HTTP what their memory holds. The only file of the checker that talks to agents.

Every call has its own deadline, a bounded answer and a bounded number of neighbours. Whatever goes wrong with one node is an AgentFault
with a code and a detail; it never ends the check of the others. A token goes out only over TLS or to this machine.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import math
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import httpx
import msgspec

from consistency import vector
from consistency.agent_answers import AgentFault, BlocksAnswer, DigestsAnswer, Problem, VectorAnswer, VectorsAnswer, believed, decode
from consistency.findings import DigestPage, NodeVector
from consistency.vector import Words
from raftmeta.core.errors import RaftmetaError

MAX_ANSWER_BYTES = 64 << 20  # entries of 200,000 tensors take about 30 MB of JSON
MAX_PROBLEM_BYTES = 64 << 10
MAX_NAMES_CHARS = 16 << 10  # of one address; a node takes a head of 64 KiB
MAX_KEPT = 4  # connections that wait for another question: most nodes get none, and the library looks at all of them each time
MAX_WAIT_S = 3_600  # that a node can be told
SLACK_MS = 1_000  # by which the clocks of two machines may measure the same time differently
NO_ROUTE = "not_found"  # what a node of an earlier build says to the question for all its deployments


@dataclass(frozen=True)
class AgentOptions:
    token: str | None = None
    ca_file: Path | None = None
    timeout_s: float = 60.0  # one question; a node reads its whole slot to answer, about 10 GB/s
    max_at_once: int = 32
    http: httpx.AsyncBaseTransport | None = None  # replaces the network


class HttpAgents:
    """Use as an async context manager."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._turn = asyncio.Semaphore(options.max_at_once)
        self._tls = None if options.ca_file is None else _tls(options.ca_file)
        self._clients: dict[str, httpx.AsyncClient] = {}  # by scheme

    def _client(self, scheme: str) -> httpx.AsyncClient:
        """The authorities of the system are read once a node needs them: that takes longer than many a check."""
        found = self._clients.get(scheme)
        if found is None:
            if scheme == "https":
                self._tls = self._tls or _tls(None)
            found = self._clients[scheme] = self._new_client(self._tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return found

    def _new_client(self, tls: ssl.SSLContext) -> httpx.AsyncClient:
        options = self._options
        return httpx.AsyncClient(
            verify=tls,
            trust_env=False,  # nodes are reached directly; a proxy variable must not divert tokens
            follow_redirects=False,
            transport=options.http,
            limits=httpx.Limits(max_connections=options.max_at_once, max_keepalive_connections=MAX_KEPT),
            headers={"accept": "application/json", "user-agent": "raftmeta-check"},
        )

    async def __aenter__(self) -> HttpAgents:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def vectors(self, url: str, deployments: Sequence[str], max_age_ms: int | None = None) -> dict[str, NodeVector | AgentFault]:
        """Of each of these what the node holds, or why that was not told. Raises AgentFault when nothing was.

        One question, or few when the names do not fit into one. A node of an earlier build is asked for one deployment after the other.
        """
        found: dict[str, NodeVector | AgentFault] = {}
        for names in _batches(deployments):
            try:
                found |= await self._some(url, names, max_age_ms)
            except AgentFault as fault:
                if fault.code == NO_ROUTE:
                    return await self._one_by_one(url, deployments)
                if not found:
                    raise
                found |= dict.fromkeys(names, fault)
        return found

    async def _some(self, url: str, names: Sequence[str], max_age_ms: int | None) -> dict[str, NodeVector | AgentFault]:
        params = {"deployments": ",".join(names), "wait_s": self._wait_s()}
        if max_age_ms is not None:
            params["max_age_ms"] = str(max_age_ms)
        body, limit_ms = await self._get(url, "", params)
        seen = decode(body, VectorsAnswer)
        return {name: believed(seen, name, max(limit_ms, max_age_ms or 0)) for name in names}

    async def _one_by_one(self, url: str, deployments: Sequence[str]) -> dict[str, NodeVector | AgentFault]:
        found: dict[str, NodeVector | AgentFault] = {}
        for name in deployments:
            try:
                found[name] = await self.vector(url, name, entries=False)
            except AgentFault as fault:
                found[name] = fault
                if fault.code in ("unreachable", "timed_out"):  # so it will be for the others
                    return dict.fromkeys(deployments, fault) | found
        return found

    async def vector(self, url: str, deployment: str, entries: bool) -> NodeVector:
        """The vector of the slot that serves now, with the entry of every tensor if asked."""
        body, limit_ms = await self._get(url, deployment, {"entries": "1" if entries else "0"})
        seen = decode(body, VectorAnswer)
        if entries and seen.entries is None:
            raise AgentFault("bad_answer", "the node left out the entries it was asked for")
        return seen.believed(limit_ms)

    async def digests(self, url: str, deployment: str, after: str) -> DigestPage:
        """SHA-256 of the tensors behind this name, as many as the node gives at once."""
        params = {"sha256": "1", "wait_s": self._wait_s()} | ({"after": after} if after else {})
        body, _ = await self._get(url, deployment, params)
        return msgspec.convert(decode(body, DigestsAnswer), DigestPage, from_attributes=True)

    async def blocks(self, url: str, deployment: str, tensor: str) -> Words:
        """The block checks of one tensor."""
        body, _ = await self._get(url, deployment, {"blocks": tensor})
        seen = decode(body, BlocksAnswer)
        if seen.tensor != tensor:
            raise AgentFault("bad_answer", f"asked for the blocks of {tensor!r}, got those of {seen.tensor!r}")
        try:
            return vector.unpack_blocks(base64.b64decode(seen.blocks, validate=True))
        except (binascii.Error, RaftmetaError) as cause:
            raise AgentFault("bad_answer", f"the blocks of {tensor!r} cannot be read: {cause}") from cause

    def _wait_s(self) -> str:
        return str(min(MAX_WAIT_S, math.ceil(self._options.timeout_s)))

    async def _get(self, url: str, deployment: str, params: Mapping[str, str]) -> tuple[bytes, int]:
        """The answer, and how many ms old a reading can be that was made for it. "" as the deployment: all of the node."""
        address = _checked(url, self._options.token)
        path = f"/{quote(deployment, safe='')}" if deployment else ""
        async with self._turn:
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    body = await self._send(f"{address}/raftmeta/v1/vector{path}", params)
                    return body, math.ceil((time.monotonic() - began) * 1000) + SLACK_MS
            except TimeoutError as cause:
                raise AgentFault("timed_out", f"{address} did not answer within {self._options.timeout_s:g} s") from cause
            except (httpx.HTTPError, ValueError) as cause:  # ValueError: a host name that cannot be encoded
                untrusted = _certificate_fault(cause)
                if untrusted:
                    raise AgentFault("untrusted", f"{address}: its certificate is not trusted here: {untrusted}") from cause
                raise AgentFault("unreachable", f"{address}: {str(cause) or type(cause).__name__}") from cause

    async def _send(self, address: str, params: Mapping[str, str]) -> bytes:
        headers = {"authorization": f"Bearer {self._options.token}"} if self._options.token else {}
        # The deadline is outside; httpx's own would count the silence of a node that reads 100 GB of memory as a fault.
        client = self._client(httpx.URL(address).scheme)
        async with client.stream("GET", address, params=dict(params), headers=headers, timeout=None) as response:
            if response.status_code == 200:
                return await _read(response, MAX_ANSWER_BYTES)
            raise _refusal(response.status_code, await _read(response, MAX_PROBLEM_BYTES))


async def _read(response: httpx.Response, limit: int) -> bytes:
    parts = bytearray()
    async for part in response.aiter_bytes():
        parts += part
        if len(parts) > limit:
            raise AgentFault("bad_answer", f"the answer exceeds {limit} bytes")
    return bytes(parts)


def _batches(names: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        if batch and size + len(name) + 1 > MAX_NAMES_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += len(name) + 1
    if batch:
        yield batch


def _refusal(status: int, body: bytes) -> AgentFault:
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except msgspec.MsgspecError:
        return AgentFault("refused", f"the node answered with status {status}")
    return AgentFault(problem.code, f"the node answered with status {status}: {problem.detail[:500]}")


def _checked(url: str, token: str | None) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as cause:
        raise AgentFault("insecure_url", f"{url[:200]!r} is no URL: {cause}") from cause
    has_more = parsed.userinfo or parsed.query or parsed.fragment
    # The library would end a port that is none in an error of its own kind.
    if parsed.scheme not in ("http", "https") or not parsed.host or not 1 <= (parsed.port or 1) <= 65_535 or has_more:
        raise AgentFault("insecure_url", f"{url[:200]!r} is not http(s)://host:port without user, query and fragment")
    if token and parsed.scheme != "https" and not _is_this_machine(parsed.host):
        raise AgentFault("insecure_url", f"{url[:200]!r} is not https, so the token is not sent there")
    return url.rstrip("/")


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as cause:
        raise RaftmetaError("bad_field", f"ca_file {ca_file} cannot be used: {cause}") from cause


def _certificate_fault(cause: BaseException | None) -> str:
    """What is wrong with the node's certificate, "" when that is not the trouble."""
    for _ in range(10):  # of chained causes
        if cause is None:
            break
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause.verify_message
        cause = cause.__cause__ or cause.__context__
    return ""
