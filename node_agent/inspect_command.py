"""`raftmeta agent inspect` and `raftmeta agent reclaim`: what one node holds, read from its files, running or not.

Everything comes from the node's record, the headers in shared memory and the control blocks; only what the agent is doing right now is
asked of its control process, over its own socket. Nothing is mapped and nothing is changed, except by `reclaim`, which removes arenas that
no process uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from node_agent import config as configuration
from node_agent import journal, names
from node_agent.config import AgentConfig
from node_agent.device import inventory
from node_agent.device.control_block import NO_SLOT, ControlBlock
from node_agent.device.inventory import ArenaFile, ArenaState
from node_agent.ipc import CallFailed, ConnectionLost, Link
from node_agent.journal import DeploymentRecord
from node_agent.messages import GetPlan, GetStatus, Json, Numbered, Reply, SetCordon
from node_agent.refusal import Refusal
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import JsonOptions, command
from raftmeta.core.errors import RaftmetaError

CONTROL_S = 5.0
MAX_REASON = 200  # characters


@dataclass(frozen=True, kw_only=True)
class NodeOptions(JsonOptions):
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The agent.toml that the agent runs with.")]

    def load(self) -> AgentConfig:
        try:
            return configuration.load(self.config)
        except RaftmetaError as fault:
            raise UsageFault(fault.detail, "correct the file or the RAFTMETA_AGENT_* variable that it names") from fault


@dataclass(frozen=True, kw_only=True)
class ReclaimOptions(NodeOptions):
    kept: Annotated[
        bool,
        typer.Option("--kept", help="Also arenas that a stopped agent would serve from at its next start; it then loads from its store."),
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False


def _inspect(options: NodeOptions) -> int:
    """Show what this node holds: deployments, slots, who is inside them, and every arena in its shared memory.

    Works while the agent is stopped, too. Exit code 1 when the node does not serve everything that its record names.
    """
    config = options.load()
    seen = look(config)
    if options.json:
        output.print_json(seen)
    else:
        _print(config, seen)
    serves = all(item["active"] is not None for item in seen["deployments"])
    return Exit.OK if serves else Exit.NO


def _reclaim(options: ReclaimOptions) -> int:
    """Remove arenas that no process uses: of an earlier boot, or of another build. Prints what was removed and what was left alone."""
    config = options.load()
    wanted = inventory.RECLAIMABLE if options.kept else inventory.RECLAIMABLE - {ArenaState.KEPT}
    rows: list[dict[str, Any]] = []
    for found in inventory.find(config.arena_dir):
        freed = found.size_bytes if found.state in wanted else 0
        if freed and not options.dry_run:
            freed = inventory.reclaim(found.path)
        rows.append(_arena(found) | {"freed_bytes": freed})
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


def look(config: AgentConfig) -> dict[str, Any]:
    """Everything that `inspect` shows, as JSON."""
    record = journal.read(config.store_dir)
    arenas = inventory.find(config.arena_dir)
    by_name = {found.path.name: found for found in arenas}
    deployments = record.deployments if record else {}
    return {
        "node": config.node,
        "zone": config.zone,
        "cluster_id": record.cluster_id if record else "",
        "agent": asyncio.run(_ask(config)),
        "deployments": [_deployment(config, item, by_name.get(item.arena)) for _, item in sorted(deployments.items())],
        "arenas": [_arena(found) for found in arenas],
    }


async def _ask(config: AgentConfig) -> dict[str, Any] | None:
    """What control says of itself; None when none answers."""
    link = Link(lambda push: None, lambda: None)
    try:
        await link.connect(names.control_socket(config.sockets_dir))
        reply = await link.call(GetStatus, CONTROL_S)
    except (OSError, ConnectionLost, CallFailed, TimeoutError):
        return None
    finally:
        await link.close()
    return msgspec.json.decode(reply.body, type=dict[str, Any]) if isinstance(reply, Json) else None


def _deployment(config: AgentConfig, record: DeploymentRecord, arena: ArenaFile | None) -> dict[str, Any]:
    active, epoch, workers = _control_block(config.arena_dir / record.control_block)
    slots = [
        {"slot": number, "active": number == active, "state": slot.state.value, "version": slot.version, "checksum": slot.checksum}
        for number, slot in enumerate(arena.slots if arena else ())
    ]
    return {
        "deployment": record.name,
        "model": record.model,
        "side": record.side.value,
        "active": active,
        "epoch": epoch,
        "slots": slots,
        "workers": workers,
        "fence": {"generation": record.fence.generation, "revision": record.fence.revision},
        "obeyed": record.obeyed.label if record.obeyed else "",
        "pin": record.pin.label if record.pin else "",
        "behind": record.behind,
        "change": msgspec.to_builtins(record.change),
        "lag_ms": record.lag_ms,
    }


def _control_block(path: Path) -> tuple[int | None, int, list[dict[str, Any]]]:
    """(active slot, epoch, workers)"""
    try:
        block = ControlBlock.open(path)
    except (OSError, Refusal):
        return None, 0, []
    try:
        slot, epoch = block.active()
        workers = [
            {"worker": row.index, "pid": row.process.pid, "in_flight": list(row.in_flight), "acknowledged": row.acknowledged}
            for row in block.attached()
        ]
        return None if slot == NO_SLOT else slot, epoch, workers
    finally:
        block.close()


def _arena(found: ArenaFile) -> dict[str, Any]:
    return {
        "file": found.path.name,
        "state": found.state.value,
        "size_bytes": found.size_bytes,
        "node": found.use.node,
        "deployment": found.use.deployment,
        "store_dir": found.use.store_dir,
        "detail": found.detail,
    }


def _print(config: AgentConfig, seen: dict[str, Any]) -> None:
    out = output.console()
    agent = seen["agent"]
    plane = agent["control_plane"] if agent else None
    running = "not running" if plane is None else "running; the control plane " + ("answers" if plane["reachable"] else "does not answer")
    out.print(f"node {config.node}, zone {config.zone}: {running}", markup=False)
    for item in seen["deployments"]:
        fence = item["fence"]
        out.print(
            f"\n{item['deployment']} ({item['model']}, {item['side']}): obeyed {item['obeyed'] or '-'} "
            f"at generation {fence['generation']} revision {fence['revision']}, pinned {item['pin'] or '-'}",
            markup=False,
        )
        rows = [
            (
                f"{slot['slot']}{' active' if slot['active'] else ''}",
                slot["version"],
                slot["state"],
                output.short(slot["checksum"]),
                sum(worker["in_flight"][slot["slot"]] for worker in item["workers"]),
            )
            for slot in item["slots"]
        ]
        out.print(output.table(("SLOT", "VERSION", "STATE", "CHECKSUM", "IN FLIGHT"), rows))
        said = agent["deployments"].get(item["deployment"], {}) if agent else {}
        for what in ("doing", "trouble"):
            if said.get(what):
                out.print(f"{what}: {output.printable(said[what])}", markup=False)
    out.print()
    out.print(
        output.table(
            (f"ARENA IN {config.arena_dir}", "NODE", "DEPLOYMENT", "STATE", "SIZE"),
            [(row["file"], row["node"], row["deployment"], row["state"], output.size(row["size_bytes"])) for row in seen["arenas"]],
        )
    )


@dataclass(frozen=True, kw_only=True)
class CordonOptions(NodeOptions):
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown wherever the node says that it is not ready.")] = "by hand"
    lift: Annotated[bool, typer.Option("--lift", help="Let the node be ready again.")] = False


def _cordon(options: CordonOptions) -> int:
    """Take a running node out of readiness, so that routers move on; it serves what still comes, stages and switches as before.

    Stays until it is lifted, over restarts too.
    """
    reason = "" if options.lift else options.reason.strip()[:MAX_REASON]
    if not options.lift and not reason:
        raise UsageFault("--reason is empty", "say why, for whoever finds the node not ready")
    _tell(options.load(), lambda number: SetCordon(number, reason))
    if options.json:
        output.print_json({"cordoned": bool(reason), "reason": reason})
    else:
        output.console().print(f"cordoned: {reason}" if reason else "no longer cordoned", markup=False)
    return Exit.OK


def _plan(options: NodeOptions) -> int:
    """Show what a running node would do next, step by step, and what staging would move. Changes nothing."""
    reply = _tell(options.load(), GetPlan)
    plans = msgspec.json.decode(reply.body, type=dict[str, Any]) if isinstance(reply, Json) else {}
    if options.json:
        output.print_json(plans)
        return Exit.OK
    out = output.console()
    rows: list[tuple[object, ...]] = []
    for name, item in plans.items():
        if item["refused"]:
            out.print(f"{name}: {output.printable(item['refused'])}", markup=False)
        rows += [(name, step["step"], step["version"], step.get("slot", ""), _moves(step)) for step in item["steps"]]
    if rows:
        out.print(output.table(("DEPLOYMENT", "STEP", "VERSION", "SLOT", "MOVES"), rows))
    else:
        out.print("nothing left to do", markup=False)
    return Exit.OK


def _moves(step: dict[str, Any]) -> str:
    counters = step.get("counters")
    if counters is None:
        return str(step.get("unknown", ""))
    read, copied, kept = (output.size(counters[name]) for name in ("bytes_read", "bytes_from_active", "bytes_kept"))
    return f"{read} from the store, {copied} from the active slot, {kept} stay"


def _tell(config: AgentConfig, make: Callable[[int], Numbered]) -> Reply:
    """Control's answer. Raises RaftmetaError when no agent runs here."""

    async def work() -> Reply:
        link = Link(lambda push: None, lambda: None)
        try:
            await link.connect(names.control_socket(config.sockets_dir))
            return await link.call(make, CONTROL_S)
        except (OSError, ConnectionLost, TimeoutError) as cause:
            detail = f"no agent answers at {names.control_socket(config.sockets_dir)}: {cause or type(cause).__name__}"
            raise RaftmetaError("agent_unreachable", detail) from cause
        finally:
            await link.close()

    return asyncio.run(work())


inspect_node = command("agent inspect", NodeOptions, _inspect)
plan = command("agent plan", NodeOptions, _plan)
cordon = command("agent cordon", CordonOptions, _cordon)
reclaim = command("agent reclaim", ReclaimOptions, _reclaim)
