"""A device in memory that behaves as badly as devices may: streams that end late and in any order, stale bytes, limits, faults by number.

What is asked of a feed waits in its stream. At every call, and while somebody waits, a seeded generator decides which streams go on and how
far, an upload half by half, so whoever looks before a stream ended sees what was there before, or half of it. Fresh memory is not zero.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from random import Random

import numpy as np

from consistency import vector
from consistency.vector import BLOCK_BYTES, Words
from node_agent.device.streamed import DeviceFault

ALIGNMENT = 256  # of every offset
STALE = 0xA5


class FakeDevice:
    def __init__(self, memory_bytes: int, seed: int = 0, faults: Mapping[tuple[str, int], str] | None = None) -> None:
        """`faults`: (upload | move | checks | synchronize, its number from 0) -> the name of the error it ends with.

        A `reset` at a number of calls of every kind takes the memory's contents along. Allocation has a fake of its own (`fake_libcuda`).
        """
        self.memory = bytearray([STALE]) * memory_bytes
        self.faults = dict(faults or {})
        self.calls: Counter[str] = Counter()
        self.hangs = False
        self.lost = ""  # the error with which every call ends from now on
        self.random = Random(seed)
        self.lock = threading.RLock()
        self.feeds: list[FakeFeed] = []

    def feed(self, buffer_bytes: int) -> FakeFeed:
        feed = FakeFeed(self, buffer_bytes)
        self.feeds.append(feed)
        return feed

    def happens(self, call: str) -> None:
        """One call: it may fail, and whichever streams want to go on a little."""
        number, every = self.calls[call], self.calls.total()
        self.calls[call] += 1
        if (name := self.faults.get(("reset", every))) is not None:
            self.lost = name
            self.memory[:] = bytes([STALE ^ 0xFF]) * len(self.memory)
            for feed in self.feeds:
                feed.waiting.clear()
        if self.lost:
            raise DeviceFault(call, self.lost)
        if (name := self.faults.get((call, number))) is not None:
            self.lost = name  # as real devices: after one fault nothing of this process works any more
            raise DeviceFault(call, name)
        for feed in self.random.sample(self.feeds, len(self.feeds)):
            feed.go_on(self.random.randrange(3) if self.random.random() < 0.3 else 0)

    def span(self, call: str, offset: int, size: int) -> slice:
        if offset % ALIGNMENT:
            raise DeviceFault(call, "misaligned_address")
        if size < 0 or not 0 <= offset <= offset + size <= len(self.memory):
            raise DeviceFault(call, "illegal_address")
        return slice(offset, offset + size)

    @property
    def pending(self) -> int:
        with self.lock:
            return sum(len(feed.waiting) for feed in self.feeds)

    def run_out(self) -> None:
        """Everything that was asked happens now, whether somebody waits for it or not."""
        with self.lock:
            for feed in self.feeds:
                feed.go_on(len(feed.waiting))


class FakeFeed:
    def __init__(self, device: FakeDevice, buffer_bytes: int) -> None:
        self.buffer = memoryview(bytearray(buffer_bytes))
        self.waiting: deque[Callable[[], None]] = deque()
        self._results = np.zeros((-(-buffer_bytes // BLOCK_BYTES), 2), np.uint64)  # used again by the next call, as pinned memory is
        self._device = device
        self._looks = 0

    def upload(self, offset: int, size: int) -> None:
        self._ask("upload", *self._halves(offset, size))

    def move(self, from_offset: int, to_offset: int, size: int) -> None:
        device = self._device
        source, target = device.span("move", from_offset, size), device.span("move", to_offset, size)

        def happen() -> None:
            device.memory[target] = device.memory[source]

        self._ask("move", happen)

    def checks(self, offset: int, size: int) -> Words:
        device = self._device
        span = device.span("checks", offset, size)
        found = self._results[: -(-size // BLOCK_BYTES)]
        found[:] = STALE

        def happen() -> None:
            found[:] = vector.block_checks(bytes(device.memory[span]), vector.backend("numpy"))

        self._ask("checks", happen)
        return found

    def done(self) -> bool:
        """Never at the first look, when there was anything to do."""
        device = self._device
        with device.lock:
            if self.waiting and not device.hangs:
                self.go_on(device.random.randrange(2) if self._looks else 0)
            self._looks += 1
            if self.waiting:
                return False
            self._looks = 0
            device.happens("synchronize")
            return True

    def go_on(self, steps: int) -> None:
        for _ in range(min(steps, len(self.waiting))):
            self.waiting.popleft()()

    def _ask(self, call: str, *steps: Callable[[], None]) -> None:
        with self._device.lock:
            self._device.happens(call)
            self.waiting.extend(steps)

    def _halves(self, offset: int, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
        device, half = self._device, size // 2
        span = device.span("upload", offset, size)

        def first() -> None:
            device.memory[span.start : span.start + half] = self.buffer[:half]

        def second() -> None:
            device.memory[span.start + half : span.stop] = self.buffer[half:size]

        return first, second
