"""One flipped bit at a time in the memory of a node that serves: `python -m tests.cluster.bit_flips [--count 1000] [--seed N]`.

A real agent serves a small encoder whose slot also holds a tensor of every dtype. Bits are flipped from outside, in turn by dtype, in the
first word, the last word, or anywhere, and now and then in a buffer that the worker's module holds in its own heap, while a client asks all
the time. Of each flip: was it found, were tensor and block named, is the whole slot byte for byte as it was, or the worker replaced, and
does the node answer as before. A module that fails at a request because of a flip that nobody has found yet is counted apart from a request
that is lost. Exit status 1 when anything is missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from consistency.artifact import build_manifest
from raftmeta.core.manifest import DTYPE_BITS
from tests.support.agent_kinds import ENCODER
from tests.support.agent_process import PATIENCE_S, AgentProcess, Driver, embedding, is_answer_of
from tests.support.fake_control_plane import FakeControlPlane
from tests.support.memory_damage import Place, ServingSlot, flip_in_heap
from tests.support.shm import shm_directory
from tests.support.weights import safetensors_bytes

INTERVAL_S = 0.25  # of a pass
EXTRA_BYTES = 150_008  # of the tensor of each dtype: three blocks, the last one short
IDS = "embeddings.position_ids"
POSITIONS = 64  # of the encoder; their numbers are what the buffer holds
LOOK_S = 0.02
WHERE = ("first word", "last word", "anywhere")


@dataclass
class Count:
    flips: int = 0
    found: int = 0
    named: int = 0
    mended: int = 0  # the slot is as it was, or the worker was replaced
    right: int = 0  # answers afterwards
    by_kind: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    failed: int = 0  # by the module, before the flip was found
    lost: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.found == self.named == self.mended == self.right == self.flips and not self.lost


def write_version(directory: Path) -> tuple[Path, list[str]]:
    """The encoder, and a tensor of every dtype that no module takes. Gives their names."""
    ENCODER.write(directory, 1)
    path = directory / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, begin = json.loads(data[8 : 8 + size]), 8 + size
    header.pop("__metadata__", None)
    tensors = {
        name: (item["dtype"], tuple(item["shape"]), data[begin + item["data_offsets"][0] : begin + item["data_offsets"][1]])
        for name, item in header.items()
    }
    chance = np.random.default_rng(7)
    extra = {f"extra.{dtype}": dtype for dtype in sorted(DTYPE_BITS)}
    for name, dtype in extra.items():
        tensors[name] = (dtype, (EXTRA_BYTES * 8 // DTYPE_BITS[dtype],), chance.bytes(EXTRA_BYTES))
    path.write_bytes(safetensors_bytes(tensors))
    return directory, sorted(extra)


class Flipper:
    def __init__(self, root: Path, arena_dir: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.count = Count()
        self._is_open = False  # a bit was flipped and not found yet
        self.plane = FakeControlPlane()
        self.plane.start()
        self.agent = AgentProcess(root / "node", arena_dir, self.plane.url, workers=1, scrub_interval_s=INTERVAL_S)
        driver = Driver(self.plane)
        directory, unbound = write_version(root / "artifacts" / "v1")
        driver.publish("1.0.0", build_manifest(directory, sources=[directory.as_uri() + "/"], engine=ENCODER.engine, unbound=unbound))
        driver.declare("n1")
        self.agent.start()
        assert driver.activate("1.0.0")["status"] == "done", self.agent.log[-3000:]
        self.at_rest()
        self.slot = ServingSlot(arena_dir)
        self.before = self.content()
        self.http = httpx.Client(base_url=self.agent.url, timeout=PATIENCE_S)
        self.answer = embedding(self.ask().json())
        self.by_dtype: dict[str, list[str]] = {}
        for name, place in sorted(self.slot.places.items()):
            self.by_dtype.setdefault(place.dtype, []).append(name)

    def at_rest(self) -> None:
        self.agent.until_settled("1.0.0")
        self.agent.until_ready()

    def content(self) -> dict[str, bytes]:
        return {name: self.slot.read(name, 0, place.size_bytes) for name, place in self.slot.places.items()}

    def ask(self) -> httpx.Response:
        return self.http.post("/v2/models/search/infer", json=ENCODER.body)

    def run(self, count: int, derived_every: int) -> Count:
        over = threading.Event()
        asking = threading.Thread(target=self._ask_until, args=(over,))
        asking.start()
        try:
            for number in range(count):
                if derived_every and number % derived_every == derived_every // 2:
                    self._flip_derived(number)
                else:
                    self._flip(number)
        finally:
            over.set()
            asking.join()
        return self.count

    # --- one flip

    def place(self, number: int) -> tuple[Place, str]:
        dtypes = sorted(self.by_dtype)
        dtype, where = dtypes[number % len(dtypes)], WHERE[number // len(dtypes) % len(WHERE)]
        tensor = self.chance.choice(self.by_dtype[dtype])
        size = self.slot.places[tensor].size_bytes
        word = min(8, size)
        begin = {"first word": 0, "last word": size - word, "anywhere": 0}[where]
        byte = begin + self.chance.randrange(size if where == "anywhere" else word)
        return Place(tensor, byte, self.chance.randrange(8)), f"{dtype} {where}"

    def _flip(self, number: int) -> None:
        place, kind = self.place(number)
        last = self._last()
        self._is_open = True
        self.slot.flip(place)
        found = self._until_found(last)
        self._is_open = False
        self._note(number, kind, str(place), found, place.tensor, place.block, "memory")
        self._until_quiet()
        if self.content() == self.before and found and found["remedy"] == "repaired":
            self.count.mended += 1
        else:
            self.count.bad.append(f"{number}: {place} was not mended: {found}")
        self._check_answer(number)

    def _flip_derived(self, number: int) -> None:
        content = np.arange(POSITIONS, dtype="<i8").tobytes()
        worker, last = self.agent.child("worker"), self._last()
        byte, bit = self.chance.randrange(len(content)), self.chance.randrange(8)
        self._is_open = True
        assert flip_in_heap(worker, content, byte, bit), "the buffer was not met in the worker's memory"
        found = self._until_found(last)
        self._note(number, "derived", f"{IDS} byte {byte} bit {bit}", found, IDS, 0, "derived")
        self.agent.until(lambda: self.agent.child("worker") != worker, "another worker")
        self._is_open = False
        self._until_quiet()
        self.count.mended += 1
        self._check_answer(number)

    def _note(self, number: int, kind: str, what: str, found: dict[str, Any], tensor: str, block: int, of: str) -> None:
        self.count.flips += 1
        self.count.by_kind[kind] = self.count.by_kind.get(kind, 0) + 1
        self.count.found += bool(found)
        is_named = bool(found) and (found["tensor"], found["block"], found["kind"]) == (tensor, block, of)
        self.count.named += is_named
        if not is_named:
            self.count.bad.append(f"{number}: {what}: {found}")

    def _check_answer(self, number: int) -> None:
        reply = self.ask()
        if reply.status_code == 200 and is_answer_of(reply.json(), self.answer):
            self.count.right += 1
        else:
            self.count.bad.append(f"{number}: answered {reply.status_code} {reply.text[:200]}")

    def _last(self) -> dict[str, Any] | None:
        found = self._findings()
        return found[-1] if found else None

    def _findings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.agent.status().get("deployments", {}).get("search", {}).get("scrub", {}).get("findings", [])
        return found

    def _until_found(self, last: dict[str, Any] | None) -> dict[str, Any]:
        """The next finding once something was done about it; empty when there is none in time."""

        def is_new() -> bool:
            found = self._findings()
            return bool(found) and found[-1] != last and bool(found[-1]["remedy"])

        return self._findings()[-1] if _in_time(is_new, 60.0) else {}

    def _until_quiet(self) -> None:
        """All of it was read again: the node is ready."""
        if not _in_time(lambda: self.agent.get("/v2/health/ready").status_code == 200, PATIENCE_S):
            self.count.bad.append(f"not ready again: {self.agent.get('/v2/health/ready').text[:300]}")

    def _ask_until(self, over: threading.Event) -> None:
        with httpx.Client(base_url=self.agent.url, timeout=PATIENCE_S) as http:
            while not over.wait(0.05):
                self.count.asked += 1
                try:
                    reply = http.post("/v2/models/search/infer", json=ENCODER.body)
                except httpx.HTTPError as cause:
                    self.count.lost.append(f"{type(cause).__name__}: {cause}")
                    continue
                if reply.status_code == 500 and self._is_open:
                    self.count.failed += 1
                elif reply.status_code != 200:
                    self.count.lost.append(f"{reply.status_code} {reply.text[:200]}")

    def close(self) -> None:
        self.http.close()
        self.agent.close()
        self.plane.close()


def _in_time(holds: Callable[[], bool], limit_s: float) -> bool:
    """The limit is one of looks, so a machine that stood still meanwhile makes nothing late."""
    for _ in range(round(limit_s / LOOK_S)):
        if holds():
            return True
        time.sleep(LOOK_S)
    return False


def run(count: int, seed: int, derived_every: int) -> Count:
    with shm_directory() as arena_dir, tempfile.TemporaryDirectory(prefix="raftmeta-flips-") as root:
        flipper = Flipper(Path(root), arena_dir, seed)
        try:
            return flipper.run(count, derived_every)
        finally:
            flipper.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.bit_flips", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--derived-every", type=int, default=100, help="one of so many flips is in a worker's heap; 0: none")
    given = parser.parse_args()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the control plane ends in the middle of a watch
    began = time.monotonic()
    count = run(given.count, given.seed, given.derived_every)
    for kind, number in sorted(count.by_kind.items()):
        print(f"{kind:24} {number}")
    for line in [*count.bad, *count.lost][:20]:
        print(line)
    told = {"found": count.found, "tensor and block named": count.named, "mended": count.mended, "answers right": count.right}
    print(", ".join(f"{what} {number} of {count.flips}" for what, number in told.items()))
    beside = f"{count.asked} requests beside, {len(count.lost)} lost, {count.failed} that the module failed at before the flip was found"
    print(f"{beside}; {time.monotonic() - began:.0f} s on {os.cpu_count()} processors")
    return 0 if count.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
