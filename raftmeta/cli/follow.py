"""Follow a rollout to its end, telling each step once. Asks any member; survives fail-over because the client does.

The answer is the last rollout record; time that runs out is not a failure of the rollout, which goes on without us.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from raftmeta.client import Client, Read, Reply
from raftmeta.core.errors import RaftmetaError

POLL_S = 0.1  # a stale read of the member that answers: cheap, and min_revision keeps it from going back in time


async def follow(client: Client, started: Reply, wait_s: float, say: Callable[[str], None]) -> Reply:
    """The record once it is no longer running. Raises RaftmetaError `unknown_outcome` when `wait_s` passes first."""
    rollout_id = started["rollout_id"]
    deadline = time.monotonic() + wait_s
    revision = started.revision
    while True:
        rollout = await client.get_rollout(rollout_id, Read(min_revision=revision))
        revision = max(revision, rollout.revision)
        say(describe(rollout))
        if rollout["status"] != "running":
            return rollout
        if time.monotonic() >= deadline:
            detail = f"rollout {rollout_id} is {rollout['phase']} after {wait_s:g} s and goes on: {describe(rollout)}"
            raise RaftmetaError("unknown_outcome", detail, rollout_id=rollout_id)
        await asyncio.sleep(POLL_S)


def describe(rollout: Mapping[str, Any]) -> str:
    """One line: where it goes, its phase, what each node attested."""
    nodes = ", ".join(f"{item['node']} {item['stage']}" for item in rollout["attestations"])
    line = f"{rollout['deployment']} {rollout['from_version'] or '(nothing)'} -> {rollout['to_version']}: {rollout['phase']}"
    if rollout["status"] == "failed":
        line += ", failed"
    return f"{line} ({nodes})" if nodes else line


def failure_text(rollout: Mapping[str, Any]) -> str:
    failure = rollout.get("failure") or {}
    where = f" on {failure['node']}" if failure.get("node") else ""
    return f"{failure.get('code') or 'no code'}{where}: {failure.get('detail') or 'no detail'}"


def cost_rows(rollout: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Per node: what the activation cost there."""
    return [
        (
            item["node"],
            item["side"],
            item["stage"],
            item["counters"]["bytes_fetched"],
            item["counters"]["bytes_read"],
            item["counters"]["bytes_from_active"],
            item["counters"]["bytes_kept"],
            item["counters"]["switch_call_us"],
        )
        for item in rollout["attestations"]
    ]
