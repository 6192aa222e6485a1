"""What nodes answer to a checker, as scripts, and asking them over HTTP without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from consistency import vector
from consistency.agent_answers import AgentFault
from consistency.agents import HttpAgents
from consistency.findings import NodeVector
from consistency.node_http import HttpOptions
from tests.support.fake_fleet import DEPLOYMENT, FakeFleet

Handler = Callable[[httpx.Request], httpx.Response]


URL = "http://127.0.0.1:8500"


def good_answer(**changes: Any) -> dict[str, Any]:
    return dict(msgspec.to_builtins(FakeFleet().nodes_by_name["a1"].vector(entries=True))) | changes


def ask(handler: Handler, url: str = URL, *, entries: bool = False, options: dict[str, Any] | None = None) -> NodeVector:
    async def work() -> NodeVector:
        async with HttpAgents(HttpOptions(http=httpx.MockTransport(handler), **(options or {}))) as agents:
            return await agents.vector(url, DEPLOYMENT, entries)

    return asyncio.run(work())


def ask_blocks(handler: Handler, tensor: str = "norm") -> vector.Words:
    async def work() -> vector.Words:
        async with HttpAgents(HttpOptions(http=httpx.MockTransport(handler))) as agents:
            return await agents.blocks(URL, DEPLOYMENT, tensor, 256 * 600)

    return asyncio.run(work())


def fault(handler: Handler, url: str = URL, **kind: Any) -> AgentFault:
    with pytest.raises(AgentFault) as caught:
        ask(handler, url, **kind)
    return caught.value


def answering(body: Any, status: int = 200) -> Handler:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return lambda request: httpx.Response(status, content=content)


def bulk_answer(*names: str, **changes: Any) -> dict[str, Any]:
    one = {
        name: value for name, value in good_answer().items() if name not in ("node", "boot_id", "deployment", "active_models", "entries")
    }
    vectors = {name: one | {"vector_from": "memory"} | changes for name in names}
    return {"node": "a1", "zone": "a", "boot_id": "boot-1", "active_models": len(names), "vectors": vectors, "faults": {}}


def ask_all(handler: Handler, names: list[str], max_age_ms: int | None = None, **options: Any) -> dict[str, NodeVector | AgentFault]:
    async def work() -> dict[str, NodeVector | AgentFault]:
        async with HttpAgents(HttpOptions(http=httpx.MockTransport(handler), **options)) as agents:
            return await agents.vectors(URL, names, max_age_ms)

    return asyncio.run(work())


def codes(given: dict[str, NodeVector | AgentFault]) -> dict[str, str]:
    return {name: item.code if isinstance(item, AgentFault) else "" for name, item in given.items()}
