"""`raftmeta deploy`, `activate`, `rollback`, `abort`: the commands that change what serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftmeta.cli import output, placement
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import MemberOptions, command
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import DrainOverdue

if TYPE_CHECKING:  # httpx costs 100 ms that `--help` must not pay
    from raftmeta.client import Client, Reply


@dataclass(frozen=True, kw_only=True)
class DeployOptions(MemberOptions):
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name under which the model serves.")]
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="The model; fixed while the deployment serves a version.")]
    primary: Annotated[str, typer.Option("--primary", metavar="ZONE:NODE[,NODE…]", help="Zone and nodes of the primary side.")]
    standby: Annotated[str | None, typer.Option("--standby", metavar="ZONE:NODE[,NODE…]", help="The same for the standby.")] = None
    drain_s: Annotated[
        float | None,
        typer.Option("--drain-s", metavar="SECONDS", min=1, help="How long requests may keep a slot that is to be rewritten; else 60."),
    ] = None
    drain_overdue: Annotated[
        DrainOverdue | None,
        typer.Option("--drain-overdue", help="Wait on for them then, or cancel them, each answered with 503; else wait."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WaitOptions(MemberOptions):
    expect: Annotated[
        str | None, typer.Option("--expect", metavar="VERSION", help='Refuse unless this version serves now; "" before the first.')
    ] = None
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the rollout to its end.")] = True
    wait_s: Annotated[
        float, typer.Option("--wait-s", metavar="SECONDS", min=0, help="How long to follow it, also over members that are away.")
    ] = 900.0


@dataclass(frozen=True, kw_only=True)
class ActivateOptions(WaitOptions):
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT")]
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Label of a published version.")]


@dataclass(frozen=True, kw_only=True)
class RollBackOptions(WaitOptions):
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT")]


@dataclass(frozen=True, kw_only=True)
class AbortOptions(MemberOptions):
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT")]


def _deploy(options: DeployOptions) -> int:
    """Declare under which name, in which zones and on which nodes a model serves. Declaring it again replaces the nodes and the policy."""
    body: dict[str, Any] = {
        "model": options.model,
        "primary": parse_side("--primary", options.primary),
        "standby": None if options.standby is None else parse_side("--standby", options.standby),
    }
    policy = _policy(options)
    if policy:
        body["policy"] = policy

    async def work() -> tuple[Reply, list[str]]:
        async with options.connect() as client:
            reply = await client.declare_deployment(options.name, body)
            return reply, [] if options.json else await _notes(client, body)

    reply, notes = asyncio.run(work())
    if options.json:
        output.print_json(dict(reply))
    else:
        next_step = "" if reply.get("version") else f"; next: raftmeta activate {options.name} VERSION"
        lines = [f"deployment {options.name} declared at revision {reply.revision}{next_step}", *(f"note: {note}" for note in notes)]
        output.console().print("\n".join(lines), markup=False, soft_wrap=True)
    return Exit.OK


async def _notes(client: Client, body: Mapping[str, Any]) -> list[str]:
    """The declaration stands, whatever is found here."""
    try:
        items = (await client.nodes())["items"]
    except RaftmetaError as error:
        return [f"whether its nodes are there is not known: {error}"]
    return placement.of_deployment(body, {item["node"]: item["zone"] for item in items})


def _policy(options: DeployOptions) -> dict[str, Any]:
    """What was given of it; the members know the rest."""
    given: dict[str, Any] = {}
    if options.drain_s is not None:
        given["drain_timeout_ms"] = round(options.drain_s * 1000)
    if options.drain_overdue is not None:
        given["drain_overdue"] = options.drain_overdue.value
    return given


def parse_side(option: str, text: str) -> dict[str, Any]:
    """ "ZONE:NODE,NODE" as the API wants it: nodes sorted, each once."""
    zone, colon, nodes_text = text.partition(":")
    nodes = [node.strip() for node in nodes_text.split(",")]
    if not zone or not colon or not all(nodes):
        raise UsageFault(f"{option} is {text!r}, expected ZONE:NODE or ZONE:NODE,NODE", f"for example: {option} a:node-a1,node-a2")
    if len(set(nodes)) != len(nodes):
        raise UsageFault(f"{option} names a node twice: {text!r}", f"for example: {option} a:node-a1,node-a2")
    return {"zone": zone, "nodes": sorted(nodes)}


def _activate(options: ActivateOptions) -> int:
    """Move a deployment to a published version, on both sides, and follow the rollout to its end.

    Exit code 0 when every node serves it, 1 when it was refused or failed (the old version keeps serving), 2 when --wait-s passed
    first or no member answered until then: the rollout goes on, and `raftmeta status` shows it.
    """
    return _roll(options, lambda client: client.activate(options.deployment, options.version, options.expect))


def _rollback(options: RollBackOptions) -> int:
    """Move a deployment back to its previous version. Where its slot is untouched this flips a pointer and copies nothing.

    Given twice it goes forward again, since the previous version is then the one that was left: `--expect VERSION`, with the version that
    is to be left, makes it safe to repeat.
    """
    return _roll(options, lambda client: client.rollback(options.deployment, options.expect))


def _roll(options: WaitOptions, start: Callable[[Client], Awaitable[Reply]]) -> int:
    from raftmeta.cli.follow import Teller, cost_rows, failure_text, follow

    async def work(progress: output.Progress) -> Reply:
        teller = Teller(progress.say)
        async with options.connect(teller.away) as client:
            started = await start(client)
            return await follow(client, started, options.wait_s, teller.step) if options.wait else started

    with output.Progress(quiet=options.json) as progress:
        reply = asyncio.run(work(progress))
    failed = reply.get("status") == "failed"
    if options.json:
        output.print_json(dict(reply))
    elif not options.wait:
        output.console().print(f"rollout {reply['rollout_id']} started; `raftmeta status` shows it", markup=False)
    elif failed:
        output.console().print(
            f"failed: {failure_text(reply)}; {reply['from_version'] or 'nothing'} keeps serving", style="red", markup=False
        )
    else:
        seconds = (reply["ended_ms"] - reply["started_ms"]) / 1000
        output.console().print(f"{reply['deployment']} serves {reply['to_version']} on every node after {seconds:.2f} s", markup=False)
        columns = ("NODE", "SIDE", "STAGE", "FETCHED B", "READ B", "FROM ACTIVE B", "KEPT B", "SWITCH us")
        output.console().print(output.table(columns, cost_rows(reply)))
        if reply.get("kind") == "rollback":
            left = reply["from_version"]
            told = f"once more goes forward to {left}; `raftmeta rollback {reply['deployment']} --expect {left}` is refused from now on"
            output.console().print(told, markup=False)
    return Exit.NO if failed else Exit.OK


def _abort(options: AbortOptions) -> int:
    """Abort the running rollout of a deployment. Refused once the switch is decided; then roll back instead."""

    async def work() -> tuple[str, Reply]:
        async with options.connect() as client:
            deployment = await client.get_deployment(options.deployment)
            rollout_id = deployment["rollout_id"]
            if not rollout_id:
                raise UsageFault(f"{options.deployment} never had a rollout", "`raftmeta status` shows where it stands")
            return rollout_id, await client.abort_rollout(rollout_id)

    rollout_id, reply = asyncio.run(work())
    if options.json:
        output.print_json(dict(reply))
    else:
        output.console().print(f"rollout {rollout_id} aborted; the version that served keeps serving", markup=False)
    return Exit.OK


deploy = command("deploy", DeployOptions, _deploy)
activate = command("activate", ActivateOptions, _activate)
rollback = command("rollback", RollBackOptions, _rollback)
abort = command("abort", AbortOptions, _abort)
