"""Asking agents over HTTP what their memory holds. The only file of the checker that talks to agents.

Every call has its own deadline, a bounded answer and a bounded number of neighbours. Whatever goes wrong with one node is an AgentFault
with a code and a detail; it never ends the check of the others. A token goes out only over TLS or to this machine.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Meta

from consistency import vector
from consistency.findings import NodeVector
from consistency.vector import Words
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import MAX_TENSORS

T = TypeVar("T")

MAX_ANSWER_BYTES = 64 << 20  # entries of 200,000 tensors take about 30 MB of JSON
MAX_PROBLEM_BYTES = 64 << 10
FROM_MEMORY = "memory"

_Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]  # empty: none
_Entry = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Text = Annotated[str, Meta(max_length=256)]


class AgentFault(Exception):
    """Why a node could not be looked at."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code  # unreachable | timed_out | attested | insecure_url | bad_answer | untrusted | refused | one of errors.CODES
        self.detail = detail


class _VectorAnswer(msgspec.Struct, frozen=True):
    """The agent's JSON; unknown fields are left alone."""

    node: _Text
    boot_id: _Text
    deployment: _Text
    model: _Text
    version: _Text
    checksum: _Digest
    slot: Annotated[int, Meta(ge=-1)] | _Text
    epoch: int
    vector_root: _Digest
    config_digest: _Digest
    computed_at_ms: int
    lag_ms: float
    active_models: int
    switching: bool
    entries: Annotated[dict[str, _Entry], Meta(max_length=MAX_TENSORS)] | None = None
    vector_from: _Text = FROM_MEMORY  # a node of an earlier build, which knows no other kind, does not say it


class _BlocksAnswer(msgspec.Struct, frozen=True):
    tensor: str
    blocks: str


class _Problem(msgspec.Struct, frozen=True):
    code: Annotated[str, Meta(pattern=r"^[a-z_]{1,64}\Z")]
    detail: str = ""


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
        self._http = httpx.AsyncClient(
            verify=_tls(options.ca_file),
            trust_env=False,  # nodes are reached directly; a proxy variable must not divert tokens
            follow_redirects=False,
            transport=options.http,
            headers={"accept": "application/json", "user-agent": "raftmeta-check"},
        )

    async def __aenter__(self) -> HttpAgents:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def vector(self, url: str, deployment: str, entries: bool) -> NodeVector:
        """The vector of the slot that serves now, with the entry of every tensor if asked."""
        body = await self._get(url, deployment, {"entries": "1" if entries else "0"})
        seen = _decode(body, _VectorAnswer)
        if seen.vector_from != FROM_MEMORY:
            raise AgentFault("attested", f"the vector is the word of the {seen.vector_from}, not computed from the memory that serves")
        if entries and seen.entries is None:
            raise AgentFault("bad_answer", "the node left out the entries it was asked for")
        return msgspec.convert(seen, NodeVector, from_attributes=True)

    async def blocks(self, url: str, deployment: str, tensor: str) -> Words:
        """The block checks of one tensor."""
        seen = _decode(await self._get(url, deployment, {"blocks": tensor}), _BlocksAnswer)
        if seen.tensor != tensor:
            raise AgentFault("bad_answer", f"asked for the blocks of {tensor!r}, got those of {seen.tensor!r}")
        try:
            return vector.unpack_blocks(base64.b64decode(seen.blocks, validate=True))
        except (binascii.Error, RaftmetaError) as cause:
            raise AgentFault("bad_answer", f"the blocks of {tensor!r} cannot be read: {cause}") from cause

    async def _get(self, url: str, deployment: str, params: Mapping[str, str]) -> bytes:
        address = _checked(url, self._options.token)
        async with self._turn:
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    return await self._send(f"{address}/raftmeta/v1/vector/{quote(deployment, safe='')}", params)
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
        async with self._http.stream("GET", address, params=dict(params), headers=headers, timeout=None) as response:
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


def _decode(body: bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.MsgspecError as cause:
        raise AgentFault("bad_answer", f"the answer cannot be read: {cause}") from cause


def _refusal(status: int, body: bytes) -> AgentFault:
    try:
        problem = msgspec.json.decode(body, type=_Problem)
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
