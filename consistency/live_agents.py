"""Asking two serving nodes over HTTP: a question of the inference protocol, what they have applied, how much they can compute."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Meta
from prometheus_client.parser import text_string_to_metric_families

from consistency.agent_answers import AgentFault
from consistency.inference import Output, read_answer
from consistency.node_http import NodeHttp, Request
from raftmeta.core.errors import RaftmetaError

T = TypeVar("T")

MAX_ANSWER_BYTES = 16 << 20
MAX_PAGE_BYTES = 16 << 20  # of metrics
_Text = Annotated[str, Meta(max_length=256)]
_Order = tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


class _Probed(msgspec.Struct, frozen=True):
    kernel: _Text = ""


class Standing(msgspec.Struct, frozen=True):
    """What a node says of itself. Unknown fields are left alone."""

    boot_id: _Text
    version: _Text  # that serves
    checksum: _Text
    applied: Annotated[dict[_Text, _Order], Meta(max_length=64)]  # empty while what it obeyed last is not what serves
    config_digest: _Text = ""
    derived: dict[_Text, str] = {}
    probed: _Probed | None = None

    @property
    def kernel(self) -> str:
        return "" if self.probed is None else self.probed.kernel


class Spec(msgspec.Struct, frozen=True):
    name: _Text
    datatype: _Text
    shape: tuple[int, ...]


class Described(msgspec.Struct, frozen=True):
    """What a model takes, by the inference protocol."""

    inputs: tuple[Spec, ...]


class Capacity(NamedTuple):
    """Of one node for one deployment."""

    workers: int
    compute_s: float  # mean of one request so far; 0: nothing was computed yet

    @property
    def requests_per_s(self) -> float:
        return self.workers / self.compute_s if self.compute_s else 0.0


class LiveAgents:
    """Every method raises AgentFault for whatever is wrong with the node."""

    def __init__(self, http: NodeHttp, infer_s: float, probes: bool) -> None:
        """`infer_s`: for the answer to one question. `probes`: ask as one, which the side that does not serve answers too."""
        self._http = http
        self._infer_s = infer_s
        self._probes = probes

    async def infer(self, url: str, deployment: str, body: bytes) -> tuple[str, tuple[Output, ...]]:
        """The label that computed the answer, and its outputs by name."""
        path = f"/v2/models/{quote(deployment, safe='')}/infer"
        asked = Request("POST", url, path, MAX_ANSWER_BYTES, content=body, timeout_s=self._infer_s, is_probe=self._probes)
        answer = await self._http.ask(asked)
        try:
            return read_answer(answer)
        except RaftmetaError as cause:
            raise AgentFault("bad_answer", cause.detail) from cause

    async def standing(self, url: str, deployment: str) -> Standing:
        return await self._read(url, f"/raftmeta/v1/evidence/{quote(deployment, safe='')}", Standing)

    async def described(self, url: str, deployment: str) -> Described:
        return await self._read(url, f"/v2/models/{quote(deployment, safe='')}", Described)

    async def capacity(self, url: str, deployment: str) -> Capacity:
        """From the node's own counts."""
        page = await self._http.ask(Request("GET", url, "/metrics", MAX_PAGE_BYTES))
        return await asyncio.to_thread(_capacity, page.decode("utf-8", "replace"), deployment)

    async def _read(self, url: str, path: str, shape: type[T]) -> T:
        try:
            return msgspec.json.decode(await self._http.ask(Request("GET", url, path, MAX_ANSWER_BYTES)), type=shape)
        except (msgspec.MsgspecError, RecursionError) as cause:  # the latter for an answer that is nested deeply
            raise AgentFault("bad_answer", f"the answer cannot be read: {cause}") from cause


def _capacity(page: str, deployment: str) -> Capacity:
    sums: dict[str, float] = {}
    workers = 0
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels: Mapping[str, str] = sample.labels
                if sample.name == "raftmeta_agent_process_up" and labels.get("role") == "worker":
                    workers += sample.value > 0
                if sample.name.startswith("raftmeta_agent_compute_seconds_") and labels.get("deployment") == deployment:
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except (ValueError, LookupError, TypeError, AttributeError) as cause:  # the library has no error of its own for what is malformed
        raise AgentFault("bad_answer", f"the page of metrics cannot be read: {type(cause).__name__}: {cause}") from cause
    count, seconds = (sums.get(f"raftmeta_agent_compute_seconds_{what}", 0.0) for what in ("count", "sum"))
    if not (math.isfinite(count) and math.isfinite(seconds) and count >= 0 and seconds >= 0):
        raise AgentFault("bad_answer", f"the page of metrics says that {count:g} requests took {seconds:g} s of computing")
    return Capacity(workers, seconds / count if count else 0.0)
