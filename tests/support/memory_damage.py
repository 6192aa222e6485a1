"""Flips bits in the memory of a node that runs: in the slot that serves, through the arena's file, and in a worker's own heap."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from consistency.vector import BLOCK_BYTES
from node_agent.device.arena import Arena
from node_agent.device.control_block import ControlBlock
from node_agent.device.snapshot import Snapshots
from node_agent.layout import Placement

SLOTS_BEGIN = 1 << 16  # in an arena's file


class Place(NamedTuple):
    """One bit of one tensor."""

    tensor: str
    byte: int
    bit: int

    @property
    def block(self) -> int:
        return self.byte // BLOCK_BYTES


class ServingSlot:
    """The slot of an arena that serves now."""

    def __init__(self, arena_dir: Path) -> None:
        (self.path,) = arena_dir.glob("*.arena")
        (block_path,) = arena_dir.glob("*.control")
        block = ControlBlock.open(block_path)
        self.slot = block.active()[0]
        block.close()
        arena = Arena.open(self.path)
        self.record = arena.record(self.slot)
        self._begin = SLOTS_BEGIN + self.slot * arena.slot_bytes
        arena.close()
        snapshot = Snapshots(self.path).load(self.slot, self.record.snapshot_digest)
        placements = () if snapshot is None else snapshot.layout.placements  # nothing is known of a slot that was given up
        self.places: dict[str, Placement] = {place.name: place for place in placements if place.size_bytes}

    def flip(self, place: Place) -> None:
        at = self._at(place)
        self._write(at, bytes([self._read(at)[0] ^ (1 << place.bit)]))

    def byte(self, place: Place) -> int:
        return self._read(self._at(place))[0]

    def write(self, tensor: str, byte: int, data: bytes) -> None:
        self._write(self._begin + self.places[tensor].offset + byte, data)

    def read(self, tensor: str, byte: int, size: int) -> bytes:
        return self._read(self._begin + self.places[tensor].offset + byte, size)

    def _at(self, place: Place) -> int:
        assert 0 <= place.byte < self.places[place.tensor].size_bytes
        return self._begin + self.places[place.tensor].offset + place.byte

    def _read(self, at: int, size: int = 1) -> bytes:
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, at)

    def _write(self, at: int, data: bytes) -> None:
        with open(self.path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data, at)


def flip_in_heap(pid: int, content: bytes, byte: int, bit: int) -> int:
    """Flip a bit in every place of a process's private memory that holds exactly this content. Gives how many there were."""
    count = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for begin, end in _private_areas(pid):
            try:
                data = os.pread(memory.fileno(), end - begin, begin)
            except OSError:  # an area that the kernel lets nobody read
                continue
            for found in re.finditer(re.escape(content), data):
                at = begin + found.start() + byte
                os.pwrite(memory.fileno(), bytes([data[found.start() + byte] ^ (1 << bit)]), at)
                count += 1
    return count


def _private_areas(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode, _, _, inode, *_ = line.split()
        if mode == "rw-p" and inode == "0":
            begin, end = (int(word, 16) for word in span.split("-"))
            yield begin, end
