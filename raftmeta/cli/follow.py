"""Follow a rollout to its end, telling each step once. Asks any member, and waits for members that are away as for the rollout itself.

The answer is the last rollout record. Time that runs out is not a failure of the rollout, which goes on without us; neither is it one when
nobody can be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raftmeta.cli.exits import Unfinished
from raftmeta.client import Client, Read, Reply
from raftmeta.client.backoff import RETRIED
from raftmeta.client.transport import Timing
from raftmeta.core.errors import RaftmetaError

POLL_S = 0.1  # ten reads a second are nothing to a member, and a person sees each step when it comes
LOOK_S = 1.0  # for the last look when the time is up, and for the only one with --wait-s 0


class Teller:
    """Tells each step, and that members are away once until one answers again: they may be away for long."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._away = False

    def away(self, why: str) -> None:
        if not self._away:
            self._away = True
            self._say(f"trying again: {why}")

    def step(self, text: str) -> None:
        self._away = False
        self._say(text)


async def follow(client: Client, started: Reply, wait_s: float, say: Callable[[str], None], timing: Timing | None = None) -> Reply:
    """The record once it is no longer running. Raises Unfinished when `wait_s` passes first, whether or not members answer."""
    timing = timing or Timing()
    rollout_id, revision, seen = started["rollout_id"], started.revision, "not seen yet"
    deadline = timing.monotonic() + wait_s
    while True:
        left_s = max(LOOK_S, deadline - timing.monotonic())
        try:
            rollout = await client.get_rollout(rollout_id, Read(min_revision=revision), timeout_s=left_s)
        except RaftmetaError as error:
            if error.code not in RETRIED:
                raise
            detail = f"rollout {rollout_id} was started and goes on; no member could say how it stands: {error.detail}; last seen: {seen}"
            raise Unfinished(detail, "`raftmeta cluster status` shows the members, then `raftmeta status` the rollout") from error
        revision = max(revision, rollout.revision)
        seen = describe(rollout)
        say(seen)
        if rollout["status"] != "running":
            return rollout
        if timing.monotonic() >= deadline:
            detail = f"rollout {rollout_id} is {rollout['phase']} after {wait_s:g} s and goes on: {seen}"
            raise Unfinished(detail, f"`raftmeta status {rollout['deployment']}` shows it; `raftmeta abort` stops it before its switch")
        await timing.sleep(POLL_S)


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
    code, detail = failure.get("code") or "no code", failure.get("detail") or "no detail"
    if detail.startswith((f"{code}: ", f"{code} in ")):  # a node names the very refusal, which may be called as its class is
        return f"{code}{where}{detail.removeprefix(code)}"
    return f"{code}{where}: {detail}"


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
