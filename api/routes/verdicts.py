"""Verdicts of the consistency checks: recorded by checkers, read as the last one of each deployment or as they came.

What a verdict was computed for comes beside its report or in it. Below feature level 2 the members keep it no further.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples
from api.schemas.bodies import MAX_REPORT_BYTES, BasisBody, VerdictBody, VerdictsBody
from api.service import Rejected, Service
from raftmeta.core import queries
from raftmeta.core.apply import MAX_REQUEST_ID
from raftmeta.core.commands import RecordCheck, RecordVerdict
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.handlers.verdicts import MAX_SUMMARY
from raftmeta.core.types import MAX_ANSWER_AGE_MS, Basis, Outcome

MAX_NUMBER = 1 << 53
MAX_BATCH_BODY = 8 << 20
LATER_FORM = "~2"  # behind a key whose verdict met a raise of the feature level on its way
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
    forms = _forms(call.body)
    outcome = await _record(service, call, call.key, forms, await _takes_basis(service, (forms,)))
    return replies.done(outcome.revision, {"revision": outcome.revision}, repeated=outcome.repeated)


async def record_verdicts(service: Service, call: Call) -> Reply:
    """Every item is a command of its own, and is judged for itself; the request has no answer before all have one.

    Their keys derive from the request's, so that who repeats it after any error records no verdict twice. Raises RaftmetaError
    unknown_outcome when some have no answer, unless the log refused all of them alike.
    """
    if len(call.key) > MAX_BATCH_KEY:
        raise RaftmetaError("bad_field", f"the idempotency key of a batch has {len(call.key)} characters, the limit is {MAX_BATCH_KEY}")
    made = await service.compute(call.size_bytes, lambda: [_forms_or_fault(item) for item in call.body.items])
    takes_basis = await _takes_basis(service, [forms for forms in made if isinstance(forms, _Forms)])
    work = [_judged(service, call, f"{call.key}.{at}", forms, takes_basis) for at, forms in enumerate(made)]
    judged = await asyncio.gather(*work, return_exceptions=True)  # all of them: one that is given up may be recorded yet
    items = tuple(item for item in judged if isinstance(item, answers.Judged))
    faults = [item for item in judged if isinstance(item, BaseException)]
    if faults:
        raise _open_fault(faults, len(judged)) from faults[0]
    return replies.done(max(item.revision for item in items), answers.JudgedItems(items))


def _open_fault(faults: Sequence[BaseException], n_items: int) -> BaseException:
    """What a batch is answered some of whose items have no answer."""
    first = faults[0]
    for fault in faults:
        if not isinstance(fault, RaftmetaError):
            return fault
    assert isinstance(first, RaftmetaError)
    codes = {fault.code for fault in faults if isinstance(fault, RaftmetaError)}
    if len(faults) == n_items and len(codes) == 1 and first.code != "revision_not_reached":
        return first
    told = f"{len(faults)} of {n_items} verdicts have no answer, repeat the request with its key; the first of them: {first}"
    return RaftmetaError("unknown_outcome", told)


async def _judged(service: Service, call: Call, key: str, forms: _Forms | RaftmetaError, takes_basis: bool) -> answers.Judged:
    if isinstance(forms, RaftmetaError):
        return answers.Judged(service.member.state.revision, forms.code, forms.detail)
    try:
        outcome = await _record(service, call, key, forms, takes_basis)
    except Rejected as rejected:
        return answers.Judged(rejected.revision, rejected.code, rejected.detail)
    return answers.Judged(outcome.revision)


class _Forms(NamedTuple):
    """A verdict as a command: as it is kept below BASIS_LEVEL, and from there on, None when it does not say what it was computed for."""

    plain: RecordVerdict
    based: RecordCheck | None


async def _takes_basis(service: Service, forms: Sequence[_Forms]) -> bool:
    """Whether the cluster's level takes the form with a basis; asked behind a barrier where this member's own is lower."""
    based = next((each.based for each in forms if each.based is not None), None)
    if based is None:
        return False
    try:
        await service.require_level(based)
    except RaftmetaError as fault:
        if fault.code != "unsupported_command":
            raise
        return False
    return True


async def _record(service: Service, call: Call, key: str, forms: _Forms, takes_basis: bool) -> Outcome:
    """The outcome of the verdict, in whichever form its key has one. Raises Rejected, or what the log raises.

    The level may be raised between two requests with one key, or while one is on its way: a key that is known with another body is looked
    up in the other form, and a form that came too late is followed by the other, under a key of its own that a repetition finds again.
    """
    if forms.based is None:
        return await service.propose(call, forms.plain, key)
    if takes_basis:
        try:
            return await service.propose(call, forms.based, key)
        except Rejected as other_body:
            if other_body.code != "idempotency_reused":
                raise
            reused = other_body
    else:
        reused = None
    try:
        return await service.propose(call, forms.plain, key)
    except Rejected as refused:
        if reused is not None and not refused.repeated:  # known with neither form of this verdict
            raise reused from refused
        if refused.code != "bad_field" or len(key) + len(LATER_FORM) > MAX_REQUEST_ID:
            raise
    await service.require_level(forms.based)  # this member may not have applied the raise that its verdict met
    return await service.propose(call, forms.based, key + LATER_FORM)


def _forms_or_fault(body: VerdictBody) -> _Forms | RaftmetaError:
    try:
        return _forms(body)
    except RaftmetaError as fault:
        return fault


def _forms(body: VerdictBody) -> _Forms:
    """Raises RaftmetaError bad_field for a report that is too long."""
    report = replies.encode(body.report)
    if len(report) > MAX_REPORT_BYTES:
        told = f"the report of {body.deployment!r} has {len(report)} bytes as compact JSON, the limit is {MAX_REPORT_BYTES}"
        raise RaftmetaError("bad_field", told)
    plain, basis = RecordVerdict(body.deployment, body.verdict, report), basis_of(body)
    if basis is None:
        return _Forms(plain, None)
    return _Forms(plain, RecordCheck(body.deployment, body.verdict, body.summary or summary_of(body.report), report, basis))


def basis_of(body: VerdictBody) -> Basis | None:
    """As it was given, else as the report has it; None when it has not all of it. Raises RaftmetaError bad_field like `_age_of`."""
    given: BasisBody | None = body.basis
    if given is not None:
        return Basis(given.generation, given.order_revision, given.version, given.started_revision, given.node_count, given.age_ms)
    report = body.report
    numbers = [report.get(name) for name in ("generation", "order_revision", "started_revision", "nodes_seen")]
    whole = [number for number in numbers if type(number) is int and 0 <= number <= MAX_NUMBER]
    version = report.get("version")
    if len(whole) < len(numbers) or not isinstance(version, str):
        return None
    return Basis(whole[0], whole[1], version, whole[2], whole[3], _age_of(report))


def _age_of(report: Mapping[str, Any]) -> int:
    """In ms, of the oldest reading that is told of, else of the oldest answer; 0 of a report that tells of none, like one of no node.

    A number that is out of bounds is handed on: it is refused like one in a basis. Raises RaftmetaError bad_field for what is no number.
    """
    told = {name: report[name] for name in ("oldest_proof_ms", "oldest_answer_ms") if report.get(name) is not None}
    for name, age_ms in told.items():
        if type(age_ms) is not int or abs(age_ms) > MAX_NUMBER:
            raise RaftmetaError("bad_field", f"{name} of the report is {str(age_ms)[:40]!r}, expected a whole number of milliseconds")
        if not 0 <= age_ms <= MAX_ANSWER_AGE_MS:
            return age_ms
    return max(told.values(), default=0)


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
