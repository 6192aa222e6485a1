"""Verdicts of the consistency checks: recorded by checkers, read as the last one of each deployment or as they came.

What a verdict was computed for comes beside its report or in it. Below feature level 2 the members keep it no further.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import MAX_REPORT_BYTES, BasisBody, VerdictBody, VerdictsBody
from api.service import Rejected, Service
from raftmeta.core import queries
from raftmeta.core.commands import RecordCheck, RecordVerdict
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.handlers.verdicts import BASIS_LEVEL, MAX_SUMMARY
from raftmeta.core.types import Basis

MAX_NUMBER = 1 << 53
MAX_BATCH_BODY = 8 << 20
MAX_BATCH_KEY = 120  # characters, so that a dot and the number of an item find room


async def get_consistency(service: Service, call: Call) -> Reply:
    query = call.query
    state = await service.view(call)
    if query.since is None:
        found, dropped = queries.verdicts_page(state, query.limit, query.after, query.deployment), 0
    else:
        found, dropped = queries.verdicts_since(state, query.since, query.limit, query.after, query.deployment)
    return replies.at(state, {"items": found.items, "next": found.next, "dropped_revision": dropped})


async def record_verdict(service: Service, call: Call) -> Reply:
    outcome = await service.propose(call, _command(service, call.body))
    return replies.done(outcome.revision, {"revision": outcome.revision}, repeated=outcome.repeated)


async def record_verdicts(service: Service, call: Call) -> Reply:
    """Every item is a command of its own, and is judged for itself; the request has no answer before all have one.

    Their keys derive from the request's, so that who repeats it after any error records no verdict twice.
    """
    if len(call.key) > MAX_BATCH_KEY:
        raise RaftmetaError("bad_field", f"the idempotency key of a batch has {len(call.key)} characters, the limit is {MAX_BATCH_KEY}")
    commands = await service.compute(call.size_bytes, lambda: [_command(service, item) for item in call.body.items])
    tasks: list[asyncio.Task[answers.Judged]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(_judged(service, call, f"{call.key}.{at}", command)) for at, command in enumerate(commands)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed  # the first one; whoever repeats the request hears of the others
    items = tuple(task.result() for task in tasks)
    return replies.done(max(item.revision for item in items), answers.JudgedItems(items))


async def _judged(service: Service, call: Call, key: str, command: RecordVerdict | RecordCheck) -> answers.Judged:
    try:
        outcome = await service.propose(call, command, key)
    except Rejected as rejected:
        return answers.Judged(rejected.revision, rejected.code, rejected.detail)
    return answers.Judged(outcome.revision)


def _command(service: Service, body: VerdictBody) -> RecordVerdict | RecordCheck:
    """Raises RaftmetaError bad_field for a report that is too long."""
    report = replies.encode(body.report)
    if len(report) > MAX_REPORT_BYTES:
        told = f"the report of {body.deployment!r} has {len(report)} bytes as compact JSON, the limit is {MAX_REPORT_BYTES}"
        raise RaftmetaError("bad_field", told)
    basis = basis_of(body)
    if basis is None or service.member.state.feature_level < BASIS_LEVEL:
        return RecordVerdict(body.deployment, body.verdict, report)
    return RecordCheck(body.deployment, body.verdict, body.summary or summary_of(body.report), report, basis)


def basis_of(body: VerdictBody) -> Basis | None:
    """As it was given, else as the report has it; None when it has not all of it."""
    given: BasisBody | None = body.basis
    if given is not None:
        return Basis(given.generation, given.order_revision, given.version, given.started_revision, given.node_count)
    report = body.report
    numbers = [report.get(name) for name in ("generation", "order_revision", "started_revision", "nodes_seen")]
    whole = [number for number in numbers if type(number) is int and 0 <= number <= MAX_NUMBER]
    version = report.get("version")
    if len(whole) < len(numbers) or not isinstance(version, str):
        return None
    return Basis(whole[0], whole[1], version, whole[2], whole[3])


def summary_of(report: Mapping[str, Any]) -> str:
    """A line for the time when the report is no longer kept: how much was found, and what first."""
    parts = [f"{report[name]} {what}" for name, what in (("findings_total", "findings"), ("nodes_seen", "nodes seen")) if name in report]
    for name in ("findings", "reasons"):
        items = report.get(name)
        first = items[0] if isinstance(items, list) and items else None
        if isinstance(first, dict):
            told = [str(first[field]) for field in ("code", "node", "tensor", "detail") if first.get(field)]
            block = first.get("block")
            parts.append(" ".join([*told, *([f"block {block}"] if isinstance(block, int) and block >= 0 else [])]))
    return "; ".join(part for part in parts if part)[:MAX_SUMMARY]


OPERATIONS = (
    Operation(
        id="get_consistency",
        method="GET",
        path="/v1/consistency",
        kind=Kind.LIST,
        action="read",
        what="The last verdict of each deployment's consistency check; with `since`, all verdicts after that revision that are kept",
        handler=get_consistency,
        answers=(Answer(200, answers.VerdictPage, {"items": [examples.VERDICT], "next": None, "dropped_revision": 0}, "One page"),),
        errors=("unknown_deployment",),
        extra_query=("since", "deployment"),
    ),
    Operation(
        id="record_verdict",
        method="POST",
        path="/v1/consistency",
        kind=Kind.MUTATION,
        action="verdict",
        what="A checker records what it found, and what it looked at",
        handler=record_verdict,
        answers=(Answer(200, answers.Acknowledged, {"revision": 53}, "Recorded"),),
        errors=("unknown_deployment", "verdict_outdated", "nodes_not_covered"),
        body=Body(VerdictBody, free_form=True),
        example=examples.VERDICT_BODY,
    ),
    Operation(
        id="record_verdicts",
        method="POST",
        path="/v1/consistency:batch",
        kind=Kind.MUTATION,
        action="verdict",
        what="A checker records up to 1,000 verdicts, each of which is taken or refused for itself",
        handler=record_verdicts,
        answers=(
            Answer(
                200,
                answers.JudgedItems,
                {"items": [{"revision": 53}, {"revision": 54, "code": "verdict_outdated", "detail": "order 9 is not the last one"}]},
                "What became of each",
            ),
        ),
        errors=(),
        body=Body(VerdictsBody, free_form=True),
        example={"items": [examples.VERDICT_BODY]},
        max_body_bytes=MAX_BATCH_BODY,
    ),
)
