"""Around the story: places for its files, the processes' lifetime, the screen, the claims, the report, and what to do next."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from raftmeta.cli import exits, output
from raftmeta.cli.demo import claims, places, report, screen
from raftmeta.cli.demo.errors import DemoError
from raftmeta.cli.demo.processes import Children
from raftmeta.cli.demo.story import DEPLOYMENT, Settings, Story
from raftmeta.core.errors import RaftmetaError

if TYPE_CHECKING:
    from raftmeta.cli.demo.command import DemoOptions

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # nothing here needs a network
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # threads that wait by spinning would take the time of everybody else on two cores
    "PYTHONUNBUFFERED": "1",
}


def run(options: DemoOptions, source: Path, name: str) -> int:
    """Tell the story and judge it. Everything that was started is ended when it returns."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the children are ended in order
    weights_bytes = sum(path.stat().st_size for path in source.rglob("*.safetensors"))
    console = Console(stderr=options.json, highlight=False)
    with places.work_directory(options.dir, weights_bytes) as directory, places.arena_directory(directory, weights_bytes) as arenas:
        settings = Settings(name, source, directory, arenas, options.steady_s)
        with Children(directory / "logs", ENVIRONMENT) as children:
            story = Story(settings, screen.choose(console), children)
            try:
                made = story.run()
            except (DemoError, RaftmetaError) as fault:
                return _stopped(options, console, fault, directory)
            held = _judge(options, console, story, made)
            if options.keep:
                _stay(console, story)
    return exits.Exit.OK if held else exits.Exit.NO


def _judge(options: DemoOptions, console: Console, story: Story, made: report.Report) -> bool:
    found = claims.evaluate(made)
    screen.print_claims(console, found)
    for line in story.failures():
        console.print(f"        {output.printable(line)}", style="red", markup=False, soft_wrap=True)
    held = all(claim.held for claim in found)
    latency, failover = made.latency_ms, made.failover
    console.print(
        f"\n{made.requests.sent} requests; p99 {latency.steady_p99:.0f} ms steady, {latency.during_p99:.0f} ms while switching; "
        f"writes paused for {failover.write_gap_ms:.0f} ms when {failover.killed} was killed; {made.seconds:.0f} s in all",
        markup=False,
        soft_wrap=True,
    )
    console.print("every claim held" if held else "NOT every claim held", style="bold green" if held else "bold red")
    rows = [(claim.claim, claim.held, claim.figure) for claim in found]
    if options.report is not None:
        report.write(options.report, made, rows)
    if options.json:
        output.print_json(report.to_json(made, rows))
    return held


def _stopped(options: DemoOptions, console: Console, fault: DemoError | RaftmetaError, directory: Path) -> int:
    """The story could not be told to its end: why, and where the logs are."""
    what = fault.what if isinstance(fault, DemoError) else str(fault)
    log = fault.log if isinstance(fault, DemoError) else ""
    (directory / places.STOPPED).write_text(f"{what}\n{log}\n", "utf-8")
    console.print(f"\nthe demo stopped: {output.printable(what)}", style="bold red", markup=False, soft_wrap=True)
    if log:
        console.print(log, markup=False, style="dim", soft_wrap=True)
    console.print(f"hint:  the whole logs are in {directory / 'logs'}", markup=False, soft_wrap=True)
    if options.json:
        output.print_json({"error": {"code": "demo_stopped", "detail": what, "hint": str(directory / "logs"), "exit": int(exits.Exit.NO)}})
    return exits.Exit.NO


def _stay(console: Console, story: Story) -> None:
    """Everything keeps running until Ctrl-C; what a reader may try meanwhile."""
    fleet = story.fleet
    agent, member = story.loads[0].target.url, fleet.connection().urls[0]
    reader, inference = fleet.token_file("reader"), fleet.token_file("inference")
    infer = '{"inputs":[{"name":"text","shape":[1],"datatype":"BYTES","data":["Which version answers this?"]}]}'
    lines = [
        "",
        "everything keeps running until Ctrl-C; in another terminal:",
        "",
        f"  export RAFTMETA_CLIENT_CONFIG={fleet.client_config}",
        f"  raftmeta status {DEPLOYMENT}",
        f"  raftmeta activate {DEPLOYMENT} v3",
        f"  raftmeta check {DEPLOYMENT}",
        "  raftmeta cluster status",
        f'  curl --cacert {fleet.ca_file} -H "Authorization: Bearer $(cat {reader})" {member}/v1/deployments/{DEPLOYMENT}',
        f'  curl --cacert {fleet.ca_file} -i -H "Authorization: Bearer $(cat {inference})" -H "content-type: application/json" \\',
        f"    {agent}/v2/models/{DEPLOYMENT}/infer -d '{infer}'",
        f"  tail -f {story.settings.directory / 'logs'}/*.log",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    sys.stdout.flush()
    try:
        signal.pause()
    except KeyboardInterrupt:
        console.print("stopping")
