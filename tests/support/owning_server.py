"""A serving engine that owns its memory, small enough for a test: it is sent tensors, and says what it holds; nobody maps anything of it.

Loading goes on whether or not the caller still waits, ends when the test opens its gate, and is refused when memory is short. A stream
holds its version until it is finished. A restart loses everything. It may hold other bytes than it was sent (`rot`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from consistency.vector import backend, root, tensor_entry


class ServerRefused(Exception):
    """The server said no, with a word for programs and a sentence for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


@dataclass
class Held:
    """One version in the server's memory."""

    label: str
    checksum: str
    tensors: dict[str, bytes]
    ready: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.tensors.values()))

    def answer(self) -> bytes:
        return self.tensors["a"][:1]


@dataclass
class OwningServer:
    memory_bytes: int
    held: dict[str, Held] = field(default_factory=dict)  # by the name that the caller gave
    active: str = ""
    switches: int = 0
    streams: dict[int, str] = field(default_factory=dict)
    gate: asyncio.Event | None = None  # while set to one, loading waits for it
    _numbers: int = 0
    _loading: set[asyncio.Task[None]] = field(default_factory=set)

    async def load(self, name: str, label: str, checksum: str, tensors: Mapping[str, bytes]) -> None:
        """Ends on the server, also when the caller has gone away."""
        task = asyncio.ensure_future(self._load(name, Held(label, checksum, dict(tensors))))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, version: Held) -> None:
        if self.gate is not None:
            await self.gate.wait()
        free = self.memory_bytes - sum(item.size_bytes for item in self.held.values())
        if version.size_bytes > free:
            raise ServerRefused("no_memory", f"{version.size_bytes} bytes, {free} are free")
        self.held[name] = version

    async def settled(self) -> None:
        """Whatever was loading has ended."""
        await asyncio.gather(*self._loading, return_exceptions=True)

    async def make_ready(self, name: str) -> None:
        self._need(name).ready = True

    async def switch(self, name: str) -> int:
        if not self._need(name).ready:
            raise ServerRefused("not_ready", f"{name} was not made ready")
        self.active = name
        self.switches += 1
        return self.switches

    async def unload(self, name: str) -> None:
        """One that is not there is unloaded already."""
        if name == self.active:
            raise ServerRefused("active", f"{name} answers requests")
        if self.used_by(name):
            raise ServerRefused("busy", f"{self.used_by(name)} streams use {name}")
        self.held.pop(name, None)

    def infer(self, name: str = "") -> tuple[str, bytes]:
        """Label and answer of a version, by default of the active one."""
        found = self._need(name or self.active)
        return found.label, found.answer()

    def digest(self, name: str) -> str:
        """The vector's root over what the server holds; whoever asks has to believe it."""
        tensors = self._need(name).tensors
        return root({key: tensor_entry(memoryview(value), "U8", (len(value),), backend("numpy")).entry for key, value in tensors.items()})

    def open_stream(self) -> int:
        self._numbers += 1
        self.streams[self._numbers] = self.active
        return self._numbers

    def finish_stream(self, number: int) -> str:
        """The label that computed it, also long after a switch; "" for one that was aborted."""
        if number not in self.streams:
            return ""
        return self._need(self.streams.pop(number)).label

    def abort_streams(self, name: str) -> None:
        self.streams = {number: used for number, used in self.streams.items() if used != name}

    def used_by(self, name: str) -> int:
        return sum(used == name for used in self.streams.values())

    def rot(self, name: str) -> None:
        version = self._need(name)
        version.tensors["a"] = b"?" + version.tensors["a"][1:]

    def restart(self) -> None:
        self.held.clear()
        self.streams.clear()
        self.active = ""

    def _need(self, name: str) -> Held:
        found = self.held.get(name)
        if found is None:
            raise ServerRefused("unknown", f"{name!r} is not loaded")
        return found
