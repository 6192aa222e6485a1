"""Asking agents over HTTP what their memory holds: the questions of the check, and that their answers are what was asked for.

Whatever goes wrong with one node is an AgentFault with a code and a detail; it never ends the check of the others.
"""

from __future__ import annotations

import base64
import binascii
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import msgspec

from consistency.agent_answers import AgentFault, BlocksAnswer, DigestsAnswer, VectorAnswer, VectorsAnswer, believed, decode
from consistency.findings import DigestPage, NodeVector
from consistency.node_http import HttpOptions, NodeHttp, Request
from raftmeta.core import block_file
from raftmeta.core.errors import RaftmetaError

if TYPE_CHECKING:  # NumPy takes longer to import than a check of equal roots
    from consistency.entries import Words

MAX_ANSWER_BYTES = 64 << 20  # entries of 200,000 tensors take about 30 MB of JSON
MAX_FRAME_BYTES = 16 << 10  # of an answer with block checks, beside these: the tensor's name takes six times its bytes at most
MAX_ROOTS_BYTES, MAX_ROOT_BYTES = 64 << 10, 8 << 10  # of an answer for several deployments, and for each of them
MAX_NAMES_CHARS = 16 << 10  # of one address; a node takes a head of 64 KiB
MAX_KEPT = 4
MAX_WAIT_S = 3_600  # that a node can be told
SLACK_MS = 1_000  # by which the clocks of two machines may measure the same time differently
NO_ROUTE = "not_found"  # what a node of an earlier build says to the question for all its deployments


class _Heard(NamedTuple):
    body: bytes
    left_s: float  # when the question left, monotonic
    taken_s: float  # by the node

    def took_ms(self) -> int:
        """Since the question left."""
        return math.ceil((time.monotonic() - self.left_s) * 1000)


class HttpAgents:
    """Use as an async context manager."""

    def __init__(self, options: HttpOptions) -> None:
        """Raises RaftmetaError bad_field for a ca_file that cannot be used."""
        self._timeout_s = options.timeout_s
        # Most nodes get one question.
        self._http = NodeHttp(replace(options, max_kept=MAX_KEPT))

    async def __aenter__(self) -> HttpAgents:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def vectors(self, url: str, deployments: Sequence[str], max_age_ms: int | None = None) -> dict[str, NodeVector | AgentFault]:
        """Of each of these what the node holds, or why that was not told. Raises AgentFault when nothing was.

        One question, or few when the names do not fit into one. A node of an earlier build is asked for one deployment after the other.
        """
        found: dict[str, NodeVector | AgentFault] = {}
        heard: dict[str, _Heard] = {}
        for names in _batches(deployments):
            try:
                seen, answer = await self._some(url, names, max_age_ms)
                found |= seen
                heard |= dict.fromkeys(seen, answer)
            except AgentFault as fault:
                if fault.code == NO_ROUTE:
                    return await self._one_by_one(url, deployments)
                if not found:
                    raise
                found |= dict.fromkeys(names, fault)
        # Those of the first question have grown older while the others were asked.
        return {name: _aged(item, heard.get(name), max_age_ms is None) for name, item in found.items()}

    async def _some(self, url: str, names: Sequence[str], max_age_ms: int | None) -> tuple[dict[str, NodeVector | AgentFault], _Heard]:
        params = {"deployments": ",".join(names), "wait_s": self._wait_s()}
        if max_age_ms is not None:
            params["max_age_ms"] = str(max_age_ms)
        heard = await self._get(url, "", params, MAX_ROOTS_BYTES + MAX_ROOT_BYTES * len(names))
        limit_ms = max(heard.took_ms() + SLACK_MS, max_age_ms or 0)
        seen = decode(heard.body, VectorsAnswer)
        return {name: believed(seen, name, limit_ms) for name in names}, heard

    async def _one_by_one(self, url: str, deployments: Sequence[str]) -> dict[str, NodeVector | AgentFault]:
        found: dict[str, NodeVector | AgentFault] = {}
        heard: dict[str, _Heard] = {}
        for name in deployments:
            try:
                found[name], heard[name] = await self._one(url, name, entries=False)
            except AgentFault as fault:
                found[name] = fault
                if fault.code in ("unreachable", "timed_out"):  # so it will be for the others
                    found = {name: found.get(name, fault) for name in deployments}
                    break
        return {name: _aged(item, heard.get(name), True) for name, item in found.items()}

    async def vector(self, url: str, deployment: str, entries: bool) -> NodeVector:
        """The vector of the slot that serves now, with the entry of every tensor if asked."""
        return (await self._one(url, deployment, entries))[0]

    async def _one(self, url: str, deployment: str, entries: bool) -> tuple[NodeVector, _Heard]:
        heard = await self._get(url, deployment, {"entries": "1" if entries else "0"})
        limit_ms = heard.took_ms() + SLACK_MS
        seen = decode(heard.body, VectorAnswer)
        if entries and seen.entries is None:
            raise AgentFault("bad_answer", "the node left out the entries it was asked for")
        return seen.believed(limit_ms), heard

    async def digests(self, url: str, deployment: str, after: str) -> DigestPage:
        """SHA-256 of the tensors behind this name, as many as the node gives at once."""
        params = {"sha256": "1", "wait_s": self._wait_s()} | ({"after": after} if after else {})
        heard = await self._get(url, deployment, params)
        page = msgspec.convert(decode(heard.body, DigestsAnswer), DigestPage, from_attributes=True)
        return msgspec.structs.replace(page, taken_s=heard.taken_s)

    async def blocks(self, url: str, deployment: str, tensor: str, size_bytes: int, published: bool = False) -> Words:
        """The block checks of one tensor of this size in memory, or as they were published."""
        limit = MAX_FRAME_BYTES + -(-block_file.CHECK_BYTES * block_file.blocks_of(size_bytes) // 3) * 4  # as base64
        heard = await self._get(url, deployment, {"blocks": tensor} | ({"published": "1"} if published else {}), limit)
        from consistency.vector import unpack_blocks

        seen = decode(heard.body, BlocksAnswer)
        if seen.tensor != tensor:
            raise AgentFault("bad_answer", f"asked for the blocks of {tensor!r}, got those of {seen.tensor!r}")
        try:
            return unpack_blocks(base64.b64decode(seen.blocks, validate=True))
        except (binascii.Error, RaftmetaError) as cause:
            raise AgentFault("bad_answer", f"the blocks of {tensor!r} cannot be read: {cause}") from cause

    def _wait_s(self) -> str:
        return str(min(MAX_WAIT_S, math.ceil(self._timeout_s)))

    async def _get(self, url: str, deployment: str, params: Mapping[str, str], limit: int = MAX_ANSWER_BYTES) -> _Heard:
        """ "" as the deployment: all of the node."""
        path = f"/{quote(deployment, safe='')}" if deployment else ""
        told = await self._http.ask_timed(Request("GET", url, f"/raftmeta/v1/vector{path}", limit, params))
        return _Heard(told.body, time.monotonic() - told.passed_s, told.taken_s)


def _aged(item: NodeVector | AgentFault, heard: _Heard | None, is_read_now: bool) -> NodeVector | AgentFault:
    """With how long its answer was under way, at most: nobody knows when the node sent it, only when the question left.

    `is_read_now`: the reading was made for the question, so the time that it took is none in which the answer was under way.
    """
    if isinstance(item, AgentFault) or heard is None:
        return item
    took_ms = heard.took_ms()
    return msgspec.structs.replace(item, under_way_ms=max(0, took_ms - item.age_ms) if is_read_now else took_ms)


def _batches(names: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        if batch and size + len(name) + 1 > MAX_NAMES_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += len(name) + 1
    if batch:
        yield batch
