"""`raftmeta agent inspect`: what one node holds, read from its files, running or not.

Everything comes from the node's record, the headers in shared memory and the control blocks; only what the agent is doing right now is
asked of its control process. Nothing is mapped and nothing is changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from node_agent import journal
from node_agent.config import AgentConfig
from node_agent.device import inventory
from node_agent.device.control_block import NO_SLOT, ControlBlock
from node_agent.device.inventory import ArenaFile
from node_agent.device.process import is_running
from node_agent.ipc import CallFailed
from node_agent.journal import DeploymentRecord
from node_agent.messages import GetStatus, Json
from node_agent.node_options import NodeOptions, ask_control
from node_agent.refusal import Refusal
from raftmeta.cli import output
from raftmeta.cli.exits import Exit
from raftmeta.cli.program import command
from raftmeta.core.errors import RaftmetaError

if TYPE_CHECKING:  # nobody who asks for JSON should pay for it
    from rich.console import Console


def _inspect(options: NodeOptions) -> int:
    """Show what this node holds: deployments, slots, who is inside them, and every arena in its shared memory.

    Works while the agent is stopped, too. Exit code 1 when the node does not serve everything that its record names: a slot has to be
    active, and a process there that answers from it.
    """
    config = options.load()
    seen = look(config)
    if options.json:
        output.print_json(seen)
    else:
        _print(config, seen)
    return Exit.OK if all(_answers(item) for item in seen["deployments"]) else Exit.NO


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
        "cordoned": record.cordoned if record else "",
        "agent": _asked(config),
        "deployments": [_deployment(config, item, by_name.get(item.arena)) for _, item in sorted(deployments.items())],
        "arenas": [arena_row(found) for found in arenas],
    }


def _answers(deployment: dict[str, Any]) -> bool:
    """Whether a process is there to answer from a slot: the control block names one that serves after the last process ended, too."""
    return deployment["active"] is not None and any(worker["running"] for worker in deployment["workers"])


def _asked(config: AgentConfig) -> dict[str, Any] | None:
    """What control says of itself; None when none answers."""
    try:
        reply = ask_control(config, GetStatus)
    except (RaftmetaError, CallFailed):
        return None
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
        "pinned": None if record.pinned is None else {**record.pinned.target._asdict(), "reason": record.pinned.reason},
        "behind": record.behind,
        "damage": record.damage,
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
            {
                "worker": row.index,
                "pid": row.process.pid,
                "running": is_running(row.process),
                "in_flight": list(row.in_flight),
                "acknowledged": row.acknowledged,
            }
            for row in block.attached()
        ]
        return None if slot == NO_SLOT else slot, epoch, workers
    finally:
        block.close()


def arena_row(found: ArenaFile) -> dict[str, Any]:
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
    if seen["cordoned"]:
        out.print(f"cordoned: {output.printable(seen['cordoned'])}; out of readiness until `raftmeta agent cordon --lift`", markup=False)
    for item in seen["deployments"]:
        _print_deployment(out, item, agent["deployments"].get(item["deployment"], {}) if agent else {})
    out.print()
    out.print(
        output.table(
            (f"ARENA IN {config.arena_dir}", "NODE", "DEPLOYMENT", "STATE", "SIZE"),
            [(row["file"], row["node"], row["deployment"], row["state"], output.size(row["size_bytes"])) for row in seen["arenas"]],
        )
    )


def _print_deployment(out: Console, item: dict[str, Any], said: dict[str, Any]) -> None:
    name, fence = item["deployment"], item["fence"]
    order = f"generation {fence['generation']} revision {fence['revision']}"
    out.print(
        f"\n{name} ({item['model']}, {item['side']}): obeyed {item['obeyed'] or '-'} at {order}, served last {item['pin'] or '-'}",
        markup=False,
    )
    if item["pinned"] is not None:
        kept, why = item["pinned"]["label"], output.printable(item["pinned"]["reason"])
        out.print(f"pinned to {kept}: {why}; obeys again after `raftmeta agent pin {name} --lift`", markup=False)
    if not _answers(item):
        out.print("nothing answers: " + ("no slot serves" if item["active"] is None else "no worker runs"), markup=False)
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
    for what in ("doing", "trouble", "damage"):
        if said.get(what):
            out.print(f"{what}: {output.printable(said[what])}", markup=False)


main = command("agent inspect", NodeOptions, _inspect)
