"""Verdicts of the consistency checks: recorded by checkers, read as the last one of each deployment or as they came.

What a verdict was computed for comes beside its report or in it. Below feature level 2 the members keep it no further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import MAX_REPORT_BYTES, BasisBody, VerdictBody
from api.service import Service
from raftmeta.core import queries
from raftmeta.core.commands import RecordCheck, RecordVerdict
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.handlers.verdicts import BASIS_LEVEL, MAX_SUMMARY
from raftmeta.core.types import Basis

MAX_NUMBER = 1 << 53


async def get_consistency(service: Service, call: Call) -> Reply:
    query = call.query
    state = await service.view(call)
    if query.since is None:
        found, dropped = queries.verdicts_page(state, query.limit, query.after, query.deployment), 0
    else:
        found, dropped = queries.verdicts_since(state, query.since, query.limit, query.after, query.deployment)
    return replies.at(state, {"items": found.items, "next": found.next, "dropped_revision": dropped})


async def record_verdict(service: Service, call: Call) -> Reply:
    body: VerdictBody = call.body
    report = replies.encode(body.report)
    if len(report) > MAX_REPORT_BYTES:
        raise RaftmetaError("bad_field", f"the report has {len(report)} bytes as compact JSON, the limit is {MAX_REPORT_BYTES}")
    basis = basis_of(body)
    command: RecordVerdict | RecordCheck = RecordVerdict(body.deployment, body.verdict, report)
    if basis is not None and service.member.state.feature_level >= BASIS_LEVEL:
        command = RecordCheck(body.deployment, body.verdict, body.summary or summary_of(body.report), report, basis)
    outcome = await service.propose(call, command)
    return replies.done(outcome.revision, {"revision": outcome.revision}, repeated=outcome.repeated)


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
)
