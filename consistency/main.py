"""`raftmeta check`: compare what the memory of primary and standby holds, with what was published and with each other.

Made for cron: exit status 0 consistent, 1 diverged, 2 incomplete, 3 for a wrong command line; nothing else is ever called consistent. The
verdict of each deployment is recorded with the members, so that `raftmeta status` and the API show when the last proof was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import typer

from consistency import report
from consistency.agents import AgentOptions, HttpAgents
from consistency.collect import Checker, Members
from consistency.findings import EXIT_STATUS, INCOMPLETE, Limits, Verdict, worst
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault, exit_code, hint
from raftmeta.cli.program import MemberOptions, command
from raftmeta.client import Reply
from raftmeta.client.config import resolve
from raftmeta.core.errors import RaftmetaError


@dataclass(frozen=True, kw_only=True)
class CheckOptions(MemberOptions):
    name: Annotated[str | None, typer.Argument(metavar="[DEPLOYMENT]", help="Only this one; all of them without it.")] = None
    deployment: Annotated[list[str] | None, typer.Option("--deployment", metavar="DEPLOYMENT", help="The same; repeat for more.")] = None
    every: Annotated[bool, typer.Option("--all", help="All deployments; also what no name means.")] = False
    node_timeout: Annotated[
        float, typer.Option("--node-timeout", metavar="SECONDS", min=0.1, max=3600, help="For each question to a node.")
    ] = 60.0
    lag_limit: Annotated[
        float, typer.Option("--lag-limit", metavar="MS", min=0, help="How far the mean version lags of the sides may be apart.")
    ] = 200.0
    record: Annotated[bool, typer.Option("--record/--no-record", help="Keep the verdict with the members.")] = True


class Recorder(Protocol):
    async def record_verdict(self, deployment: str, verdict: str, report: Mapping[str, Any], /) -> Reply: ...


@dataclass(frozen=True)
class Outcome:
    verdicts: tuple[Verdict, ...]
    not_recorded: tuple[str, ...]  # "deployment: why"

    @property
    def verdict(self) -> str:
        return worst([item.verdict for item in self.verdicts])


def _check(options: CheckOptions) -> int:
    """Compare the memory of both sides of a deployment with each other and with what was published.

    Every node computes the weight-consistency vector from the memory it serves from. Exit status: 0 consistent; 1 diverged, with node,
    tensor and block; 2 incomplete, for instance when a node did not answer or a switch is in progress; 3 wrong command line. For cron:

    */5 * * * *  raftmeta check --all --json >> /var/log/raftmeta-check.jsonl
    """
    names = _names(options)
    try:
        with output.Progress(quiet=options.json) as progress:
            outcome = asyncio.run(_work(options, names, progress))
    except RaftmetaError as error:
        if exit_code(error) is Exit.USAGE:
            raise
        return _failed(options, error)
    if options.json:
        output.print_json(as_json(outcome))
    else:
        output.console().print(as_text(outcome), markup=False, end="", soft_wrap=True)
    return EXIT_STATUS[outcome.verdict]


async def _work(options: CheckOptions, names: list[str], progress: output.Progress) -> Outcome:
    connection = resolve(options.url or (), options.config)
    agent_options = AgentOptions(token=connection.token(), ca_file=connection.ca_file, timeout_s=options.node_timeout)
    async with options.connect(progress.say) as client, HttpAgents(agent_options) as agents:
        members: Members = client
        checker = Checker(members, agents, Limits(options.lag_limit), progress.say)
        verdicts = await checker.check(names)
        return Outcome(tuple(verdicts), await record(client, verdicts) if options.record else ())


async def record(recorder: Recorder, verdicts: list[Verdict]) -> tuple[str, ...]:
    """Why verdicts could not be recorded. The verdict stands even then."""
    failed: list[str] = []
    for item in verdicts:
        try:
            await recorder.record_verdict(item.deployment, item.verdict, report.for_record(item))
        except RaftmetaError as error:
            failed.append(f"{item.deployment}: {error}")
    return tuple(failed)


def as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "verdict": outcome.verdict,
        "exit": EXIT_STATUS[outcome.verdict],
        "deployments": [report.as_json(item) for item in outcome.verdicts],
        "not_recorded": list(outcome.not_recorded),
    }


def as_text(outcome: Outcome) -> str:
    parts = [report.as_text(item) for item in outcome.verdicts]
    if len(parts) > 1:
        parts.append("".join(report.summary(item) + "\n" for item in outcome.verdicts))
    if not parts:
        parts.append("no deployment is declared, so nothing was compared\n")
    parts += [f"not recorded: {output.printable(why)}\n" for why in outcome.not_recorded]
    return "\n".join(parts)


def _names(options: CheckOptions) -> list[str]:
    names = list(dict.fromkeys([*([options.name] if options.name else []), *(options.deployment or [])]))
    if names and options.every:
        raise UsageFault(f"--all and {names[0]!r} contradict each other", "name deployments, or give --all, or neither for all")
    return names


def _failed(options: CheckOptions, error: RaftmetaError) -> int:
    """Members that cannot be asked leave the check incomplete: 1 is kept for a difference that was seen."""
    if options.json:
        told = {"code": error.code, "detail": error.detail, "hint": hint(error)}
        output.print_json({"verdict": INCOMPLETE, "exit": int(Exit.UNAVAILABLE), "deployments": [], "not_recorded": [], "error": told})
    else:
        text = f"INCOMPLETE: {output.printable(error.detail)} ({error.code})\nhint:  {hint(error)}\n"
        output.console().print(text, markup=False, end="", soft_wrap=True)
    return Exit.UNAVAILABLE


main = command("check", CheckOptions, _check)
