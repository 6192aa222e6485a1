"""`raftmeta evidence`: which bytes serve a deployment where now. Exit code 0 only when every node of both sides serves what was decided."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from raftmeta.cli import output
from raftmeta.cli.exits import Exit
from raftmeta.cli.program import MemberOptions, command

COLUMNS = ("NODE", "SIDE", "STANDING", "SERVES", "BYTES", "ORDER", "COMPARED", "HEARD")  # the last two: how long ago

MARK = "*"


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(MemberOptions):
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT")]


def _evidence(options: EvidenceOptions) -> int:
    """Show which bytes serve where now, by what each node found in the memory that it serves from.

    A node that is not heard is `silent`: what it said last is shown with its age, and never as current. Exit code 0 when every node serves
    what was decided, 1 when one says that it serves something else, 2 when nobody can tell for one: silent, restarted, or nothing said yet.
    """

    async def work() -> dict[str, Any]:
        async with options.connect() as client:
            return dict(await client.evidence(options.deployment))

    seen = asyncio.run(work())
    if options.json:
        output.print_json(seen)
    else:
        _print(seen)
    return exit_code(seen)


def exit_code(seen: dict[str, Any]) -> Exit:
    """By the worst that is known: other bytes come before bytes that nobody knows."""
    unproven = [node for node in seen["nodes"] if not node["serves_decided"]]
    if any(node["standing"] == "current" for node in unproven):
        return Exit.NO
    return Exit.UNAVAILABLE if unproven else Exit.OK


def _print(seen: dict[str, Any]) -> None:
    out = output.console()
    what = f"{seen['model']} {seen['version']}" if seen["version"] else "nothing yet"
    head = f"{seen['deployment']} is decided to serve {what}"
    if seen["version"]:
        head += f", checksum {output.short(seen['checksum'])}, vector {output.short(seen['vector_root'])}, order {_order(seen)}"
    out.print(head, markup=False)
    out.print(output.table(COLUMNS, [row(node, seen) for node in seen["nodes"]]))
    for node in seen["nodes"]:
        finding = (node["evidence"] or {}).get("finding")
        if finding:
            out.print(f"{node['node']}: its last comparison found {finding}", style="red", markup=False)
    if any((node["evidence"] or {}).get("vector_from") == "server" for node in seen["nodes"]):
        out.print(f"{MARK} by the word of a server that owns its memory, which nobody else can read", markup=False)
    out.print(summary(seen), markup=False)


def row(node: dict[str, Any], seen: dict[str, Any]) -> tuple[object, ...]:
    """One node; cells of what nobody knows are empty."""
    said, heard_ms = node["evidence"], node["heard_age_ms"]
    heard = "never" if heard_ms is None else ago(heard_ms)
    start = (node["node"], f"{node['side']} {node['zone']}", node["standing"])
    if said is None:
        return (*start, "", "", "", "", heard)
    older = "" if _order(said) == _order(seen) else " old"
    compared = ago(said["age_ms"] + said["verified_age_ms"]) if said["version"] else ""
    return (*start, said["version"] or "nothing", _bytes(node, said), f"{_order(said)}{older}", compared, heard)


def _bytes(node: dict[str, Any], said: dict[str, Any]) -> str:
    """Whether they are what was decided; others by the beginning of their vector."""
    mark = MARK if said["vector_from"] == "server" else ""
    if node["serves_decided"]:
        return f"decided{mark}"
    return f"{said['vector_root'][:8]}{mark}" if node["standing"] == "current" and said["version"] else "unknown"


def summary(seen: dict[str, Any]) -> str:
    nodes = seen["nodes"]
    proven = sum(node["serves_decided"] for node in nodes)
    others = [node["node"] for node in nodes if node["standing"] == "current" and not node["serves_decided"]]
    unknown = [f"{node['node']} ({node['standing']})" for node in nodes if node["standing"] != "current"]
    told = f"{proven} of {len(nodes)} nodes serve what was decided"
    if others:
        told += f"; other bytes: {', '.join(others)}"
    return told + (f"; unknown: {', '.join(unknown)}" if unknown else "")


def ago(age_ms: int) -> str:
    """Two digits are enough to see whether it is old."""
    seconds = age_ms / 1000
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def _order(value: dict[str, Any]) -> str:
    return f"{value['generation']}/{value['order_revision']}"


main = command("evidence", EvidenceOptions, _evidence)
