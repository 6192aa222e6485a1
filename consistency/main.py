"""`raftmeta check`: compare what the memory of primary and standby holds, with what was published and with each other.

Made for cron: exit status 0 consistent, 1 diverged, 2 incomplete, 3 for a wrong command line; nothing else is ever called consistent. The
verdict of each deployment is recorded with the members, so that `raftmeta status` and the API show when the last proof was made. Runs of
one user against the same members exclude each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from consistency import files, lock, outcome, report
from consistency.agents import HttpAgents
from consistency.collect import Checker, Members, NotDeclared
from consistency.findings import ALL, DIVERGED, MAJORITY, Limits
from consistency.node_http import HttpOptions
from consistency.outcome import Changes, Fault, Outcome
from consistency.recording import record
from consistency.watching import stopped_by_signals, watch
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault, exit_code, hint
from raftmeta.cli.program import MemberOptions, command
from raftmeta.client.config import resolve, runtime_dir
from raftmeta.core.errors import RaftmetaError

WATCH_S = 60.0  # what --watch means without a number


class _NotPrinted(Exception):
    """Nobody can be told what came out."""

    def __init__(self, made: Outcome, cause: OSError) -> None:
        super().__init__(f"the outcome ({made.verdict}) could not be printed: {cause.strerror or cause}")
        # Its exit status is all that the caller gets: a difference that was seen is told, and nothing else is a pass.
        self.exit_status = Exit.NO if made.verdict == DIVERGED else Exit.UNAVAILABLE


@dataclass(frozen=True, kw_only=True)
class CheckOptions(MemberOptions):
    name: Annotated[str | None, typer.Argument(metavar="[DEPLOYMENT]", help="Only this one; all of them without it.")] = None
    deployment: Annotated[list[str] | None, typer.Option("--deployment", metavar="DEPLOYMENT", help="The same; repeat for more.")] = None
    every: Annotated[bool, typer.Option("--all", help="All deployments that serve something; also what no name means.")] = False
    node_timeout: Annotated[
        float, typer.Option("--node-timeout", metavar="SECONDS", min=0.1, max=3600, help="For each question to a node.")
    ] = 60.0
    max_age: Annotated[
        float | None,
        typer.Option(
            "--max-age", metavar="SECONDS", min=0, max=2_592_000, help="Take a node's last reading of its memory if it is this young."
        ),
    ] = None
    quorum: Annotated[
        str, typer.Option("--quorum", metavar="N|majority|all", help="How many nodes of a side must be seen; the others are listed.")
    ] = ALL
    deep: Annotated[bool, typer.Option("--deep", help="Compare the SHA-256 of every tensor in memory too. Slow.")] = False
    lag_limit: Annotated[
        float, typer.Option("--lag-limit", metavar="MS", min=0, help="How far the mean version lags of the sides may be apart.")
    ] = 200.0
    watch: Annotated[
        float | None,
        typer.Option("--watch", metavar="[SECONDS]", min=1, max=86_400, help=f"Check again every so often ({WATCH_S:g}), print changes."),
    ] = None
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit report too.")] = None
    prometheus: Annotated[
        Path | None, typer.Option("--prometheus", metavar="FILE", help="Write a page for the textfile collector too; name it *.prom.")
    ] = None
    lock: Annotated[Path | None, typer.Option("--lock", metavar="FILE", help="Exclude other runs by this file.")] = None
    record: Annotated[bool, typer.Option("--record/--no-record", help="Keep the verdict with the members.")] = True

    @property
    def limits(self) -> Limits:
        return Limits(self.lag_limit, self.quorum, None if self.max_age is None else round(self.max_age * 1000), self.deep)


def _check(options: CheckOptions) -> int:
    """Compare the memory of both sides of a deployment with each other and with what was published.

    Every node computes the weight-consistency vector from the memory it serves from. Exit status: 0 consistent; 1 diverged, with node,
    tensor and block; 2 incomplete, for instance when a node did not answer, a switch is in progress, or another check runs; 3 wrong command
    line. For cron:

    */5 * * * *  raftmeta check --all --json >> /var/log/raftmeta-check.jsonl
    """
    try:
        return _alone(options)
    except _NotPrinted as lost:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {lost}\n")
        return lost.exit_status


def _alone(options: CheckOptions) -> int:
    names = _names(options)
    try:
        path = options.lock or lock.path_for(runtime_dir(), resolve(options.url or (), options.config).urls)
        _require_apart(options, path)
        with lock.held(path):
            return asyncio.run(_repeatedly(options, names)) if options.watch is not None else _once(options, names)
    except lock.CheckRunning as running:
        _print(options, Outcome((), fault=Fault(running.code, str(running), "wait for it, or end it")))
        return Exit.UNAVAILABLE
    except RaftmetaError as error:  # of the command line or its files: an earlier report must not go on saying that all is well
        _write_files(options, _faulty(Fault(error.code, error.detail, hint(error))))
        raise


def _once(options: CheckOptions, names: list[str]) -> int:
    with output.Progress(quiet=options.json) as progress:
        made = asyncio.run(_round(options, names, progress))
    _write_files(options, made)
    _print(options, made)
    return made.exit_status


async def _repeatedly(options: CheckOptions, names: list[str]) -> int:
    changes = Changes()

    def tell(made: Outcome) -> None:
        _write_files(options, made)
        if not options.json:
            _say(changes.text(made, _width()), made)
        elif any(changes.of(made)):
            _say(output.json_text(outcome.as_json(made)) + "\n", made)

    with stopped_by_signals() as stop, output.Progress(quiet=True) as progress:
        assert options.watch is not None
        return await watch(lambda: _round(options, names, progress), options.watch, tell, stop)


async def _round(options: CheckOptions, names: list[str], progress: output.Progress) -> Outcome:
    """Raises RaftmetaError when the command line is wrong; everything else that keeps it from a verdict is one."""
    began = time.monotonic()
    try:
        made = await _work(options, names, progress)
    except RaftmetaError as error:
        if exit_code(error) is Exit.USAGE:
            raise
        made = _faulty(Fault(error.code, error.detail, hint(error)))
    except Exception as defect:  # noqa: BLE001 the outermost frame of a round: reports have to say that there is no verdict
        with contextlib.suppress(OSError):
            sys.stderr.write("".join(output.printable(line) + "\n" for line in traceback.format_exc().splitlines()))
        made = _faulty(Fault("internal", f"{type(defect).__name__}: {defect}", "please report this with the lines on standard error"))
    took_s = time.monotonic() - began
    return replace(made, duration_s=took_s, completed_ms=time.time_ns() // 1_000_000)


def _faulty(fault: Fault) -> Outcome:
    return Outcome((), completed_ms=time.time_ns() // 1_000_000, fault=fault)


async def _work(options: CheckOptions, names: list[str], progress: output.Progress) -> Outcome:
    connection = resolve(options.url or (), options.config)
    agent_options = HttpOptions(token=connection.token(), ca_file=connection.ca_file, timeout_s=options.node_timeout)
    async with options.connect(progress.say) as client, HttpAgents(agent_options) as agents:
        members: Members = client
        try:
            checker = Checker(members, agents, options.limits, progress.say, question_s=options.node_timeout)
            verdicts, given_s, idle = await checker.judged(names)
        except NotDeclared:
            raise
        except RaftmetaError as error:  # of the members, whatever they call it: the command line is not at fault
            return _faulty(Fault(error.code, error.detail, hint(error)))
        return Outcome(tuple(verdicts), await record(client, verdicts, given_s) if options.record else (), idle=idle)


def _print(options: CheckOptions, made: Outcome) -> None:
    indent = 2 if sys.stdout.isatty() else None
    _say(output.json_text(outcome.as_json(made), indent) + "\n" if options.json else outcome.as_text(made, _width()), made)


def _width() -> int:
    """Of the terminal; a file has none, and gets the same on every machine."""
    return shutil.get_terminal_size((report.WIDTH, 24)).columns if sys.stdout.isatty() else report.WIDTH


def _say(text: str, made: Outcome) -> None:
    """Raises _NotPrinted. Nothing that was not taken stays behind, for whoever ends the process would try to write it once more."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as cause:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _NotPrinted(made, cause) from cause


def _write_files(options: CheckOptions, made: Outcome) -> None:
    for path, form in ((options.junit, outcome.as_junit), (options.prometheus, outcome.as_textfile)):
        why = "" if path is None else files.replace(path, form(made))
        if why:
            typer.echo(f"not written: {why}", err=True)


def _names(options: CheckOptions) -> list[str]:
    """Raises UsageFault or RaftmetaError for anything that contradicts itself, before anybody is asked."""
    if not math.isfinite(options.lag_limit):
        raise UsageFault(f"--lag-limit is {options.lag_limit}", "give a number of milliseconds")
    names = list(dict.fromkeys([*([options.name] if options.name else []), *(options.deployment or [])]))
    if names and options.every:
        raise UsageFault(f"--all and {names[0]!r} contradict each other", "name deployments, or give --all, or neither for all")
    number = options.quorum if options.quorum.isascii() and options.quorum.isdigit() and len(options.quorum) < 7 else "0"
    if options.quorum not in (ALL, MAJORITY) and int(number) < 1:
        raise UsageFault(f"--quorum is {options.quorum!r}", "give a number from 1, or majority, or all")
    for path, option in ((options.junit, "--junit"), (options.prometheus, "--prometheus")):
        if path is not None:
            files.require_writable(path, option)
    return names


def _require_apart(options: CheckOptions, lock_file: Path) -> None:
    """A report that is put in the place of the lock would let the next run begin beside this one. Raises UsageFault."""
    taken = {lock_file.resolve(): "the lock"}
    for path, option in ((options.junit, "--junit"), (options.prometheus, "--prometheus")):
        if path is not None and (what := taken.setdefault(path.resolve(), option)) is not option:
            raise UsageFault(f"{option} {path} is the file of {what}", "give each a file of its own")


_run = command("check", CheckOptions, _check)


def main(argv: Sequence[str]) -> int:
    return _run(with_seconds(argv))


def with_seconds(argv: Sequence[str]) -> list[str]:
    """`--watch` takes a number or none, which the parser of the command line does not know."""
    words: list[str] = []
    for at, word in enumerate(argv):
        words.append(word)
        if word == "--watch" and not _is_number(argv[at + 1] if at + 1 < len(argv) else ""):
            words.append(f"{WATCH_S:g}")
    return words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
