"""An incremental parser of server-sent events. Pure: bytes in, events out.

It reads the line endings, fields and blank-line dispatch of the format that browsers use, cut at any byte. Lines and events are bounded,
so a broken or hostile server cannot grow the reader's memory. What the events mean is the business of `watch`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from raftmeta.core.errors import RaftmetaError

MAX_LINE_BYTES = 4 << 20  # one revision with all its records; a rollout with 1,000 attestations is about 1 MB
MAX_EVENT_BYTES = 4 << 20

_END_OF_LINE = re.compile(rb"[\r\n]")


class SseEvent(NamedTuple):
    event: str  # "message" when the stream does not say
    id: str  # the last id seen, "" before the first
    data: str


class SseParser:
    """Feed it chunks in order; it returns the events that each chunk completes."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        self._after_cr = False  # a line feed that follows belongs to the same end of line
        self._first_line = True
        self._data: list[str] = []
        self._data_bytes = 0
        self._event = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Raises RaftmetaError `body_too_large` past a bound, `bad_request` for bytes that are no UTF-8."""
        events = []
        for line in self._lines(chunk):
            event = self._take(line)
            if event is not None:
                events.append(event)
        return events

    def _lines(self, chunk: bytes) -> Iterator[str]:
        start = 0
        if self._after_cr and chunk:
            self._after_cr = False
            start = 1 if chunk[:1] == b"\n" else 0
        while found := _END_OF_LINE.search(chunk, start):
            self._extend(chunk[start : found.start()])
            start = found.end()
            if found[0] == b"\r":
                if start == len(chunk):
                    self._after_cr = True
                elif chunk[start : start + 1] == b"\n":
                    start += 1
            yield self._finish_line()
        self._extend(chunk[start:])

    def _extend(self, piece: bytes) -> None:
        if len(self._line) + len(piece) > self._max_line_bytes:
            raise RaftmetaError("body_too_large", f"a line of the event stream exceeds {self._max_line_bytes} bytes")
        self._line += piece

    def _finish_line(self) -> str:
        raw = bytes(self._line)
        self._line.clear()
        if self._first_line:
            self._first_line = False
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as cause:
            raise RaftmetaError("bad_request", f"the event stream is not UTF-8: {cause}") from cause

    def _take(self, line: str) -> SseEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._max_event_bytes:
                raise RaftmetaError("body_too_large", f"one event of the stream exceeds {self._max_event_bytes} bytes")
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None  # comments (no name), `retry` and unknown fields mean nothing to us

    def _dispatch(self) -> SseEvent | None:
        data, event = self._data, self._event
        self._data, self._data_bytes, self._event = [], 0, ""
        if not data and event not in _DATALESS:
            return None
        return SseEvent(event or "message", self._id, "\n".join(data))


_DATALESS = frozenset({"compacted"})  # the format drops events without data; this one may come bare, and must not be lost
