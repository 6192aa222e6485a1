"""Verdicts of consistency checks: the last one of each deployment with its report, those before it as a bounded history.

A check takes a while, and its process may be slow, killed or one of several. So a verdict says what it was computed for, and is refused
when the deployment got another order or other nodes since, or when a check that began later has spoken. That a difference is gone is only
believed of a check that began once it was recorded: what began before may have read before it. Verdicts that say nothing of all this are
taken below feature level 2 only.
"""

from __future__ import annotations

import msgspec

from raftmeta.core.commands import RecordCheck, RecordVerdict
from raftmeta.core.handlers.checks import SHOWN, Refusal, int_fault
from raftmeta.core.state import encode_record
from raftmeta.core.types import MAX_ANSWER_AGE_MS, Basis, Deployment, PastVerdict, Verdict, VerdictHistory
from raftmeta.core.work import Work

CONSISTENT = "consistent"
VERDICTS = (CONSISTENT, "diverged", "incomplete")
MAX_REPORT_BYTES = 64 << 10
MAX_SUMMARY = 512  # characters
BASIS_LEVEL = 2  # from which a verdict must say what it was computed for

# Of each deployment, beside the last verdict. They shape the state: another bound is another feature level.
MAX_PAST = 199
MAX_PAST_BYTES = 64 << 10


def record_verdict(work: Work, body: RecordVerdict) -> bytes | Refusal:
    deployment = work.deployments.get(body.deployment)
    if deployment is None:
        return Refusal("unknown_deployment", f"no deployment {body.deployment[:128]!a}")
    fault = _field_fault(body)
    if fault is not None:
        return fault
    if work.feature_level >= BASIS_LEVEL:
        return Refusal(
            "bad_field", f"a verdict says from feature level {BASIS_LEVEL} on what it was computed for: a later build of the checker does"
        )
    verdict = Verdict(body.deployment, body.verdict, body.report, work.principal, work.revision, work.cluster_ms)
    work.verdicts.put(body.deployment, verdict)
    return b""


def record_check(work: Work, body: RecordCheck) -> bytes | Refusal:
    deployment = work.deployments.get(body.deployment)
    if deployment is None:
        return Refusal("unknown_deployment", f"no deployment {body.deployment[:128]!a}")
    fault = _field_fault(body) or _basis_field_fault(work, body)
    if fault is not None:
        return fault
    last = work.verdicts.get(body.deployment)
    moved = _moved_on(work, deployment, body.basis) or _spoken_since(last, body)
    if moved:
        return Refusal("verdict_outdated", f"the verdict of deployment {deployment.name!a} is of {_shown(body.basis)}: {moved}")
    fault = _cover_fault(deployment, body) if body.verdict == CONSISTENT else None
    if fault is not None:
        return fault
    if last is not None:
        work.past_verdicts.put(deployment.name, _longer(work.past_verdicts.get(deployment.name), last))
    verdict = Verdict(body.deployment, body.verdict, body.report, work.principal, work.revision, work.cluster_ms, body.basis, body.summary)
    work.verdicts.put(body.deployment, verdict)
    return b""


def _field_fault(body: RecordVerdict | RecordCheck) -> Refusal | None:
    if body.verdict not in VERDICTS:
        return Refusal("bad_field", f"verdict {body.verdict[:SHOWN]!a} is not one of {', '.join(VERDICTS)}")
    if len(body.report) > MAX_REPORT_BYTES:
        return Refusal("bad_field", f"the report has {len(body.report)} bytes, the limit is {MAX_REPORT_BYTES}")
    return None


def _basis_field_fault(work: Work, body: RecordCheck) -> Refusal | None:
    if len(body.summary) > MAX_SUMMARY:
        return Refusal("bad_field", f"the summary has {len(body.summary)} characters, the limit is {MAX_SUMMARY}")
    basis = body.basis
    return (
        int_fault("generation", basis.generation, 0, work.base.generation)
        or int_fault("order_revision", basis.order_revision, 0, work.revision)
        or int_fault("started_revision", basis.started_revision, 0, work.revision)
        or int_fault("node_count", basis.node_count)
        or int_fault("age_ms", basis.age_ms, 0, MAX_ANSWER_AGE_MS)
    )


def _moved_on(work: Work, deployment: Deployment, basis: Basis) -> str:
    """What happened to the deployment since the check read it, "" for nothing that matters to a verdict."""
    now = (work.base.generation, deployment.order_revision, deployment.version)
    if now != (basis.generation, basis.order_revision, basis.version):
        return f"it is at order {now[:2]} for {deployment.version!a}"
    if basis.started_revision < max(deployment.order_revision, deployment.declared_revision):
        return f"its order is of revision {deployment.order_revision}, its nodes and policy of revision {deployment.declared_revision}"
    return ""


def _spoken_since(last: Verdict | None, body: RecordCheck) -> str:
    """The verdict that this one may not follow, "" when there is none.

    Checks that began at the same revision may have read minutes apart, in either order: without writes it stays the same.
    """
    if last is None:
        return ""
    if body.verdict == CONSISTENT and last.verdict != CONSISTENT and body.basis.started_revision < last.revision:
        return f"it was found {last.verdict}, recorded at revision {last.revision}, and this check began before that: check again"
    if last.basis is None or last.basis.started_revision <= body.basis.started_revision:
        return ""
    return f"a check that began at revision {last.basis.started_revision} has found it {last.verdict}"


def _cover_fault(deployment: Deployment, body: RecordCheck) -> Refusal | None:
    """A consistent verdict speaks of every node; of nothing that serves there is none."""
    standby = () if deployment.standby is None else deployment.standby.nodes
    count = len(deployment.primary.nodes) + len(standby)
    if body.basis.node_count != count:
        return Refusal("nodes_not_covered", f"{body.basis.node_count} nodes were seen, deployment {deployment.name!a} has {count}")
    if not deployment.version:
        return Refusal("nodes_not_covered", f"deployment {deployment.name!a} serves nothing yet")
    return None


def _longer(history: VerdictHistory | None, verdict: Verdict) -> VerdictHistory:
    """With one more verdict at its end; what is beyond the bounds goes, the oldest first."""
    before = history or VerdictHistory(verdict.deployment, 0, ())
    past = PastVerdict(verdict.verdict, verdict.summary, verdict.basis, verdict.principal, verdict.revision, verdict.recorded_ms)
    items = (*before.items, past)
    surplus, left = len(items) - MAX_PAST, MAX_PAST_BYTES
    for place in range(len(items) - 1, -1, -1):
        left -= len(encode_record(items[place]))
        if left < 0:
            surplus = max(surplus, place + 1)
            break
    if surplus <= 0:
        return msgspec.structs.replace(before, items=items)
    return VerdictHistory(verdict.deployment, items[surplus - 1].revision, items[surplus:])


def _shown(basis: Basis) -> str:
    return f"order {(basis.generation, basis.order_revision)} for {basis.version[:SHOWN]!a}, begun at revision {basis.started_revision}"
