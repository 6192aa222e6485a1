"""A watch as server-sent events.

One message per revision, `id` being the revision, so that a client resumes from the last id it saw. A bookmark follows whenever the stream
has nothing more to send after the interval, and one stands at the start; comment lines in between keep the connection visibly alive. As
often as bookmarks come, and also while there is always something to send, the caller is looked at again. The stream ends with `compacted`,
when the member shuts down, when the caller may not watch any more, or when the client goes away; a client that does not read is cut by the
server's guard, since sending then makes no progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from api.operation import Header, Receive, Send
from api.replies import encode
from api.schemas.records import RENDER
from api.service import Service
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.events import Event
from raftmeta.watch import Change, Subscription

log = structlog.get_logger(__name__)

COMMENT = b":\n\n"


class WatchStream:
    def __init__(self, service: Service, subscription: Subscription, recheck: Callable[[], object]) -> None:
        self._service = service
        self._subscription = subscription
        self._recheck = recheck  # raises RaftmetaError once the caller may not go on

    async def send(self, receive: Receive, send: Send, headers: list[Header]) -> None:
        """Runs until the stream ends. The subscription is given back however that comes."""
        with self._subscription:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            gone = asyncio.ensure_future(_until_gone(receive))
            sending = asyncio.ensure_future(self._pump(send))
            try:
                await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                sending.cancel()
                _, fault = await asyncio.gather(gone, sending, return_exceptions=True)
        if isinstance(fault, Exception):
            log.error("a watch failed", exc_info=fault)
        elif not isinstance(fault, BaseException):
            await send({"type": "http.response.body", "body": b""})

    async def _pump(self, send: Send) -> None:
        """Returns when the stream has come to its end in good order."""
        subscription, limits = self._subscription, self._service.limits
        loop = asyncio.get_running_loop()
        due = recheck_at = 0.0
        while not subscription.ended:
            now = loop.time()
            if now >= recheck_at:
                if not self._may_go_on():
                    return
                recheck_at = now + limits.bookmark_s
            try:
                chosen = subscription.take()
            except RaftmetaError as compacted:
                self._service.stats.compacted_watches += 1
                await _write(send, b"event: compacted\ndata: %b\n\n" % encode({"code": compacted.code, "detail": compacted.detail}))
                return
            if chosen:
                self._service.stats.sent_events += sum(len(places) for _, places in chosen)
                await _write(send, b"".join(message(change, places) for change, places in chosen))
                await asyncio.sleep(0)  # a long backlog shares the loop
                continue
            now = loop.time()
            if now >= due:
                due = now + limits.bookmark_s
                await _write(send, b'id: %d\nevent: bookmark\ndata: {"revision":%d}\n\n' % (subscription.position, subscription.position))
            elif await subscription.wait(min(limits.comment_s, due - now)):
                await asyncio.sleep(0)
            elif loop.time() < due:
                await _write(send, COMMENT)

    def _may_go_on(self) -> bool:
        try:
            self._recheck()
        except RaftmetaError:
            return False
        return True


def message(change: Change, places: tuple[int, ...]) -> bytes:
    """All wanted events of one revision as one message. Each event is rendered once for all watchers."""
    if change.rendered is None:
        change.rendered = tuple(_render(event) for event in change.events)
    rendered = change.rendered
    events = b",".join([rendered[place] for place in places])
    return b'id: %d\nevent: change\ndata: {"revision":%d,"events":[%b]}\n\n' % (change.revision, change.revision, events)


def _render(event: Event) -> bytes:
    value = None if event.value is None else RENDER[event.kind](event.value)
    return encode({"kind": event.kind, "key": event.key, "op": event.op, "value": value})


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
