"""`raftmeta watch`: every change as it is committed, one line per record, or one JSON object per revision with `--json`."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import MemberOptions, command

if TYPE_CHECKING:  # httpx costs 100 ms that `--help` must not pay
    from raftmeta.client import Change, ChangeEvent

RESOURCES = ("models", "versions", "deployments", "rollouts", "verdicts", "evidence")


@dataclass(frozen=True, kw_only=True)
class WatchCommandOptions(MemberOptions):
    resource: Annotated[
        str, typer.Option("--resource", metavar="NAMES", help=f"Comma-separated: {', '.join(RESOURCES)}. All if left away.")
    ] = ""
    from_revision: Annotated[
        int | None, typer.Option("--from", metavar="REVISION", min=0, help="Show what came after it. From now on if left away.")
    ] = None
    count: Annotated[int, typer.Option("--count", metavar="N", min=0, help="End after N revisions; 0 goes on for ever.")] = 0


def _watch(options: WatchCommandOptions) -> int:
    """Print every change as it is committed, in order and without gaps, over lost connections and killed leaders."""
    resources = [name for name in options.resource.split(",") if name]
    unknown = [name for name in resources if name not in RESOURCES]
    if unknown:
        raise UsageFault(
            f"{unknown[0]!r} is no resource", f"known: {', '.join(RESOURCES)}; for example: raftmeta watch --resource rollouts"
        )
    try:
        asyncio.run(_print_changes(options, resources))
    except KeyboardInterrupt:  # the usual way to end it
        return Exit.OK
    return Exit.OK


async def _print_changes(options: WatchCommandOptions, resources: list[str]) -> None:
    from raftmeta.client import Change

    seen = 0
    async with options.connect(_tell_reconnect) as client:
        start = options.from_revision
        if start is None:
            start = (await client.cluster()).revision
        async with aclosing(client.watch(start, resources)) as changes:
            async for item in changes:
                if not isinstance(item, Change):
                    continue
                _print_change(item, options.json)
                seen += 1
                if seen == options.count:
                    return


def _tell_reconnect(why: str) -> None:
    sys.stderr.write(f"reconnecting: {why}\n")


def _print_change(change: Change, as_json: bool) -> None:
    if as_json:
        events = [event._asdict() for event in change.events]
        sys.stdout.write(json.dumps({"revision": change.revision, "generation": change.generation, "events": events}) + "\n")
    else:
        for event in change.events:
            sys.stdout.write(output.printable(describe(change.revision, event)) + "\n")
    sys.stdout.flush()


def describe(revision: int, event: ChangeEvent) -> str:
    """One line: what became of which record."""
    value: dict[str, Any] = event.value or {}
    details = {
        "model": ("last_number", "version_count"),
        "version": ("number", "checksum"),
        "deployment": ("version", "previous", "rollout_id", *(("serving_side",) if value.get("failover") else ())),
        "rollout": ("deployment", "to_version", "phase", "status"),
        "verdict": ("verdict",),
        "evidence": ("version", "checksum", "vector_from", "finding", "boot_id"),
    }.get(event.kind, ())
    shown = " ".join(f"{name}={value[name]}" for name in details if value.get(name) not in (None, ""))
    return f"{revision:>8}  {event.kind:<10} {event.key}  {'deleted' if event.op == 'delete' else shown}".rstrip()


main = command("watch", WatchCommandOptions, _watch)
