"""`raftmeta agent reclaim`: gives back the shared memory of arenas that no process uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from node_agent.device import inventory
from node_agent.device.inventory import ArenaState
from node_agent.inspect_command import arena_row
from node_agent.node_options import NodeOptions
from raftmeta.cli import output
from raftmeta.cli.exits import Exit
from raftmeta.cli.program import command


@dataclass(frozen=True, kw_only=True)
class ReclaimOptions(NodeOptions):
    kept: Annotated[
        bool,
        typer.Option("--kept", help="Also arenas that a stopped agent would serve from at its next start; it then loads from its store."),
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False


def _reclaim(options: ReclaimOptions) -> int:
    """Remove arenas that no process uses: of an earlier boot, or of another build. Prints what was removed and what was left alone."""
    config = options.load()
    wanted = inventory.RECLAIMABLE if options.kept else inventory.RECLAIMABLE - {ArenaState.KEPT}
    rows: list[dict[str, Any]] = []
    for found in inventory.find(config.arena_dir):
        freed = found.size_bytes if found.state in wanted else 0
        if freed and not options.dry_run:
            freed = inventory.reclaim(found.path)
        rows.append(arena_row(found) | {"freed_bytes": freed})
    if options.json:
        output.print_json({"arenas": rows, "dry_run": options.dry_run})
        return Exit.OK
    out = output.console()
    if rows:
        verb = "WOULD FREE" if options.dry_run else "FREED"
        out.print(
            output.table(
                ("ARENA", "DEPLOYMENT", "STATE", verb),
                [
                    (row["file"], row["deployment"], row["state"], output.size(row["freed_bytes"]) if row["freed_bytes"] else "")
                    for row in rows
                ],
            )
        )
    total = sum(row["freed_bytes"] for row in rows)
    out.print(
        f"{output.size(total)} of {len(rows)} arenas in {config.arena_dir}{' would be' if options.dry_run else ''} freed", markup=False
    )
    return Exit.OK


main = command("agent reclaim", ReclaimOptions, _reclaim)
