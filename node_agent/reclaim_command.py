"""`raftmeta agent reclaim`: gives back the shared memory of arenas that no process uses.

Nodes of one machine share its memory file system. What another node keeps is what it serves from at its next start, and an arena whose
header this build cannot read says of no node: neither is touched unless that is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from node_agent import journal
from node_agent.config import AgentConfig
from node_agent.device import inventory
from node_agent.device.arena import ArenaUse
from node_agent.device.inventory import ArenaFile, ArenaState
from node_agent.inspect_command import arena_row
from node_agent.node_options import NodeOptions
from raftmeta.cli import output
from raftmeta.cli.exits import Exit
from raftmeta.cli.program import command
from raftmeta.core.errors import RaftmetaError


@dataclass(frozen=True, kw_only=True)
class ReclaimOptions(NodeOptions):
    kept: Annotated[
        bool,
        typer.Option("--kept", help="Also arenas that a stopped agent would serve from at its next start; it then loads from its store."),
    ] = False
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="Also arenas of other nodes of this machine, and those that do not say whose they are.")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False


def _reclaim(options: ReclaimOptions) -> int:
    """Remove arenas of this node that no process uses: of an earlier boot, or of another build.

    Prints what was removed and what was left alone.
    """
    config = options.load()
    wanted = inventory.RECLAIMABLE if options.kept else inventory.RECLAIMABLE - {ArenaState.KEPT}
    named = _named(config)
    rows: list[dict[str, Any]] = []
    others = 0
    for found in inventory.find(config.arena_dir):
        if not (options.all_nodes or found.path.name in named or _is_own(found, config)):
            others += 1
            continue
        freed = found.size_bytes if found.state in wanted else 0
        if freed and not options.dry_run:
            freed = inventory.reclaim(found.path)
        rows.append(arena_row(found) | {"freed_bytes": freed})
    if options.json:
        output.print_json({"arenas": rows, "dry_run": options.dry_run, "others": others})
    else:
        _print(rows, others, options.dry_run, config)
    return Exit.OK


def _named(config: AgentConfig) -> set[str]:
    """Arenas that the node's record names; none where it cannot be read, which is no reason to keep memory that says whose it is."""
    try:
        record = journal.read(config.store_dir)
    except RaftmetaError:
        return set()
    return {item.arena for item in record.deployments.values()} if record else set()


def _is_own(found: ArenaFile, config: AgentConfig) -> bool:
    return found.use == ArenaUse.of(config.store_dir, config.node, found.use.deployment)


def _print(rows: list[dict[str, Any]], others: int, is_dry: bool, config: AgentConfig) -> None:
    out = output.console()
    if rows:
        columns = ("ARENA", "NODE", "DEPLOYMENT", "STATE", "WOULD FREE" if is_dry else "FREED")
        lines = [
            (row["file"], row["node"], row["deployment"], row["state"], output.size(row["freed_bytes"]) if row["freed_bytes"] else "")
            for row in rows
        ]
        out.print(output.table(columns, lines))
    total = sum(row["freed_bytes"] for row in rows)
    out.print(f"{output.size(total)} of {len(rows)} arenas in {config.arena_dir}{' would be' if is_dry else ''} freed", markup=False)
    if others:
        out.print(f"{others} more of other nodes, or of none that they name: only with --all-nodes", markup=False)


main = command("agent reclaim", ReclaimOptions, _reclaim)
