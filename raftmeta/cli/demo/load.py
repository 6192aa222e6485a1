"""An open-loop load: requests leave on a fixed schedule, whatever became of the earlier ones, and time counts from the schedule.

So a server that stalls is seen by every request that was due meanwhile, not by one. Every answer is compared with what the version named on
it answers to the same text, computed beforehand by another process; an answer of other weights is `wrong`. A bound on open requests keeps a
dead server from growing this process: what could not be sent counts as lost.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from raftmeta import strict_json
from raftmeta.cli.demo.errors import DemoError
from raftmeta.cli.demo.measure import Sample, percentile
from raftmeta.core.errors import RaftmetaError

MAX_SAMPLES = 100_000  # of one side
MAX_ANSWER_BYTES = 4 << 20
RECENT = 100  # answers that the live display averages over

Vector = Sequence[float]


class Probes(NamedTuple):
    """Texts and what each version answers to them."""

    texts: tuple[str, ...]
    answers: Mapping[str, tuple[Vector, ...]]  # by version label, in the order of `texts`
    tolerance: float  # largest difference of one component that still is the same answer


@dataclass(frozen=True)
class Target:
    side: str
    url: str  # of the agent
    model: str  # as the inference protocol calls it
    rate: float  # requests per second
    ca_file: Path | None = None
    token: str = ""  # of role inference; "" for an agent that asks for none
    timeout_s: float = 40.0  # then it is lost; longer than the agent's own deadline, so that its answer is seen

    max_open: int = 256  # requests without an answer; what is due beyond counts as lost

    def open(self) -> httpx.AsyncClient:
        verify = ssl.create_default_context(cafile=str(self.ca_file)) if self.ca_file else False
        limits = httpx.Limits(max_connections=self.max_open, max_keepalive_connections=self.max_open)
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        timeout = httpx.Timeout(self.timeout_s)
        return httpx.AsyncClient(base_url=self.url, headers=headers, verify=verify, limits=limits, timeout=timeout, trust_env=False)


class Load:
    """The clients of one side."""

    def __init__(self, target: Target, probes: Probes) -> None:
        self.target = target
        self.samples: list[Sample] = []
        self.recent: deque[Sample] = deque(maxlen=RECENT)
        self._probes = probes
        self._open: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Send until `stop`, then wait for the open ones."""
        async with self.target.open() as http:
            begin_s = time.monotonic()
            for number in range(MAX_SAMPLES):
                due_s = begin_s + number / self.target.rate
                if await self._stopped_before(due_s):
                    break
                self._send(http, number, due_s)
            if self._open:
                await asyncio.wait(self._open)

    def stop(self) -> None:
        self._stop.set()

    async def _stopped_before(self, due_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stop.wait(), max(0.0, due_s - time.monotonic()))
        except TimeoutError:
            return False
        return True

    def _send(self, http: httpx.AsyncClient, number: int, due_s: float) -> None:
        if len(self._open) >= self.target.max_open:
            self._keep(Sample(self.target.side, due_s, 0.0, "lost", "", f"{self.target.max_open} requests were open already"))
            return
        task = asyncio.create_task(self._request(http, number % len(self._probes.texts), due_s))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _request(self, http: httpx.AsyncClient, probe: int, due_s: float) -> None:
        label = ""
        try:
            async with asyncio.timeout(self.target.timeout_s):
                response = await ask(http, self.target.model, self._probes.texts[probe])
            if response.status_code == 200:
                label, fault = judge(response.headers.get("x-raftmeta-version", ""), response.content, probe, self._probes)
                outcome = "wrong" if fault else "ok"
            else:
                outcome, fault = "lost", f"status {response.status_code}: {response.text[:200]}"
        except (httpx.HTTPError, TimeoutError) as cause:
            outcome, fault = "lost", f"{type(cause).__name__}: {cause}"
        self._keep(Sample(self.target.side, due_s, time.monotonic() - due_s, outcome, label, fault))

    def _keep(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.recent.append(sample)


async def ask(http: httpx.AsyncClient, model: str, text: str) -> httpx.Response:
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}]}
    return await http.post(f"/v2/models/{model}/infer", json=body)


async def service_time_s(target: Target, texts: Sequence[str], count: int) -> float:
    """Median time of `count` requests one after the other. Raises DemoError when one is not answered."""
    times = []
    async with target.open() as http:
        for number in range(count):
            begin_s = time.monotonic()
            try:
                response = await ask(http, target.model, texts[number % len(texts)])
            except httpx.HTTPError as cause:
                raise DemoError(f"{target.url} does not answer: {type(cause).__name__}: {cause}") from cause
            if response.status_code != 200:
                raise DemoError(f"{target.url} answered {response.status_code}: {response.text[:200]}")
            times.append(time.monotonic() - begin_s)
    return percentile(times, 0.5)


def judge(header_label: str, content: bytes, probe: int, probes: Probes) -> tuple[str, str]:
    """The version that an answer names, and what is wrong with it, "" when its numbers are that version's. Pure."""
    try:
        body = strict_json.load_object(content, MAX_ANSWER_BYTES)
    except RaftmetaError as fault:
        return header_label, fault.detail
    label = str(body.get("model_version", ""))
    if label != header_label:
        return label, f"the body names {label!r}, the header {header_label!r}"
    if label not in probes.answers:
        return label, f"no version {label!r} was published"
    answer = _embedding(body)
    if answer is None:
        return label, "the answer holds no embedding"
    distances = {name: distance(unit(answer), answers[probe]) for name, answers in probes.answers.items()}
    if distances[label] > probes.tolerance or min(distances, key=lambda name: distances[name]) != label:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in sorted(distances.items()))
        return label, f"labelled {label}, but its distances are {shown}"
    return label, ""


def unit(vector: Vector) -> Vector:
    """Scaled to length one, as the reference is; some encoders answer unscaled."""
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector] if length > 0 else vector


def distance(a: Vector, b: Vector) -> float:
    """The largest difference of one component; infinite between different lengths."""
    if len(a) != len(b) or not a:
        return float("inf")
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _embedding(body: Mapping[str, Any]) -> Vector | None:
    outputs = body.get("outputs")
    if not isinstance(outputs, list) or not outputs or not isinstance(outputs[0], dict):
        return None
    data = outputs[0].get("data")
    if not isinstance(data, list) or not all(isinstance(value, int | float) for value in data):
        return None
    return data
