"""A watch that survives its connection: ordered, gap-free, resumed at the last delivered revision on any member.

It yields one Change per revision and the server's bookmarks, never a revision twice and never one out of order. It ends only with an error
that the caller must act on: `compacted` (list again, then watch from the list's revision), also after a forced recovery, whose generation
makes old positions meaningless; the code of a refused request; or what every member that is there answered (`too_many_watchers`). Silence
longer than `idle_timeout_s` counts as a lost connection. The first member is drawn: fleets have one list of them, and a watch stays.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from raftmeta import strict_json
from raftmeta.client import backoff
from raftmeta.client.course import Course, Failure, Standing
from raftmeta.client.sse import SseEvent, SseParser
from raftmeta.client.transport import Request, Transport, header_number
from raftmeta.client.values import Bookmark, Change, ChangeEvent
from raftmeta.core.errors import RaftmetaError


@dataclass(frozen=True)
class WatchOptions:
    resources: Sequence[str] = ()  # empty: everything
    idle_timeout_s: float = 30.0  # the server sends bookmarks far more often
    give_up_after_s: float | None = None  # without any member answering; None: an agent watches for ever


class Watch:
    """The position in the stream, and how to go on from it."""

    def __init__(self, transport: Transport, from_revision: int, options: WatchOptions) -> None:
        self._transport = transport
        self._options = options
        self._position = from_revision
        self._generation = 0  # unknown until a member answered

    async def run(self) -> AsyncGenerator[Change | Bookmark, None]:
        timing, policy = self._transport.options.timing, self._transport.options.policy
        urls = self._transport.urls
        place = int(timing.draw() * len(urls))
        failures, silent_since, told = 0, timing.monotonic(), Course(len(urls))
        while True:
            url = urls[place % len(urls)]
            begun, position = timing.monotonic(), self._position
            try:
                async with aclosing(self._connection(url)) as connection:
                    async for item in connection:
                        silent_since = timing.monotonic()
                        # one bookmark is no service: a stream that ends right after it must not be asked for without a pause
                        if isinstance(item, Change) or silent_since - begun >= policy.longest_wait_s:
                            failures = 0
                        if self._position > position:
                            told.forget()
                        yield item
                ended = RaftmetaError("shutting_down", f"{url} ended the stream")
                failure = Failure(ended, Standing.BUSY, maybe_applied=False)
            except Failure as raised:
                failure = raised
            failures += 1
            place += 1
            error = failure.error
            told.failed(url, failure)
            if told.over:
                raise told.error(error, is_mutation=False) from failure
            give_up_s = self._options.give_up_after_s
            if give_up_s is not None and timing.monotonic() - silent_since >= give_up_s:
                raise RaftmetaError(error.code, f"no member served the watch for {give_up_s:g} s; the last error: {error.detail}")
            if self._transport.options.on_retry:
                self._transport.options.on_retry(error.detail)
            rounds, rest = divmod(failures, len(urls))
            if not rest:
                await timing.sleep(backoff.wait_s(policy, rounds - 1, timing.draw()))

    async def _connection(self, url: str) -> AsyncGenerator[Change | Bookmark, None]:
        params = {"from_revision": str(self._position)}
        if self._options.resources:
            params["resource"] = ",".join(self._options.resources)
        parser = SseParser()
        request = Request("GET", "/v1/watch", params)
        async with self._transport.stream(url, request, self._options.idle_timeout_s) as response:
            self._check_generation(header_number(response, "x-raftmeta-generation"))
            async for chunk in response.aiter_bytes():
                for item in self._items(parser, chunk):
                    yield item

    def _items(self, parser: SseParser, chunk: bytes) -> Iterator[Change | Bookmark]:
        """What a chunk completes. Raises RaftmetaError compacted, Failure for what is no event: of this member, so another is asked."""
        try:
            for event in parser.feed(chunk):
                item = self._interpret(event)
                if item is not None:
                    yield item
        except RaftmetaError as fault:
            if fault.code == "compacted":
                raise
            raise Failure(fault, Standing.USELESS, maybe_applied=False) from fault

    def _check_generation(self, generation: int) -> None:
        if self._generation and generation and generation != self._generation:
            raise RaftmetaError("compacted", f"the generation moved from {self._generation} to {generation}; older positions do not count")
        self._generation = generation or self._generation

    def _interpret(self, event: SseEvent) -> Change | Bookmark | None:
        """What an event means here; None for a revision that was delivered already and for kinds of a later server."""
        if event.event == "compacted":
            raise RaftmetaError("compacted", f"the events after revision {self._position} are no longer retained")
        if event.event not in ("change", "bookmark"):
            return None
        body = strict_json.load_object(event.data.encode("utf-8"))
        revision = body.get("revision")
        if not isinstance(revision, int) or isinstance(revision, bool) or revision < 0:
            raise RaftmetaError("bad_json", f"an event of the watch has revision {revision!r}, expected a whole number")
        if revision <= self._position:
            return Bookmark(self._generation, self._position) if event.event == "bookmark" else None
        self._position = revision
        if event.event == "bookmark":
            return Bookmark(self._generation, revision)
        return Change(self._generation, revision, tuple(_change_event(item) for item in _list(body.get("events"))))


def _change_event(item: Any) -> ChangeEvent:
    if not isinstance(item, dict) or item.get("op") not in ("put", "delete"):
        raise RaftmetaError("bad_json", "an event of the watch is no object with op put or delete")
    value = item.get("value")
    return ChangeEvent(str(item.get("kind")), str(item.get("key")), item["op"], value if isinstance(value, dict) else None)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RaftmetaError("bad_json", f"the events of a revision are {type(value).__name__}, expected a list")
    return value
