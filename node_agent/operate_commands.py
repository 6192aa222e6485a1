"""`raftmeta agent plan` and `raftmeta agent cordon`: what an operator asks of a running node, or tells it, from its own machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from node_agent.messages import GetPlan, Json, SetCordon
from node_agent.node_options import NodeOptions, ask_control
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import command

MAX_REASON = 200  # characters


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
    ask_control(options.load(), lambda number: SetCordon(number, reason))
    if options.json:
        output.print_json({"cordoned": bool(reason), "reason": reason})
    else:
        output.console().print(f"cordoned: {reason}" if reason else "no longer cordoned", markup=False)
    return Exit.OK


def _plan(options: NodeOptions) -> int:
    """Show what a running node would do next, step by step, and what staging would move. Changes nothing."""
    reply = ask_control(options.load(), GetPlan)
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


plan = command("agent plan", NodeOptions, _plan)
cordon = command("agent cordon", CordonOptions, _cordon)
