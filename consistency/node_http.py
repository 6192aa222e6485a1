"""HTTP to serving nodes: every question has a deadline, a bounded answer and a bounded number of neighbours.

Whatever goes wrong with one node is an AgentFault with a code and a detail. A token goes out only over TLS or to this machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from types import TracebackType
from typing import Annotated, NamedTuple

import httpx
import msgspec
from msgspec import Meta

from consistency.agent_answers import AgentFault, decode
from raftmeta.core.errors import RaftmetaError
from raftmeta.replies import encoding_of

MAX_PROBLEM_BYTES = 64 << 10
SERVING_SIDE = "x-raftmeta-serving-side"  # in the answer of a node whose side does not serve: the inference protocol has no codes
FENCED = "fenced"


LARGE_BYTES = 1 << 20
MAX_LARGE = 4  # answers beyond that which are read at once: many nodes that say much must not fill this machine's memory
LARGE_BYTES_PER_S = 256 << 10  # that such an answer must bring: others wait for its place, and it lies ready at the node by then
LARGE_STALL_S = 10.0  # for which it may bring nothing, after it kept to that until then


class _Problem(msgspec.Struct, frozen=True):
    """RFC 9457, or the error of the inference protocol, which has no code."""

    code: Annotated[str, Meta(pattern=r"^[a-z_]{1,64}\Z")] = "refused"
    detail: str = ""
    error: str = ""


@dataclass(frozen=True)
class HttpOptions:
    token: str | None = None
    ca_file: Path | None = None
    timeout_s: float = 60.0  # one question, unless the caller says otherwise
    max_at_once: int = 32
    max_kept: int | None = None  # connections that wait for another question, at all of which the library looks for each; None: all
    http: httpx.AsyncBaseTransport | None = None  # replaces the network


class Request(NamedTuple):
    method: str
    url: str  # of the node
    path: str
    limit: int  # bytes of the answer
    params: Mapping[str, str] | None = None
    content: bytes | None = None
    timeout_s: float | None = None  # None: as the options say
    is_probe: bool = False  # to be answered by the side that does not serve too


class Told(NamedTuple):
    body: bytes
    passed_s: float  # since the question left
    taken_s: float  # of these, what the node took: the rest was waiting for a turn here


class _Deadline:
    """Of one question. It stands still while that waits for its turn, and comes earlier where that holds others up."""

    def __init__(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        self._clock = asyncio.get_running_loop().time
        self.began_s = self._clock()
        self.waited_s = 0.0
        self._pace: _Pace | None = None

    def missed(self, timeout_s: float) -> str:
        if self._pace is not None and self._pace.comes_first:
            return f"was slower than {LARGE_BYTES_PER_S >> 10} KiB/s with a large answer, by {LARGE_STALL_S:g} s"
        return f"did not answer within {timeout_s:g} s"

    def told(self, body: bytes) -> Told:
        passed_s = self._clock() - self.began_s
        return Told(body, passed_s, passed_s - self.waited_s)

    @asynccontextmanager
    async def turn(self, places: asyncio.Semaphore) -> AsyncIterator[_Pace]:
        since_s, end_s = self._clock(), self._scope.when()
        self._scope.reschedule(None)
        async with places:
            waited_s = self._clock() - since_s
            self.waited_s += waited_s
            self._pace = _Pace(self._scope, self._clock() + LARGE_STALL_S, None if end_s is None else end_s + waited_s)
            yield self._pace


class _Pace:
    """Ends what holds a place and is slower than it may be."""

    def __init__(self, scope: asyncio.Timeout, until_s: float, end_s: float | None) -> None:
        self._scope, self._until_s, self._end_s = scope, until_s, float("inf") if end_s is None else end_s
        self._clock = asyncio.get_running_loop().time
        self.came(0)

    def came(self, size_bytes: int) -> None:
        """What comes early counts for LARGE_STALL_S and no more, so that nobody holds a place for long with what came at once."""
        self._until_s = min(self._clock() + LARGE_STALL_S, self._until_s + size_bytes / LARGE_BYTES_PER_S)
        self._scope.reschedule(min(self._until_s, self._end_s))

    @property
    def comes_first(self) -> bool:
        """Before the end of the question."""
        return self._until_s < self._end_s


class NodeHttp:
    """Use as an async context manager."""

    def __init__(self, options: HttpOptions) -> None:
        """Raises RaftmetaError bad_field for a ca_file that cannot be used."""
        self._options = options
        self._turn = asyncio.Semaphore(options.max_at_once)
        self._large = asyncio.Semaphore(MAX_LARGE)
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
            # Answers come as they are: a packed one of 2 KB can unpack to gigabytes before anybody counts its bytes.
            headers={"accept": "application/json", "accept-encoding": "identity", "user-agent": "raftmeta-check"},
            # All nodes share one client: what one of them sets must not go to the others.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=options.max_at_once if options.max_kept is None else options.max_kept
            ),
        )

    async def __aenter__(self) -> NodeHttp:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def ask(self, request: Request) -> bytes:
        """The body of the answer, at most `limit` bytes. Raises AgentFault."""
        return (await self.ask_timed(request)).body

    async def ask_timed(self, request: Request) -> Told:
        """Raises AgentFault."""
        address = _checked(request.url, self._options.token)
        timeout_s = request.timeout_s or self._options.timeout_s
        async with self._turn:
            scope = asyncio.timeout(timeout_s)
            deadline = _Deadline(scope)
            try:
                async with scope:
                    return deadline.told(await self._send(address, request, deadline))
            except TimeoutError as cause:
                raise AgentFault("timed_out", f"{address} {deadline.missed(timeout_s)}") from cause
            except (httpx.HTTPError, ValueError) as cause:  # ValueError: a host name that cannot be encoded
                untrusted = _certificate_fault(cause)
                if untrusted:
                    raise AgentFault("untrusted", f"{address}: its certificate is not trusted here: {untrusted}") from cause
                raise AgentFault("unreachable", f"{address}: {str(cause) or type(cause).__name__}") from cause

    async def _send(self, address: str, asked: Request, deadline: _Deadline) -> bytes:
        headers = {"authorization": f"Bearer {self._options.token}"} if self._options.token else {}
        if asked.content is not None:
            headers["content-type"] = "application/json"
        if asked.is_probe:
            headers["x-raftmeta-probe"] = "1"
        # The deadline is outside; httpx's own would count the silence of a node that reads 100 GB of memory as a fault.
        client = self._client(httpx.URL(address).scheme)
        async with client.stream(
            asked.method, address + asked.path, params=asked.params, content=asked.content, headers=headers, timeout=None
        ) as response:
            _require_plain(response)
            if response.status_code in (200, 202):
                return await self._read(response, asked.limit, deadline)
            raise _refusal(response, await self._read(response, MAX_PROBLEM_BYTES, deadline))

    async def _read(self, response: httpx.Response, limit: int, deadline: _Deadline) -> bytes:
        """What is beyond LARGE_BYTES waits for its turn at the node's end of the connection."""
        parts, coming = bytearray(), response.aiter_bytes()
        async for part in coming:
            _add(parts, part, limit)
            if len(parts) > LARGE_BYTES:
                async with deadline.turn(self._large) as pace:
                    async for further in coming:
                        _add(parts, further, limit)
                        pace.came(len(further))
        return bytes(parts)


def _add(parts: bytearray, part: bytes, limit: int) -> None:
    parts += part
    if len(parts) > limit:
        raise AgentFault("bad_answer", f"the answer exceeds {limit} bytes")


def _require_plain(response: httpx.Response) -> None:
    encoding = encoding_of(response.headers)
    if encoding:
        raise AgentFault("bad_answer", f"the answer has the content-encoding {encoding!r}, asked was for none")


def _refusal(response: httpx.Response, body: bytes) -> AgentFault:
    status = response.status_code
    try:
        problem = decode(body, _Problem)
    except AgentFault:
        return AgentFault("refused", f"the node answered with status {status}", status)
    code = FENCED if SERVING_SIDE in response.headers else problem.code
    return AgentFault(code, f"the node answered with status {status}: {(problem.detail or problem.error)[:500]}", status)


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
