"""`raftmeta failover`: which side of a deployment takes its requests. Exit code 1 when a precondition does not hold."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import MemberOptions, command
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import SideName

if TYPE_CHECKING:  # httpx costs 100 ms that `--help` must not pay
    from raftmeta.client import Client


@dataclass(frozen=True, kw_only=True)
class FailoverOptions(MemberOptions):
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT")]
    to: Annotated[SideName | None, typer.Option("--to", help="The side that takes requests from here on.")] = None
    back: Annotated[bool, typer.Option("--back", help="The same as --to primary.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what speaks against it, and decide nothing.")] = False
    max_verdict_age: Annotated[
        float, typer.Option("--max-verdict-age", metavar="SECONDS", min=0, max=86_400 * 365, help="How old the last verdict may be.")
    ] = 300.0
    force: Annotated[
        bool, typer.Option("--force", help="Whatever the last verdict is; nothing else is overridden, and it is recorded.")
    ] = False


def _failover(options: FailoverOptions) -> int:
    """Let the other side of a deployment take its requests, as one decision that the agents of both sides obey.

    Nothing is decided unless no rollout runs, the last verdict is `consistent`, of the current order and nodes, and young enough, and every
    node of that side is heard and serves the decided bytes by its own word. Exit code 0 when it is decided (with --dry-run: would be), 1
    when something speaks against it, all of which is listed. A node that is gone for good is taken out with `raftmeta deploy` first.
    """
    to = _side(options)

    async def work() -> tuple[dict[str, Any], dict[str, Any]]:
        async with options.connect() as client:
            seen = dict(await client.preview_failover(options.deployment, to.value, round(options.max_verdict_age * 1000)))
            return seen, {} if options.dry_run else await _decide(client, options, seen)

    seen, decided = asyncio.run(work())
    allowed = bool(decided.get("serving_side")) or (options.dry_run and _allowed(seen, options.force))
    if options.json:
        output.print_json({**seen, "dry_run": options.dry_run, "forced": options.force, "decided": decided or None})
    else:
        _print(options, seen, decided)
    return Exit.OK if allowed else Exit.NO


async def _decide(client: Client, options: FailoverOptions, seen: dict[str, Any]) -> dict[str, Any]:
    """What was decided; {} when it was refused for what was seen. Raises RaftmetaError for anything else."""
    body = {
        "to": seen["to"],
        "expected_serving_side": seen["serving_side"],
        "max_verdict_age_ms": round(options.max_verdict_age * 1000),
        "force": options.force,
    }
    try:
        return dict(await client.fail_over(options.deployment, body))
    except RaftmetaError as error:
        if error.code != "failover_refused" or _allowed(seen, options.force):  # something changed since it was looked at
            raise
        return {}


def _side(options: FailoverOptions) -> SideName:
    if options.back and options.to not in (None, SideName.PRIMARY):
        raise UsageFault(f"--back and --to {options.to} contradict each other", "give one of them")
    if options.to is None and not options.back:
        raise UsageFault("which side is to take requests?", "give --to standby, or --back")
    return options.to or SideName.PRIMARY


def _allowed(seen: dict[str, Any], force: bool) -> bool:
    return bool(seen["allowed_with_force"] if force else seen["allowed"])


def _print(options: FailoverOptions, seen: dict[str, Any], decided: dict[str, Any]) -> None:
    out = output.console()
    rows = [(reason["code"], _weight(reason, options.force), output.printable(reason["detail"])) for reason in seen["reasons"]]
    if rows:
        out.print(output.table(("PRECONDITION", "STATE", "FOUND"), rows))
    what = f"{seen['deployment']} {seen['version'] or '(nothing activated)'}: {seen['serving_side']} -> {seen['to']}"
    if decided:
        out.print(
            f"{what} decided at revision {decided['order_revision']}; the {decided['serving_side']} side takes requests", markup=False
        )
    elif options.dry_run and _allowed(seen, options.force):
        out.print(f"{what} would be decided; nothing was changed", markup=False)
    else:
        out.print(f"{what} {'would be refused' if options.dry_run else 'refused'}, nothing was changed", style="red", markup=False)
        if seen["allowed_with_force"] and not options.force:
            name = seen["deployment"]
            out.print(f"hint:  `raftmeta check {name}` gives a new verdict, then repeat this; --force goes without one", markup=False)


def _weight(reason: dict[str, Any], force: bool) -> str:
    return "overridden" if reason["yields"] and force else "does not hold"


main = command("failover", FailoverOptions, _failover)
