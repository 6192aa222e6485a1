"""A client of a node in a process of its own: `python -m benchmarks.asker URL DEPLOYMENT RATE EXPECTED OUT`.

Requests leave on a fixed schedule, whatever became of the earlier ones, and time counts from the schedule: a node that stalls is seen by
all that was due meanwhile. Every answer is compared with what the version that it names should say. It ends when its standard input does,
and then writes OUT: due times (CLOCK_MONOTONIC) and latencies in seconds, an outcome and a label each.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.encoders import TEXTS

OK, LOST, WRONG = 0, 1, 2
TOLERANCE = 1e-3  # of one component of an embedding of length one; versions are further apart
TIMEOUT_S = 60.0
MAX_OPEN = 512  # what is due beyond is lost: a dead node must not make this process grow
FIRST_S = 60.0  # for the process to start and be answered

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """What a client saw, in the order in which it was due."""

    due_s: Floats
    latency_s: Floats
    outcome: NDArray[np.int64]
    label: NDArray[np.str_]

    def between(self, begin_s: float, end_s: float) -> Floats:
        """Latencies of what was due then and was answered."""
        found: Floats = self.latency_s[(self.due_s >= begin_s) & (self.due_s < end_s) & (self.outcome == OK)]
        return found

    def count(self, outcome: int) -> int:
        return int((self.outcome == outcome).sum())


@dataclass
class Asker:
    """Handed out by `asking`; `seen` is there once the block is over."""

    seen: Seen | None = field(default=None)

    @property
    def result(self) -> Seen:
        assert self.seen is not None, "the client is still asking"
        return self.seen


@contextmanager
def asking(url: str, deployment: str, rate: float, expected: Path, scratch: Path) -> Iterator[Asker]:
    """Ask for as long as the block runs. Raises RuntimeError when the client fails."""
    out = scratch / f"asker-{time.monotonic_ns()}.npz"
    words = [sys.executable, "-m", "benchmarks.asker", url, deployment, str(rate), str(expected), str(out)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    made = Asker()
    try:
        if not process.stdout.readline():  # one line at its first answer
            raise RuntimeError(f"the client was not answered within {FIRST_S:g} s")
        yield made
        process.stdin.close()
        if process.wait(2 * TIMEOUT_S):
            raise RuntimeError(f"the client ended with {process.returncode}")
        with np.load(out) as found:
            made.seen = Seen(found["due_s"], found["latency_s"], found["outcome"], found["label"])
    finally:
        process.kill()
        process.wait()


class _Client:
    def __init__(self, deployment: str, expected: dict[str, Floats]) -> None:
        self._path = f"/v2/models/{deployment}/infer"
        self._body = {"inputs": [{"name": "text", "shape": [len(TEXTS)], "datatype": "BYTES", "data": list(TEXTS)}]}
        self._expected = expected
        self._open: set[asyncio.Task[None]] = set()
        self.rows: list[tuple[float, float, int, str]] = []

    async def run(self, http: httpx.AsyncClient, rate: float, stop: asyncio.Event) -> None:
        await asyncio.wait_for(self._first(http), FIRST_S)
        print("asking", flush=True)
        begin_s, number = time.monotonic(), 0
        while not stop.is_set():
            due_s = begin_s + number / rate
            number += 1
            try:
                await asyncio.wait_for(stop.wait(), max(0.0, due_s - time.monotonic()))
            except TimeoutError:
                self._send(http, due_s)
        if self._open:
            await asyncio.wait(self._open)

    async def _first(self, http: httpx.AsyncClient) -> None:
        while (await http.post(self._path, json=self._body)).status_code != 200:
            await asyncio.sleep(0.05)

    def _send(self, http: httpx.AsyncClient, due_s: float) -> None:
        if len(self._open) >= MAX_OPEN:
            self.rows.append((due_s, 0.0, LOST, "too many open"))
            return
        task = asyncio.create_task(self._ask(http, due_s))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _ask(self, http: httpx.AsyncClient, due_s: float) -> None:
        try:
            reply = await http.post(self._path, json=self._body)
        except httpx.HTTPError as cause:
            self.rows.append((due_s, time.monotonic() - due_s, LOST, type(cause).__name__))
            return
        took_s = time.monotonic() - due_s
        if reply.status_code != 200:
            self.rows.append((due_s, took_s, LOST, str(reply.status_code)))
            return
        label = reply.headers["x-raftmeta-version"]
        output = reply.json()["outputs"][0]
        answer = np.array(output["data"]).reshape(output["shape"])
        right = label in self._expected and bool(np.allclose(answer, self._expected[label], atol=TOLERANCE))
        self.rows.append((due_s, took_s, OK if right else WRONG, label))


async def _main(url: str, deployment: str, rate: float, expected: Path, out: Path) -> None:
    with np.load(expected) as found:
        client = _Client(deployment, {label: found[label] for label in found.files})
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), stop.set)  # its end is the only thing that comes
    limits = httpx.Limits(max_connections=MAX_OPEN, max_keepalive_connections=MAX_OPEN)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        await client.run(http, rate, stop)
    rows = sorted(client.rows)
    columns = [np.array([row[column] for row in rows]) for column in range(4)]
    np.savez(out, due_s=columns[0], latency_s=columns[1], outcome=columns[2].astype(np.int64), label=columns[3].astype(str))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5])))
