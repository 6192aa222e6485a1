"""One call against several members: fail over, retry under one key and one deadline, read bounded strict JSON.

The member that answered last is asked first. A mutation keeps its idempotency key over all attempts, so repeating it is safe whatever
became of the earlier ones; the error that ends a call says whether it may still have been applied. Retried are lost connections and the
codes of class `unavailable`; of a member's own trouble the others are asked; everything else is the caller's to decide.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from raftmeta import strict_json
from raftmeta.client import backoff, course, problem
from raftmeta.client.course import Course, Failure, Standing
from raftmeta.client.values import Reply, idempotency_key
from raftmeta.core.errors import RaftmetaError
from raftmeta.replies import encoding_of

MAX_PROBLEM_BYTES = 1 << 20
LOOK_S = 2.0  # for a handshake that tells what a port speaks
MAX_CONNECTIONS = 100
JUDGED = "x-raftmeta-judged"  # on a refusal that is the outcome of the command itself
# All that httpx raises for a request that got no whole answer; a redirect to what is no URL and a stream that ended early are none of its
# TransportErrors.
_BROKEN = (httpx.RequestError, httpx.InvalidURL, httpx.StreamError)
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True)
class Timing:
    """Clock, sleep and chance; tests bring their own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    draw: Callable[[], float] = random.random
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Options:
    """How to reach members, apart from who they are."""

    token: str | None = None
    ca_file: Path | None = None
    timeout_s: float = 30.0  # one call, all attempts and waits together
    policy: backoff.RetryPolicy = field(default_factory=backoff.RetryPolicy)
    timing: Timing = field(default_factory=Timing)
    on_retry: Callable[[str], None] | None = None  # told why an attempt failed and is repeated
    http: httpx.AsyncBaseTransport | None = None  # replaces the network
    speaks_tls: Callable[[str, int], Awaitable[bool]] | None = None  # replaces the look at a port that answered nothing


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # quoted
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    key: str = ""  # idempotency key; a mutation without one gets one


class Transport:
    """Sends requests to whichever member answers."""

    def __init__(self, urls: Sequence[str], options: Options) -> None:
        self.urls = tuple(_checked_url(url) for url in urls)
        if not self.urls:
            raise RaftmetaError("bad_field", "urls is empty, expected the address of at least one member")
        self.options = options
        self._current = 0
        self._is_tls: dict[str, bool] = {}  # by plain URL that answered nothing
        # a body of 2 KiB may decode to gigabytes, so an encoded one is neither asked for nor read
        headers = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "raftmeta-client"}
        if options.token:
            headers["authorization"] = f"Bearer {options.token}"
        self._http = httpx.AsyncClient(
            headers=headers,
            verify=_tls_context(self.urls, options.ca_file),
            trust_env=False,  # members are reached directly; a proxy variable meant for the internet must not divert tokens
            transport=options.http,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
        )

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def current_url(self) -> str:
        """The member that is asked first."""
        return self.urls[self._current]

    def rotate(self, failed_url: str) -> None:
        """Prefer the next member, unless another call moved on already."""
        if self.current_url == failed_url:
            self._current = (self._current + 1) % len(self.urls)

    async def call(self, request: Request, timeout_s: float | None = None) -> Reply:
        """The reply of the first member that answers for good. Raises RaftmetaError with the server's code, or the last one's."""
        timing = self.options.timing
        deadline = timing.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)
        key, is_mutation = request.key, request.method != "GET"
        if not key and is_mutation:
            key = idempotency_key(timing.now_ms())
        told = Course(len(self.urls))
        while True:
            url = self.current_url
            try:
                return await self._attempt(url, request, key, deadline, is_mutation and told.maybe_applied)
            except Failure as failure:
                told.failed(url, failure)
                self.rotate(url)
                pause_s = self._pause_s(told.attempts, failure)
                if told.over or timing.monotonic() + pause_s >= deadline:
                    raise told.error(failure.error, is_mutation) from failure
                if self.options.on_retry:
                    self.options.on_retry(f"{url}: {failure.error.detail}")
            if pause_s:
                await timing.sleep(pause_s)

    @asynccontextmanager
    async def stream(self, url: str, request: Request, idle_timeout_s: float) -> AsyncIterator[httpx.Response]:
        """An open reply from one member, no retries.

        Raises RaftmetaError for a refusal, Failure for what another member may do better, also for what breaks while it is read.
        """
        connect_s = self.options.policy.connect_timeout_s
        try:
            async with self._http.stream(
                request.method,
                url + request.path,
                params=dict(request.params),
                headers={"accept": "text/event-stream"},
                timeout=httpx.Timeout(idle_timeout_s, connect=connect_s),
            ) as response:
                await self._check_stream(response)
                yield response
        except _BROKEN as cause:
            await self._require_no_tls_port(url, cause)
            error = RaftmetaError("no_quorum", f"{url} did not answer: {_reason(cause, idle_timeout_s)}")
            raise Failure(error, Standing.AWAY, maybe_applied=False) from cause

    async def _check_stream(self, response: httpx.Response) -> None:
        try:
            if response.status_code == 200:
                _refuse_encoded(response)
                return
            error = problem.to_error(response.status_code, await _read(response, MAX_PROBLEM_BYTES))
        except RaftmetaError as unreadable:
            raise Failure(unreadable, Standing.USELESS, maybe_applied=False) from unreadable
        raise self._refusal(response, error, maybe_applied=False)

    def _pause_s(self, attempts: int, failure: Failure) -> float:
        """No pause while members are left to try in this round."""
        rounds, position = divmod(attempts, len(self.urls))
        if position:
            return 0.0
        options = self.options
        return max(failure.pause_s, backoff.wait_s(options.policy, rounds - 1, options.timing.draw()))

    async def _attempt(self, url: str, request: Request, key: str, deadline: float, maybe_applied: bool) -> Reply:
        """`maybe_applied`: an earlier attempt may have been."""
        policy = self.options.policy
        limit_s = max(0.001, min(policy.attempt_timeout_s, deadline - self.options.timing.monotonic()))
        try:
            async with asyncio.timeout(limit_s):
                return await self._send(url, request, key, limit_s, maybe_applied)
        except (*_BROKEN, TimeoutError) as cause:
            sent = not isinstance(cause, _NEVER_SENT)
            code = "unknown_outcome" if sent and request.method != "GET" else "no_quorum"
            untrusted = _certificate_fault(cause)
            await self._require_no_tls_port(url, cause)
            if untrusted:
                code = "unauthenticated"
            params = {"untrusted": url} if untrusted else {}
            error = RaftmetaError(code, f"{url} did not answer: {untrusted or _reason(cause, limit_s)}", **params)
            raise Failure(error, Standing.UNTRUSTED if untrusted else Standing.AWAY, maybe_applied=sent) from cause

    async def _require_no_tls_port(self, url: str, cause: BaseException) -> None:
        """Raises Failure for a plain request that was none to this port; a member that is killed meanwhile answers as little."""
        if not url.startswith("http://") or not isinstance(cause, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
            return
        look = self.options.speaks_tls or (_speaks_tls if self.options.http is None else None)
        if url not in self._is_tls and look is not None:
            parsed = httpx.URL(url)
            self._is_tls[url] = await look(parsed.host, parsed.port or 80)
        if self._is_tls.get(url):
            fault = "it looks like a TLS port: use https:// and the ca_file, or --config with the client.toml of `raftmeta init`"
            raise Failure(RaftmetaError("bad_field", f"{url}: {fault}"), Standing.UNTRUSTED, maybe_applied=False) from cause

    async def _send(self, url: str, request: Request, key: str, limit_s: float, maybe_applied: bool) -> Reply:
        policy = self.options.policy
        headers = {}
        if request.body is not None:
            headers["content-type"] = "application/json"
        if key:
            headers["idempotency-key"] = key
        async with self._http.stream(
            request.method,
            url + request.path,
            params=dict(request.params),
            content=request.body,
            headers=headers,
            timeout=httpx.Timeout(limit_s, connect=min(limit_s, policy.connect_timeout_s)),
        ) as response:
            try:
                if response.is_success:
                    return _to_reply(response, await _read(response, strict_json.MAX_BYTES), key)
                error = problem.to_error(response.status_code, await _read(response, MAX_PROBLEM_BYTES))
            except RaftmetaError as unreadable:  # whatever it was, the request had arrived
                raise Failure(unreadable, Standing.USELESS, maybe_applied=True) from unreadable
            raise self._refusal(response, error, maybe_applied)

    def _refusal(self, response: httpx.Response, error: RaftmetaError, maybe_applied: bool) -> Exception:
        """What to raise for an answer that is no success: the error itself where it is the last word."""
        applied = course.may_be_applied(error.code)
        if error.code in backoff.RETRIED:
            pause_s = backoff.asked_wait_s(self.options.policy, error.code, response.headers.get("retry-after"))
            return Failure(error, Standing.BUSY, maybe_applied=applied, pause_s=pause_s)
        judged = course.is_judgement(error, JUDGED in response.headers)
        if not judged and (maybe_applied or error.code in course.OWN_TROUBLE):
            return Failure(error, Standing.USELESS, maybe_applied=applied)
        return error


async def _read(response: httpx.Response, limit: int) -> bytes:
    """The whole body. Raises RaftmetaError body_too_large, bad_json for one that is encoded."""
    _refuse_encoded(response)
    if header_number(response, "content-length") > limit:
        raise RaftmetaError("body_too_large", f"the reply of {response.url} announces more than {limit} bytes")
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > limit:
            raise RaftmetaError("body_too_large", f"the reply of {response.url} exceeds {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _refuse_encoded(response: httpx.Response) -> None:
    encoding = encoding_of(response.headers)
    if encoding:
        raise RaftmetaError("bad_json", f"the reply of {response.url} is encoded as {encoding!r}, expected as it is, as was asked for")


def _to_reply(response: httpx.Response, body: bytes, key: str) -> Reply:
    value = strict_json.load_object(body) if body else {}
    return Reply(
        value,
        status=response.status_code,
        revision=header_number(response, "x-raftmeta-revision"),
        generation=header_number(response, "x-raftmeta-generation"),
        key=key,
    )


def header_number(response: httpx.Response, name: str) -> int:
    """The number in a header, 0 when it is missing or none: the field informs, it decides nothing."""
    text = response.headers.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _checked_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as cause:
        raise RaftmetaError("bad_field", f"{url!r} is no URL: {cause}") from cause
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
        raise RaftmetaError("bad_field", f"{url!r} is not http(s)://host:port without user, query and fragment")
    return url.rstrip("/")


def _tls_context(urls: tuple[str, ...], ca_file: Path | None) -> ssl.SSLContext:
    if ca_file is not None:
        try:
            return ssl.create_default_context(cafile=str(ca_file))
        except (OSError, ssl.SSLError) as cause:
            raise RaftmetaError("bad_field", f"ca_file {ca_file} cannot be used: {cause}") from cause
    if any(url.startswith("https://") for url in urls):
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used; the default one costs 20 ms


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether a handshake succeeds; nothing is sent over it, so whose certificate it is does not matter."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(LOOK_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


def _certificate_fault(cause: BaseException | None) -> str:
    """What is wrong with the member's certificate, "" when that is not the trouble."""
    for _ in range(10):
        if cause is None:
            break
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted here: {cause.verify_message}"
        cause = cause.__cause__ or cause.__context__
    return ""


def _reason(cause: BaseException, limit_s: float) -> str:
    if isinstance(cause, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(cause, TimeoutError | httpx.TimeoutException):
        return f"nothing came within {limit_s:.3g} s"
    return str(cause) or type(cause).__name__
