"""`raftmeta init`: the command around `init.run`, and what to do with the directory it wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raftmeta.cli import output, placement
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import JsonOptions, command

if TYPE_CHECKING:  # cryptography costs time that `--help` must not pay
    from raftmeta.cli.init import InitResult


@dataclass(frozen=True, kw_only=True)
class InitCommandOptions(JsonOptions):
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")]
    zones: Annotated[str, typer.Option("--zones", metavar="NAMES", help="Failure domains, one member each; an odd number.")] = "a,b,c"
    hosts: Annotated[
        str, typer.Option("--hosts", metavar="NAMES", help="Host of each member in the order of the zones. Loopback if left away.")
    ] = ""
    agent: Annotated[list[str] | None, typer.Option("--agent", metavar="ZONE:NODE[@HOST]", help="A serving node; repeat for more.")] = None
    base_port: Annotated[
        int, typer.Option("--base-port", metavar="PORT", help="APIs from here, members' links 100 above, agents 200 above; 0: free ports.")
    ] = 7400
    artifact_root: Annotated[
        list[Path] | None,
        typer.Option("--artifact-root", metavar="DIR", help="Agents may fetch file:// sources below it; repeat for more."),
    ] = None
    arena_dir: Annotated[Path, typer.Option("--arena-dir", metavar="DIR", help="Memory file system for the agents' arenas.")] = Path(
        "/dev/shm"
    )


def _init(options: InitCommandOptions) -> int:
    """Write certificates, tokens and configuration for a cluster over N zones into one new directory.

    Copy DIR/MEMBER to the member's machine and DIR/agents/NODE to the node. Keep DIR/authority/ca.key away from both.
    """
    from raftmeta.cli import init

    zones = _names("--zones", options.zones)
    result = init.run(
        options.directory,
        zones,
        init.InitOptions(
            hosts=_names("--hosts", options.hosts) if options.hosts else (),
            agents=tuple(options.agent or ()),
            base_port=options.base_port,
            arena_dir=options.arena_dir,
            artifact_roots=tuple(options.artifact_root or ()),
        ),
    )
    if options.json:
        output.print_json(_as_json(result))
    else:
        for note in placement.of_members(zones):
            output.console().print(f"note: {note}", markup=False, soft_wrap=True)
        lines = [f"cluster {result.cluster_id} in {result.directory}", ""]
        lines += [f"keep away from the machines: {result.directory / 'authority' / 'ca.key'}", ""]
        lines += ["start each on its machine, with a copy of its folder:"]
        lines += [f"  raftmeta server --config {path}" for path in result.servers]
        lines += [f"  raftmeta agent --config {path}" for path in result.agents]
        lines += ["", "then:", f"  export RAFTMETA_CLIENT_CONFIG={result.client}", "  raftmeta cluster status"]
        output.console().print("\n".join(lines), markup=False, soft_wrap=True)
    return Exit.OK


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageFault(f"{option} is {text!r}, expected names separated by commas", f"for example: {option} a,b,c")
    return names


def _as_json(result: InitResult) -> dict[str, object]:
    return {
        "directory": str(result.directory),
        "cluster_id": result.cluster_id,
        "servers": [str(path) for path in result.servers],
        "agents": [str(path) for path in result.agents],
        "client": str(result.client),
        "urls": list(result.urls),
    }


main = command("init", InitCommandOptions, _init)
