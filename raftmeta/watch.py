"""Events in the order of their revisions, from one writing thread to many watchers on one event loop.

The engine thread calls `publish` after each batch it applied, `compacted` after it installed a snapshot, and `begin_again` when what it
applied before is not to be trusted. Changes are retained in one
ring that all watchers share, bounded by count and bytes; a watcher is only a position in it, so a slow one costs nothing. What must stay
true: a subscription hands out every change above its position in order, or raises `compacted`; it never skips one and never goes back;
and the revision that it reports as reached was reached only after every earlier change was handed out, filtered ones included. The hub
names no revision that the state did not reach.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

import msgspec

from raftmeta.core.errors import RaftmetaError
from raftmeta.core.events import Event

_encode = msgspec.msgpack.Encoder().encode
_FIXED_BYTES = {"model": 700, "version": 1_900}  # upper bounds of a record with its rendered form, whose fields the core bounds
_EVENT_BYTES = 400  # the objects around one event: event, strings, place in the ring


class WatchLimits(msgspec.Struct, frozen=True):
    max_events: int = 10_000  # retained, about a minute at full write load and hours in normal use
    max_bytes: int = 16 << 20  # retained, by the size of the records
    max_watchers: int = 1_024  # open at once; each holds a connection
    take_changes: int = 256  # handed out at once, so that one watcher does not hold the loop


class Change:
    """All events of one revision. `rendered` is a place for whoever sends them to keep the encoded form of each, filled once."""

    __slots__ = ("events", "rendered", "revision", "size_bytes")

    def __init__(self, revision: int, events: tuple[Event, ...]) -> None:
        self.revision = revision
        self.events = events
        self.size_bytes = sum(_size(event) for event in events)
        self.rendered: tuple[bytes, ...] | None = None


class Taken(msgspec.Struct, frozen=True):
    changes: tuple[Change, ...]
    revision: int  # with these changes, everything up to here has been handed out


class WatchHub:
    """The ring and its readers. `publish` and `compacted` belong to one thread, everything asynchronous to one event loop."""

    def __init__(self, revision: int, limits: WatchLimits | None = None) -> None:
        self.limits = limits or WatchLimits()
        self._lock = threading.Lock()
        self._ring: list[Change] = []
        self._start = 0  # changes before this place are dropped already
        self._bytes = 0
        self._events = 0
        self._floor = revision  # the greatest revision of which an event may be missing
        self._newest = revision
        self._epoch = 0  # how often the state was not what watchers had been told; a subscription belongs to one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[bool]] = set()
        self._wake_scheduled = False
        self._watchers = 0
        self._closed = False

    @property
    def revision(self) -> int:
        return self._newest

    @property
    def floor(self) -> int:
        """A watch from a smaller revision is refused as compacted."""
        return self._floor

    @property
    def watchers(self) -> int:
        return self._watchers

    @property
    def retained(self) -> tuple[int, int]:
        """Retained events and their bytes."""
        return self._events, self._bytes

    # ---- the writing thread

    def publish(self, events: Sequence[Event], revision: int) -> None:
        """Everything that one batch changed, in order of revision, and the revision that the batch reached."""
        changes = _by_revision(events)
        with self._lock:
            assert revision >= self._newest and (not changes or self._newest < changes[0].revision), (revision, self._newest)
            assert not changes or changes[-1].revision <= revision, (changes[-1].revision, revision)
            self._newest = revision
            self._ring.extend(changes)
            for change in changes:
                self._events += len(change.events)
                self._bytes += change.size_bytes
            self._evict()
            self._schedule_wake()

    def compacted(self, revision: int) -> None:
        """The state jumped to this revision, past events that were never seen here."""
        with self._lock:
            assert revision >= self._newest, (revision, self._newest)
            if revision > self._newest:
                self._forget(revision)

    def begin_again(self, revision: int) -> None:
        """What was applied before may have been wrong, and the state is at this revision, which may be a smaller one.

        Every watch that is open ends as compacted, wherever it stands, and what was retained is handed out to nobody.
        """
        with self._lock:
            self._epoch += 1
            self._forget(revision)

    def _forget(self, revision: int) -> None:
        self._ring, self._start, self._events, self._bytes = [], 0, 0, 0
        self._floor = self._newest = revision
        self._schedule_wake()

    # ---- the event loop

    def subscribe(self, from_revision: int, wanted: Callable[[Event], bool] | None = None) -> Subscription:
        """A reader of the events above `from_revision`. Raises RaftmetaError compacted, too_many_watchers or shutting_down."""
        with self._lock:
            if self._closed:
                raise RaftmetaError("shutting_down", "no new watch is opened")
            self._refuse_below_floor(from_revision)
            if self._watchers >= self.limits.max_watchers:
                raise RaftmetaError("too_many_watchers", f"{self._watchers} watches are open, the limit is {self.limits.max_watchers}")
            self._watchers += 1
            return Subscription(self, from_revision, wanted, self._epoch)

    async def reached(self, revision: int, timeout_s: float) -> bool:
        """Whether this revision was published before the time was up."""
        if self._newest >= revision:
            return True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._newest < revision and not self._closed:
            left = deadline - loop.time()
            if left <= 0 or not await self._wait_beyond(self._newest, left, self._epoch):
                break
        return self._newest >= revision

    def close(self) -> None:
        """Ends every wait; subscriptions report the end. Called on the event loop."""
        with self._lock:
            self._closed = True
            self._loop = None
        self._wake()

    @property
    def closed(self) -> bool:
        return self._closed

    async def _wait_beyond(self, revision: int, timeout_s: float, epoch: int) -> bool:
        """Until something changed for who stands there in that epoch; False when the time was up first."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._newest > revision or self._closed or epoch != self._epoch:
                return True
            self._loop = loop
            waiter: asyncio.Future[bool] = loop.create_future()
            self._waiters.add(waiter)
        timer = loop.call_later(timeout_s, _settle, waiter, False)
        try:
            return await waiter
        finally:
            timer.cancel()
            with self._lock:
                self._waiters.discard(waiter)

    def _take(self, position: int, epoch: int) -> Taken:
        with self._lock:
            if epoch != self._epoch:
                detail = f"this member's state was not the others' and is made anew; what it told up to revision {position} may be wrong"
                raise RaftmetaError("compacted", detail, floor=self._floor)
            self._refuse_below_floor(position)
            first = bisect_right(self._ring, position, lo=self._start, key=_revision_of)
            changes = tuple(self._ring[first : first + self.limits.take_changes])
            exhausted = first + len(changes) == len(self._ring)
            reached = max(position, self._newest) if exhausted else changes[-1].revision
        return Taken(changes, reached)

    def _leave(self) -> None:
        with self._lock:
            self._watchers -= 1

    # ---- both, under the lock

    def _refuse_below_floor(self, position: int) -> None:
        if position < self._floor:
            raise RaftmetaError(
                "compacted", f"events after revision {position} were asked for, those up to {self._floor} are gone", floor=self._floor
            )

    def _evict(self) -> None:
        limits = self.limits
        while (self._events > limits.max_events or self._bytes > limits.max_bytes) and len(self._ring) - self._start > 1:
            gone = self._ring[self._start]
            self._start += 1
            self._events -= len(gone.events)
            self._bytes -= gone.size_bytes
            self._floor = gone.revision
        if self._start > 1_024 and self._start * 2 > len(self._ring):
            del self._ring[: self._start]
            self._start = 0

    def _schedule_wake(self) -> None:
        if self._waiters and not self._wake_scheduled and self._loop is not None:
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            self._wake_scheduled = False
            waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            _settle(waiter, True)


class Subscription:
    """One watcher's position. Use it in a `with` block: it counts against the limit until it is left."""

    def __init__(self, hub: WatchHub, position: int, wanted: Callable[[Event], bool] | None, epoch: int) -> None:
        self._hub = hub
        self._epoch = epoch
        self._wanted = wanted
        self.position = position

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self._hub._leave()

    @property
    def ended(self) -> bool:
        return self._hub.closed

    def take(self) -> tuple[tuple[Change, tuple[int, ...]], ...]:
        """The next changes, each with the places of its wanted events; moves the position. Raises RaftmetaError compacted."""
        taken = self._hub._take(self.position, self._epoch)
        self.position = taken.revision
        chosen = []
        for change in taken.changes:
            places = tuple(i for i, event in enumerate(change.events) if self._wanted is None or self._wanted(event))
            if places:
                chosen.append((change, places))
        return tuple(chosen)

    async def wait(self, timeout_s: float) -> bool:
        """Until there is something beyond the position, the watch came to its end or the hub closed; False when the time was up."""
        return await self._hub._wait_beyond(self.position, timeout_s, self._epoch)


def _by_revision(events: Sequence[Event]) -> list[Change]:
    changes: list[Change] = []
    first = 0
    for place in range(1, len(events) + 1):
        if place == len(events) or events[place].revision != events[first].revision:
            changes.append(Change(events[first].revision, tuple(events[first:place])))
            first = place
    return changes


def _size(event: Event) -> int:
    if event.value is None:
        return _EVENT_BYTES
    fixed = _FIXED_BYTES.get(event.kind)  # what a publish writes: measured by nobody
    return _EVENT_BYTES + (fixed or 3 * len(_encode(event.value)))  # packed, a record takes about half of its rendered form


def _revision_of(change: Change) -> int:
    return change.revision


def _settle(waiter: asyncio.Future[bool], woken: bool) -> None:
    if not waiter.done():
        waiter.set_result(woken)
