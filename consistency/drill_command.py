"""`raftmeta drill side-failover`: lets the other side of a deployment serve and back again, under requests, and measures what they see.

It decides what `raftmeta failover` decides, twice, each time after a check, and nothing is forced: what speaks against it ends the drill.
However it ends, also by Ctrl-C or SIGTERM, it goes back to the side that served before, or says who serves and how to go back. Requests
come from this machine, at a low rate, with one retry on the other side, as a router would send them.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from consistency import drill, files
from consistency.agents import HttpAgents
from consistency.collect import Checker
from consistency.drill import Drill
from consistency.drill_moves import Rehearsal, side_of
from consistency.drill_run import OTHER, Load
from consistency.findings import CONSISTENT, Limits
from consistency.live_agents import LiveAgents
from consistency.node_http import HttpOptions, NodeHttp
from consistency.recording import record
from consistency.two_sides import QuestionOptions, capacity_if_told, manifest_of, questions_for, seen_by_members
from consistency.watching import stopped_by_signals
from raftmeta.cli import output
from raftmeta.cli.exits import Exit
from raftmeta.cli.program import command
from raftmeta.client.config import resolve
from raftmeta.core.errors import RaftmetaError

if TYPE_CHECKING:
    from raftmeta.client import Client

MAX_RATE = 20.0  # requests a second, without --rate
LEAST_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class DrillOptions(QuestionOptions):
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            metavar="REQUESTS",
            min=0.1,
            max=10_000,
            help=f"A second; without it half of what the smaller side answers by its nodes' counts, at most {MAX_RATE:g}.",
        ),
    ] = None
    steady: Annotated[
        float, typer.Option("--steady", metavar="SECONDS", min=1, max=3600, help="Before, between and after the fail-overs.")
    ] = 5.0
    stay: Annotated[bool, typer.Option("--stay", help="Do not go back: the other side serves from then on.")] = False
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the figures there as JSON.")] = None


def _drill(options: DrillOptions) -> int:
    """Rehearse a fail-over under requests: to the side that does not serve, and back.

    It loads the nodes that serve, beside the requests of others: with more than they take, others wait or are refused as well.

    Exit status: 0 no request was lost after its one retry, the other side answered, and every node of the old side refused; 1 something of
    that does not hold, a fail-over was refused, or it was interrupted; 2 the members or nodes cannot be reached; 3 wrong command line.
    """
    if options.report is not None:
        files.require_writable(options.report, "--report")
    with output.Progress(quiet=options.json) as progress:
        made = asyncio.run(_work(options, progress))
    if made.trouble:
        typer.echo(f"{options.deployment}: {output.printable(made.trouble)}", err=True)
    if options.json:
        output.print_json(drill.as_json(made))
    else:
        output.console().print(drill.as_text(made), markup=False, end="", soft_wrap=True)
    if options.report is not None:
        why = files.replace(options.report, msgspec.json.format(msgspec.json.encode(drill.as_json(made)), indent=2) + b"\n")
        if why:
            typer.echo(f"not written: {why}", err=True)
            return Exit.NO
    return Exit.OK if made.holds else Exit.NO


async def _work(options: DrillOptions, progress: output.Progress) -> Drill:
    connection = resolve(options.url or (), options.config)
    http = HttpOptions(token=connection.token(), ca_file=connection.ca_file, timeout_s=options.node_timeout, max_at_once=256)
    async with options.connect(progress.say) as client, NodeHttp(http) as nodes, HttpAgents(http) as checked:
        agents = LiveAgents(nodes, options.node_timeout, probes=False)
        deployment, sides = await seen_by_members(client, options.deployment)
        serving = side_of(await client.get_deployment(options.deployment))
        manifest = await manifest_of(client, deployment.model, deployment.version)
        questions, _ = await questions_for(options, sides, agents, manifest)
        urls = {"primary": sides.primary, "standby": sides.standby}
        require = _Preconditions(client, options, checked, progress).require
        await require(OTHER[serving])
        first = next(questions)
        capacity = await capacity_if_told(sides, LiveAgents(nodes, options.node_timeout, probes=True), first, options.rate)
        rate = rate_of(options.rate, capacity)
        progress.say(output.printable(f"{options.deployment}: {drill.load_text(rate, capacity)}"))
        load = Load(options.deployment, urls, agents, itertools.chain((first,), questions), rate, serving)

        def say(text: str) -> None:
            progress.say(output.printable(text))

        rehearsal = Rehearsal(client, load, serving, require, say, options.steady, _command_back(options, serving), options.stay)
        began_s = time.monotonic()
        with stopped_by_signals() as stop:
            trouble = await rehearsal.run(stop)
        assert deployment.standby is not None
        nodes_of = {"primary": deployment.primary.nodes, "standby": deployment.standby.nodes}
        moves = tuple(rehearsal.moves)
        ended_s, serves = time.monotonic(), await _serves(client, options.deployment)
        asked = tuple(load.asked)
        return Drill(deployment.name, deployment.model, rate, began_s, ended_s, asked, moves, nodes_of, trouble, capacity, serves)


def rate_of(asked_for: float | None, capacity: float) -> float:
    """Requests a second. Half of the capacity leaves as much to those whom the side serves."""
    return asked_for or min(MAX_RATE, max(LEAST_RATE, capacity / 2))


async def _serves(client: Client, name: str) -> str:
    """The side, "" when the members do not say."""
    try:
        return side_of(await client.get_deployment(name))
    except RaftmetaError:
        return ""


def _command_back(options: DrillOptions, to: str) -> str:
    where = [word for url in options.url or () for word in ("--url", url)]
    where += [] if options.config is None else ["--config", str(options.config)]
    check = shlex.join(["raftmeta", "check", options.deployment, *where])
    return f"{check} && {shlex.join(['raftmeta', 'failover', options.deployment, '--to', to, *where])}"


@dataclass
class _Preconditions:
    """Each fail-over rests on a check of its own: the one before is of an order that is no longer current."""

    client: Client
    options: DrillOptions
    agents: HttpAgents
    progress: output.Progress

    async def require(self, to: str) -> None:
        """Raises RaftmetaError failover_refused with all that speaks against it, or what the check found."""
        name = self.options.deployment
        checker = Checker(self.client, self.agents, Limits(), self.progress.say, question_s=self.options.node_timeout)
        (verdict,), given_s, _ = await checker.judged([name])
        unrecorded = await record(self.client, [verdict], given_s)
        if verdict.verdict != CONSISTENT or unrecorded:
            found = "; ".join(unrecorded) or f"{verdict.verdict}, `raftmeta check {name}` says why"
            raise RaftmetaError("failover_refused", f"the check before it: {found}")
        seen: Mapping[str, Any] = await self.client.preview_failover(name, to)
        if not seen["allowed"]:
            raise RaftmetaError("failover_refused", "; ".join(str(reason["detail"]) for reason in seen["reasons"]))


main = command("drill side-failover", DrillOptions, _drill)
