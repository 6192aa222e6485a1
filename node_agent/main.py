"""`raftmeta agent`: reads the settings of one node and runs its supervisor, which starts `node_agent.child` for each of its processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from node_agent import config as configuration
from node_agent.runtime import start_log
from node_agent.supervisor import Supervisor
from raftmeta.cli.exits import UsageFault
from raftmeta.cli.program import command
from raftmeta.core.errors import RaftmetaError


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="agent.toml; RAFTMETA_AGENT_<FIELD> overrides any of its fields.")
    ]
    purge_arena: Annotated[
        bool,
        typer.Option(
            "--purge-arena", help="Give the memory back at the end; the next start loads from the store instead of serving at once."
        ),
    ] = False


def run(options: AgentOptions) -> int:
    """Run the agent of one serving node, until SIGTERM or SIGINT."""
    try:
        config = configuration.load(options.config)
    except RaftmetaError as fault:
        raise UsageFault(fault.detail, "correct the file or the RAFTMETA_AGENT_* variable that it names") from fault
    start_log("supervisor", config)
    return Supervisor(config, options.config.absolute(), purge_arena=options.purge_arena).run()


main = command("agent", AgentOptions, run)
