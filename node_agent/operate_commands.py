"""What an operator asks of a running node, or tells it, from its own machine: `raftmeta agent plan`, `cordon`, `pin` and `abort`.

All of it goes to control over its own socket, so whoever may open that socket may do it; nothing here needs the control plane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from node_agent.messages import Abort, GetPlan, Json, Numbered, SetCordon, SetPin
from node_agent.node_options import NodeOptions, ask_control
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import command
from raftmeta.core.errors import CODES, RaftmetaError

MAX_REASON = 200  # characters


@dataclass(frozen=True, kw_only=True)
class CordonOptions(NodeOptions):
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown wherever the node says that it is not ready.")] = "by hand"
    lift: Annotated[bool, typer.Option("--lift", help="Let the node be ready again.")] = False


def _cordon(options: CordonOptions) -> int:
    """Take a running node out of readiness, so that routers move on; it serves what still comes, stages and switches as before.

    Stays until it is lifted, over restarts too.
    """
    reason = "" if options.lift else _reason(options.reason)
    ask_control(options.load(), lambda number: SetCordon(number, reason))
    if options.json:
        output.print_json({"cordoned": bool(reason), "reason": reason})
    else:
        output.console().print(f"cordoned: {reason}" if reason else "no longer cordoned", markup=False)
    return Exit.OK


@dataclass(frozen=True, kw_only=True)
class PinOptions(NodeOptions):
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT", help="One that lists this node.")]
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown wherever the node does not obey.")] = "by hand"
    lift: Annotated[bool, typer.Option("--lift", help="Obey orders again, the newest first.")] = False


def _pin(options: PinOptions) -> int:
    """Let a running node go on serving what it serves now, whatever is ordered.

    A rollout to another version fails on this node with the class `fenced`, and so ends everywhere; one whose switch is decided already is
    not obeyed here. The node stays ready. Stays until it is lifted, over restarts too.
    """
    reason = "" if options.lift else _reason(options.reason)
    said = _tell(options, lambda number: SetPin(number, options.deployment, reason))
    if options.json:
        output.print_json(said)
    else:
        out = output.console()
        out.print(
            f"{options.deployment}: {said['pinned']} stays, {reason}" if reason else f"{options.deployment}: obeys again", markup=False
        )
    return Exit.OK


@dataclass(frozen=True, kw_only=True)
class AbortOptions(NodeOptions):
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT", help="One that lists this node and has a rollout.")]
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown as why the rollout failed.")] = "by hand"


def _abort(options: AbortOptions) -> int:
    """Fail the running rollout of a deployment on this node, with the class `fenced`, and so everywhere. What serves goes on.

    Works as long as the switch is not decided; after that, roll back.
    """
    reason = _reason(options.reason)
    said = _tell(options, lambda number: Abort(number, options.deployment, reason))
    if options.json:
        output.print_json(said)
    else:
        output.console().print(f"rollout {said['rollout']} of {options.deployment} fails here: {reason}", markup=False)
    return Exit.OK


def _tell(options: NodeOptions, make: Callable[[int], Numbered]) -> dict[str, Any]:
    reply = ask_control(options.load(), make)
    return msgspec.json.decode(reply.body, type=dict[str, Any]) if isinstance(reply, Json) else {}


def _reason(text: str) -> str:
    reason = text.strip()[:MAX_REASON]
    if not reason:
        raise UsageFault("--reason is empty", "say why, for whoever looks at the node next")
    return reason


@dataclass(frozen=True, kw_only=True)
class PlanOptions(NodeOptions):
    dry_run: Annotated[
        str, typer.Option("--dry-run", metavar="VERSION", help="As if that version were activated now, up to its switch.")
    ] = ""  # fmt: skip


def _plan(options: PlanOptions) -> int:
    """Show what a running node would do next, step by step, and what that would move. Does none of it.

    With --dry-run, exit code 1 when the node would not take the version, and 3 when there is none of that name.
    """
    plans = _tell(options, lambda number: GetPlan(number, options.dry_run))
    if options.dry_run:
        _raise_what_all_refuse(plans, options.dry_run)
    if options.json:
        output.print_json(plans)
    else:
        _print_plans(plans)
    takes = [name for name, item in plans.items() if not (_declined(item) or (item["refused"] and not item["steps"]))]
    return Exit.OK if takes or not options.dry_run else Exit.NO


def _raise_what_all_refuse(plans: dict[str, Any], version: str) -> None:
    """A version that no deployment of the node could look up: what the control plane, or the way to it, said."""
    told = [(item.get("code", ""), item["refused"]) for item in plans.values()]
    if told and all(code in CODES for code, _ in told):
        code, refused = told[0]
        raise RaftmetaError(code, refused.removeprefix(f"{version}: ").removeprefix(f"{code}: "))


def _declined(item: dict[str, Any]) -> dict[str, Any] | None:
    """The step that lets a rollout fail because of a pin, None when there is none."""
    return next((step for step in item["steps"] if step["step"] == "Decline"), None)


def _print_plans(plans: dict[str, Any]) -> None:
    out = output.console()
    rows: list[tuple[object, ...]] = []
    is_told = False
    for name, item in plans.items():
        declined = _declined(item)
        if declined:
            kept, why = output.printable(str(declined.get("pinned", ""))), output.printable(str(declined.get("reason", "")))
            out.print(f"{name}: declines {declined['version']}: {kept} is pinned ({why})", markup=False, soft_wrap=True)
        if item["refused"]:
            out.print(f"{name}: {output.printable(item['refused'])}", markup=False, soft_wrap=True)
        is_told = is_told or bool(declined or item["refused"])
        rows += [
            (name, _step_name(step), step["version"], step.get("slot", ""), _moves(step)) for step in item["steps"] if step != declined
        ]
    if rows:
        out.print(output.table(("DEPLOYMENT", "STEP", "VERSION", "SLOT", "MOVES"), rows))
    elif not plans:
        out.print("no deployment lists this node", markup=False)
    elif not is_told:
        out.print("nothing left to do", markup=False)


_STEP_NAMES = {  # for people; JSON has the names of the code
    "Fetch": "fetch",
    "StageInto": "stage",
    "Verify": "verify",
    "Warm": "warm",
    "AwaitQuiet": "wait for quiet",
    "SwitchTo": "switch",
    "AwaitWorkers": "await workers",
    "Obey": "note the order",
    "Attest": "attest",
}


def _step_name(step: dict[str, Any]) -> str:
    return f"{_STEP_NAMES.get(step['step'], step['step'])} {step.get('stage', '')}".rstrip()


def _moves(step: dict[str, Any]) -> str:
    if "bytes_to_fetch" in step:
        return f"{output.size(step['bytes_to_fetch'])} from the sources"
    counters = step.get("counters")
    if counters is None:
        return str(step.get("unknown", ""))
    read, copied, kept = (output.size(counters[name]) for name in ("bytes_read", "bytes_from_active", "bytes_kept"))
    return f"{read} from store, {copied} from active, {kept} kept"


plan = command("agent plan", PlanOptions, _plan)
cordon = command("agent cordon", CordonOptions, _cordon)
pin = command("agent pin", PinOptions, _pin)
abort = command("agent abort", AbortOptions, _abort)
