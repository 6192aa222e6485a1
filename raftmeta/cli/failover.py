"""`raftmeta failover`: which side of a deployment takes its requests. Exit code 1 when a precondition does not hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import MemberOptions, command
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.failover import OF_THE_VERDICT
from raftmeta.core.naming import named
from raftmeta.core.types import SideName

if TYPE_CHECKING:  # httpx costs 100 ms that `--help` must not pay
    from raftmeta.client import Client

_TAKE_OUT = "take what is gone for good out of its side with `raftmeta deploy NAME …`"
_LOOK = "`raftmeta evidence NAME` shows what each node serves"
_HINTS = {  # by what speaks against it; those of the verdict depend on who is heard. NAME is the deployment
    "rollout_running": "wait for the rollout (`raftmeta status NAME`), or end it with `raftmeta abort NAME`, then repeat this",
    "side_absent": "`raftmeta deploy NAME … --standby ZONE:NODES` declares a standby side",
    "side_serves_already": "nothing to do: that side takes the requests already",
    "serving_side_differs": "somebody else decided meanwhile; look with `raftmeta status NAME`, then decide again",
    "nothing_decided": "`raftmeta activate NAME VERSION` lets a version serve first; `raftmeta versions` lists them",
    "node_unproven": f"it says so once it serves; {_LOOK}",
    "node_serves_other_bytes": f"{_LOOK}; `raftmeta status NAME` whether it is still on its way there",
    "node_silent": f"`raftmeta agent --config FILE` starts it again, or {_TAKE_OUT}; --force does not help here",
    "node_restarted": f"it says what it serves within seconds of its start; {_LOOK}, then repeat this",
    "node_not_ready": "`raftmeta status NAME` shows READY yes once it is; `raftmeta agent inspect` on its machine says what it waits for",
}


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

    async def work() -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        async with options.connect() as client:
            seen = dict(await client.preview_failover(options.deployment, to.value, round(options.max_verdict_age * 1000)))
            decided = {} if options.dry_run else await _decide(client, options, seen)
            return seen, decided, [] if decided else await _hints(client, options, seen)

    seen, decided, hints = asyncio.run(work())
    allowed = bool(decided.get("serving_side")) or (options.dry_run and _allowed(seen, options.force))
    if options.json:
        output.print_json({**seen, "dry_run": options.dry_run, "forced": options.force, "decided": decided or None, "hints": hints})
    else:
        _print(options, seen, decided, hints)
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


async def _hints(client: Client, options: FailoverOptions, seen: dict[str, Any]) -> list[str]:
    """What to do about everything that stands against it."""
    standing = [str(reason["code"]) for reason in seen["reasons"] if not (reason["yields"] and options.force)]
    silent: list[str] = []
    if set(standing) & set(OF_THE_VERDICT):
        try:
            nodes = (await client.evidence(options.deployment))["nodes"]
            silent = [str(node["node"]) for node in nodes if node["standing"] == "silent"]
        except RaftmetaError:  # the hints are of less use without it, and the refusal stands
            pass
    return hints_for(standing, options.deployment, silent)


def hints_for(codes: Sequence[str], name: str, silent: Sequence[str] = ()) -> list[str]:
    """One for each thing to do. `silent`: nodes of either side that are not heard, without which no check is consistent."""
    found = [_about_verdict(name, silent)] if set(codes) & set(OF_THE_VERDICT) else []
    found += [_HINTS.get(code, "`raftmeta status` shows where it stands") for code in codes if code not in OF_THE_VERDICT]
    return list(dict.fromkeys(output.printable(hint.replace("NAME", name)) for hint in found))


def _about_verdict(name: str, silent: Sequence[str]) -> str:
    if not silent:
        return "`raftmeta check NAME` compares the sides and says what differs; repeat this once it is consistent; --force goes without one"
    is_or_are = "is silent" if len(silent) == 1 else "are silent"
    return f"{named(silent)} {is_or_are}, so that no check can be consistent: --force goes without a verdict, or {_TAKE_OUT}, then check"


def _print(options: FailoverOptions, seen: dict[str, Any], decided: dict[str, Any], hints: Sequence[str]) -> None:
    out = output.console()
    would = "would be " if options.dry_run else ""
    overridden = [reason for reason in seen["reasons"] if reason["yields"] and options.force]
    against = [reason for reason in seen["reasons"] if reason not in overridden]
    for heading, reasons in ((f"{would}refused because:", against), ("overridden by --force:", overridden)):
        if reasons:
            out.print(heading, markup=False)
            out.print(output.table(("  CODE", "FOUND"), [("  " + item["code"], output.printable(item["detail"])) for item in reasons]))
    what = f"{seen['deployment']} {seen['version'] or '(nothing activated)'}: {seen['serving_side']} -> {seen['to']}"
    if decided:
        out.print(
            f"{what} decided at revision {decided['order_revision']}; the {decided['serving_side']} side takes requests", markup=False
        )
    elif options.dry_run and _allowed(seen, options.force):
        out.print(f"{what} would be decided; nothing was changed", markup=False)
    else:
        out.print(f"{what} {would}refused, nothing was changed", style="red", markup=False)
        for hint in hints:
            out.print(f"hint:  {hint}", markup=False)


main = command("failover", FailoverOptions, _failover)
